"""Measure what boxes cost: python tools/bench_boxes.py [--families qwen2_5_vl] [--rounds 15]

It encodes rows with an image and 50 boxes on one core, in turns with the same rows whose text is written
already (`written`) and with the same rows without boxes (`without`); seconds are CPU time. It prints, and
writes to reports/bench_boxes.json, the median over rounds of the ratio of a round's seconds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import bench_data
from bench_data import (
    FAMILIES,
    IMAGES,
    ROOT,
    SAMPLES,
    TINY_FAMILIES,
    default_corpus,
    encoder_of,
    jpeg,
    seconds,
    versions,
)
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.chatml.sample import ChatMLSample, make_sample
from megatron_vlm.models.families import load

BOXES, MOST = 50, 1.2
QUESTION = "<image>Find everything."


def sample_of(image: bytes, reply: str, objects: dict | None = None) -> ChatMLSample:
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": reply}]
    return make_sample(
        parse_record({"messages": turns, "objects": objects}), [image], [], __key__="0", __restore_key__=()
    )


def objects_of(size: tuple[int, int], seed: int) -> dict:
    rng = random.Random(seed)
    boxes = []
    for _ in range(BOXES):
        left, top = (rng.uniform(0, side - 20) for side in size)
        boxes.append([left, top, rng.uniform(left + 10, size[0]), rng.uniform(top + 10, size[1])])
    return {"ref": [f"thing {number}" for number in range(BOXES)], "bbox": boxes}


def measure(family: str, size: tuple[int, int], rounds: int) -> dict:
    parts = TINY_FAMILIES[family]
    encoder = encoder_of(family, parts.processor(default_corpus(), parts.template, **FAMILIES[family]))
    given: dict[str, list[Callable[[], ChatMLSample]]] = {"boxes": [], "written": [], "without": []}
    for seed in range(SAMPLES):
        image, objects = jpeg(size, seed), objects_of(size, seed)
        boxes = sample_of(image, "<objects>", objects)
        filled = encoder.documents.boxes.written(boxes.messages, boxes.objects, [(image, None, None)])
        reply = filled[-1]["content"][0]["text"]
        given["boxes"].append(lambda image=image, objects=objects: sample_of(image, "<objects>", objects))
        given["written"].append(lambda image=image, reply=reply: sample_of(image, reply))
        given["without"].append(lambda image=image: sample_of(image, "Nothing."))
    taken: dict[str, list[float]] = {name: [] for name in given}
    for _ in range(rounds):
        for name, samples in given.items():
            taken[name].append(seconds(lambda sample: encoder.encode_sample(sample()), samples, 1))
    ratios = {
        other: round(median(a / b for a, b in zip(taken["boxes"], taken[other], strict=True)), 3)
        for other in ("written", "without")
    }
    return {"family": family, "image": "x".join(map(str, size)), "boxes": BOXES} | ratios


def results(families: list[str], rounds: int) -> Iterator[dict]:
    for family in families:
        for size in IMAGES:
            row = measure(family, size, rounds)
            print(row, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # llava's processor cuts off sides, and with them boxes
    known = [family for family in FAMILIES if load(family).box_format and family != "llava"]
    parser.add_argument("--families", nargs="+", default=known, choices=known)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench_boxes.json")
    options = parser.parse_args()
    bench_data.transformers_logging.set_verbosity_error()
    rows = list(results(options.families, options.rounds))
    report = {"rounds": options.rounds, "versions": versions(), "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    worst = max(row["without"] for row in rows)
    print(f"at most {worst} times a row without boxes; at most {MOST} are wanted")
    raise SystemExit(worst > MOST)


if __name__ == "__main__":
    main()
