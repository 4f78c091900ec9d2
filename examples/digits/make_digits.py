"""Questions about scanned handwritten digits, as a ShareGPT JSONL with JPEG images beside it.

    python make_digits.py OUTPUT

scikit-learn ships the 1,797 digits of the UCI set (8x8 pixels, 0 to 16), so nothing is downloaded.

    OUTPUT/images/0042.jpg     every digit once, upscaled
    OUTPUT/train.jsonl         questions about one image and about two (both digits, or their sum)
    OUTPUT/held_out.jsonl      the same kinds of question about images that train.jsonl never shows
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

ONE_IMAGE = (
    "<image>Which digit is this?",
    "<image>What number is written here?",
    "Look at this scan: <image> Which digit does it show?",
)
READ_TWO = (
    "<image><image> Read these two digits.",
    "First <image> and then <image>. Which digits are they?",
)
ADD_TWO = (
    "<image><image> What is the sum of these two digits?",
    "First <image> and then <image>. What is their sum?",
)


def make_digits(
    output: Path,
    held_out_images: int = 297,
    train_pairs: int = 1000,
    held_out_pairs: int = 100,
    size: int = 56,
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
        for number in range(pairs[side]):
            make = read_two_record if number % 4 else add_two_record
            records.append(make(rng.sample(indices, 2), digits.target, rng))
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


def read_two_record(indices: list[int], target: np.ndarray, rng: random.Random) -> dict:
    answer = "".join(str(target[index]) for index in indices)
    return record(f"read-{numbered(indices)}", indices, rng.choice(READ_TWO), answer)


def add_two_record(indices: list[int], target: np.ndarray, rng: random.Random) -> dict:
    answer = str(target[indices].sum())
    return record(f"sum-{numbered(indices)}", indices, rng.choice(ADD_TWO), answer)


def numbered(indices: list[int]) -> str:
    return "-".join(f"{index:04d}" for index in indices)


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
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    output = Path(sys.argv[1])
    for side, count in make_digits(output).items():
        print(f"{output / side}.jsonl: {count} records")


if __name__ == "__main__":
    main()
