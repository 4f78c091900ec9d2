"""A model learns to say where a digit lies; Transformers asks the exported folder, too.

`make demo TASK=boxes` runs this. Records have boxes in pixels of their images. The package writes them as
the family does, of the image as resized, and reads them back in the answers. The model's tower is first
trained on images, of training scans alone, as published towers are (`train_tower.py`), and is then frozen.
The language model starts from random numbers. Everything lies in runs/demo-boxes, the run in the folder `run`
there; the numbers are in summary.json.
"""

import json
import os
import platform
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from demo import configuration, evaluate, run, say, timed, versions
from evaluate import read_questions
from make_boxes import Box, make_boxes
from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.published import DEMO

HERE = Path(__file__).resolve().parent
FAMILY = "qwen3_vl"
FOLDER = Path("runs/demo-boxes")
ENOUGH = 0.5  # of what two boxes cover together, that both cover
PROCESSES = 2  # each has half of the samples
SETTINGS = (
    *("tp=1", "micro_batch_size=8", "global_batch_size=16", "dataset_type=hf"),
    *("freeze=[tower,projector]", "lr=4e-3", "steps=1000", "eval_every=500"),
)


def main() -> None:
    if os.environ["TASK"] != "boxes" or os.environ.get("FAMILY") not in (None, "", FAMILY):
        sys.exit(f"TASK=boxes is all there is, with FAMILY={FAMILY}.")
    started = time.monotonic()
    configuration(FAMILY)  # ends with the reason if a setting on the command line is not one
    shutil.rmtree(FOLDER, ignore_errors=True)
    tower_seconds = prepare()
    say(f"training the language model on {PROCESSES} processes; the tower is frozen")
    usage = timed(train)
    say("answering the held-out questions with Megatron")
    held_out = FOLDER / "raw/held_out.jsonl"
    answers = evaluate("megatron", FOLDER / "run", held_out, FOLDER)
    say("exporting to a Hugging Face folder, and answering with Transformers")
    run(["-m", "megatron_vlm.cli", "export", str(FOLDER / "run"), str(FOLDER / "hf")])
    hf_answers = evaluate("transformers", FOLDER / "hf", held_out, FOLDER)
    summary = {
        **judged(answers, hf_answers, held_out),
        "tower_seconds": tower_seconds,
        **usage,
        "total_seconds": round(time.monotonic() - started, 1),
        "steps": run_config().train.steps,
        "family": FAMILY,
        "layout": f"{PROCESSES} processes, dp {PROCESSES}, cpu",
        "versions": {"python": platform.python_version(), **versions()},
    }
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    close_with(summary)


def prepare() -> float:
    """Write the data, and the checkpoint meanwhile; returns the seconds that the checkpoint took."""
    say("writing canvases with digits, and questions about where these are")
    say(f"meanwhile, building a tiny {FAMILY} of random weights, and training its tower on images")
    build = [str(HERE / "make_checkpoint.py"), "boxes", str(FOLDER / "start")]
    with ThreadPoolExecutor() as pool:
        tower = pool.submit(timed, lambda: run(build))
        print(make_boxes(FOLDER / "raw"), flush=True)
    return tower.result()["train_seconds"]


def train() -> None:
    data = (f"train_data_path={FOLDER}/raw/train.jsonl", f"valid_data_path={FOLDER}/raw/held_out.jsonl")
    places = (f"run_dir={FOLDER}/run", f"hf_path={FOLDER}/start", *data)
    arguments = [f"--recipe={FAMILY}{DEMO}", f"--nproc={PROCESSES}", *places, *SETTINGS, *sys.argv[1:]]
    run([str(HERE.parent / "run_recipe.py"), *arguments])


def judged(answers: list[str], hf_answers: list[str], held_out: Path) -> dict[str, float | int | str]:
    """The scores of the run's answers and of the export's; draws the run's."""
    questions = read_questions(held_out)
    boxes, hf_boxes = boxes_of(questions, answers), boxes_of(questions, hf_answers)
    overlaps, hf_overlaps = ([*map(overlap, said, map(true_box, questions))] for said in (boxes, hf_boxes))
    others = [json.loads(line)["others"] for line in held_out.read_text(encoding="utf-8").splitlines()]
    on_others = [
        max(overlap(box, other) for other in there) for box, there in zip(boxes, others, strict=True)
    ]
    draw_answers(questions, boxes, overlaps, FOLDER / "contact_sheet.png")
    return {
        "boxes_right": share_right(overlaps),
        "boxes_on_another_digit": share_right(on_others),
        "boxes_right_of_export": share_right(hf_overlaps),
        "mean_overlap": sum(overlaps) / len(overlaps),
        "same_answers": sum(a == b for a, b in zip(answers, hf_answers, strict=True)) / len(answers),
        "held_out_questions": len(questions),
        "example": answers[0],
    }


def run_config() -> RunConfig:
    from megatron_vlm.overrides import from_yaml

    return from_yaml((FOLDER / "run/config.yaml").read_text(encoding="utf-8"))


def boxes_of(questions: list[dict], answers: list[str]) -> list[Box | None]:
    """The box that each answer names, in pixels of its image; None if it names none."""
    from megatron_vlm.extras.grounding.boxes import Boxes
    from megatron_vlm.models.hf import open_source

    source = open_source(str(FOLDER / "hf"))
    reader = Boxes(source.processor, run_config().data, source.needs.box_format)
    found = []
    for question, answer in zip(questions, answers, strict=True):
        shapes = reader.parse(answer, Image.open(question["images"][0]).size)
        boxes = [tuple(shape.numbers) for shape in shapes if len(shape.numbers) == 4]
        found.append(boxes[0] if boxes else None)
    return found


def true_box(question: dict) -> Box:
    return tuple(question["objects"]["bbox"][0])


def overlap(box: Box | None, other: Box) -> float:
    """What both boxes cover, as a share of what they cover together."""
    if box is None or not area(box):
        return 0.0
    both = shared_area(box, other)
    return both / (area(box) + area(other) - both)


def shared_area(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0, width) * max(0, height)


def area(box: Box) -> float:
    return shared_area(box, box)


def share_right(overlaps: list[float]) -> float:
    return sum(each > ENOUGH for each in overlaps) / len(overlaps)


def draw_answers(
    questions: list[dict], boxes: list, overlaps: list[float], file: Path, count: int = 36
) -> None:
    """Draw the boxes that were said, in red, and the true ones, in green; the least overlap first."""
    from PIL import ImageDraw

    from contact_sheet import contact_sheet

    shown = sorted(range(len(questions)), key=overlaps.__getitem__)
    shown = shown[: count // 2] + shown[-count // 2 :]
    pictures = []
    for index in shown:
        picture = Image.open(questions[index]["images"][0]).convert("RGB")
        pen = ImageDraw.Draw(picture)
        for box, colour in ((true_box(questions[index]), "lime"), (boxes[index], "red")):
            if box and area(box):
                pen.rectangle(box, outline=colour, width=2)
        pictures.append([picture])
    digits = [questions[index]["objects"]["ref"][0] for index in shown]
    captions = [
        f"where is the {digit}?  {overlaps[index]:.0%}" for digit, index in zip(digits, shown, strict=True)
    ]
    contact_sheet(pictures, captions, [overlaps[index] > ENOUGH for index in shown], file)


def close_with(summary: dict) -> None:
    print(
        f"\nfound {summary['boxes_right']:.1%} of the held-out digits: said and true boxes have more than"
        f" half in common ({summary['mean_overlap']:.0%} in the mean)"
        f"\n{summary['boxes_on_another_digit']:.1%} of the boxes lie on another digit; without heed to the"
        " question, at most 5 of 12 would be right"
        f"\nthe exported folder found {summary['boxes_right_of_export']:.1%}, with"
        f" {summary['same_answers']:.1%} of the answers the same to the letter"
        f"\nan answer: {summary['example']}"
        "\nthe tower was first trained on images, the language model began with random numbers"
        f"\ntower {summary['tower_seconds']} s, training {summary['train_seconds']} s,"
        f" everything {summary['total_seconds']} s"
        f"\n\nlook at  {FOLDER}/contact_sheet.png  {FOLDER}/run/report.html  {FOLDER}/summary.json"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
