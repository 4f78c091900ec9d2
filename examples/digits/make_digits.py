"""Questions about scanned handwritten digits, as a ShareGPT JSONL with JPEG images beside it.

scikit-learn ships the 1,797 digits of the UCI set (8x8 pixels, 0 to 16), so nothing is downloaded.

    OUTPUT/images/0042.jpg     every digit once, upscaled
    OUTPUT/train.jsonl         questions about one image and about two (their sum)
    OUTPUT/held_out.jsonl      the same kinds of question about images that train.jsonl never shows
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

ONE_IMAGE = (
    "<image>Which digit is this?",
    "<image>What number is written here?",
    "Look at this scan: <image> Which digit does it show?",
)
TWO_IMAGES = (
    "<image><image> What is the sum of these two digits?",
    "First <image> and then <image>. What is their sum?",
)


def make_digits(
    output: Path,
    held_out_images: int = 297,
    train_pairs: int = 1000,
    held_out_pairs: int = 50,
    size: int = 112,
    seed: int = 0,
) -> dict[str, int]:
    """Write the data to `output`; returns how many records each file holds. Equal arguments, equal files.

    Each image has one question of its own; pairs join two different images of the same side of the split.
    """
    digits = load_digits()
    rng = random.Random(seed)
    numbers = list(range(len(digits.target)))
    rng.shuffle(numbers)
    sides = {"train": numbers[held_out_images:], "held_out": numbers[:held_out_images]}
    pairs = {"train": train_pairs, "held_out": held_out_pairs}
    write_images(digits.images, output / "images", size)
    counts = {}
    for side, indices in sides.items():
        records = [one_image_record(index, digits.target, rng) for index in indices]
        records += [two_image_record(rng.sample(indices, 2), digits.target, rng) for _ in range(pairs[side])]
        rng.shuffle(records)
        lines = (json.dumps(record) + "\n" for record in records)
        (output / f"{side}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[side] = len(records)
    return counts


def write_images(scans: np.ndarray, folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, scan in enumerate(scans):
        grey = Image.fromarray((scan * (255 / 16)).astype(np.uint8))
        grey.resize((size, size), Image.Resampling.BICUBIC).save(folder / name_of(index), quality=92)


def one_image_record(index: int, target: np.ndarray, rng: random.Random) -> dict:
    return record(f"digit-{index:04d}", [index], rng.choice(ONE_IMAGE), int(target[index]))


def two_image_record(indices: list[int], target: np.ndarray, rng: random.Random) -> dict:
    key = "sum-" + "-".join(f"{index:04d}" for index in indices)
    return record(key, indices, rng.choice(TWO_IMAGES), int(target[indices].sum()))


def record(key: str, indices: list[int], question: str, answer: int) -> dict:
    return {
        "id": key,
        "images": [f"images/{name_of(index)}" for index in indices],
        "conversations": [
            {"from": "human", "value": question},
            {"from": "gpt", "value": str(answer)},
        ],
    }


def name_of(index: int) -> str:
    return f"{index:04d}.jpg"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the digits data set.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--held-out-images", type=int, default=297)
    parser.add_argument("--train-pairs", type=int, default=1000)
    parser.add_argument("--held-out-pairs", type=int, default=50)
    parser.add_argument("--size", type=int, default=112, help="side of the square images in pixels")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    for side, count in make_digits(**arguments).items():
        print(f"{arguments['output'] / side}.jsonl: {count} records")


if __name__ == "__main__":
    main()
