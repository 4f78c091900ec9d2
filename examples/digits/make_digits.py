"""Questions about scanned handwritten digits, as a ShareGPT JSONL with JPEG images beside it.

    python make_digits.py OUTPUT

scikit-learn ships the 1,797 digits of the UCI set (8x8 pixels, 0 to 16), so nothing is downloaded.

    OUTPUT/images/0042.jpg     every scan, upscaled; 0042v1.jpg is the same one, turned and shifted
    OUTPUT/train.jsonl         questions about one image and about two (both digits, or their sum)
    OUTPUT/documents.jsonl     the same images with what they show, as documents (`make_documents`)
    OUTPUT/held_out.jsonl      the same kinds of question about images that train.jsonl never shows
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

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
DOCUMENT = "Scans of digits."


@dataclass(frozen=True)
class Digit:
    """One image: its scan, the digit on it, and the variant's number (0 is the scan itself)."""

    index: int
    digit: int
    variant: int

    @property
    def name(self) -> str:
        return f"{self.index:04d}" + (f"v{self.variant}" if self.variant else "")

    @property
    def file(self) -> str:
        return f"images/{self.name}.jpg"


def make_digits(
    output: Path,
    held_out_images: int = 297,
    variants: int = 2,
    train_pairs: int = 1500,
    held_out_pairs: int = 100,
    size: int = 56,
    seed: int = 0,
) -> dict[str, int]:
    """Write the data to `output`; returns the number of records per file. Equal arguments give equal files.

    Each image has its own question; pairs join two different images from the same side of the split. A
    training scan has `variants` more images, rotated and shifted a little; held-out scans have none.
    """
    from sklearn.datasets import load_digits  # slow to import, and not needed for the questions

    digits = load_digits()
    rng = random.Random(seed)
    numbers = list(range(len(digits.target)))
    rng.shuffle(numbers)
    sides = {"train": numbers[held_out_images:], "held_out": numbers[:held_out_images]}
    drawn = {"train": range(variants + 1), "held_out": range(1)}
    pairs = {"train": train_pairs, "held_out": held_out_pairs}
    counts = {}
    for side, indices in sides.items():
        images = [
            Digit(index, int(digits.target[index]), variant) for index in indices for variant in drawn[side]
        ]
        for image in images:
            write_image(digits.images[image.index], output / image.file, size, image.variant, rng)
        records = [one_image_record(image, rng) for image in images]
        for number in range(pairs[side]):
            make = read_two_record if number % 4 else add_two_record
            records.append(make(rng.sample(images, 2), rng))
        rng.shuffle(records)
        lines = (json.dumps(record) + "\n" for record in records)
        (output / f"{side}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[side] = len(records)
    return counts


def make_documents(output: Path, count: int = 1500, seed: int = 0) -> int:
    """Write `documents.jsonl` beside the training questions: texts and one to four of their images."""
    rng = random.Random(seed)
    lines = (output / "train.jsonl").read_text(encoding="utf-8").splitlines()
    known = [record for record in map(json.loads, lines) if record["id"].startswith("digit")]
    digits = [(record["images"][0], record["conversations"][1]["value"]) for record in known]
    with (output / "documents.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(count):
            shown = rng.sample(digits, rng.randint(1, 4))
            texts = [DOCUMENT, *(text for _, digit in shown for text in (None, f"This is a {digit}."))]
            images = [None, *(image for name, _ in shown for image in (name, None))]
            file.write(json.dumps({"texts": texts, "images": images}) + "\n")
    return count


def write_image(scan: np.ndarray, file: Path, size: int, variant: int, rng: random.Random) -> None:
    """Write an upscaled scan; variants above 0 turn by up to 12 degrees and shift by up to a pixel of it."""
    image = Image.fromarray((scan * (255 / 16)).astype(np.uint8)).resize(
        (size, size), Image.Resampling.BICUBIC
    )
    if variant:
        pixel = size / len(scan)
        shift = (rng.uniform(-pixel, pixel), rng.uniform(-pixel, pixel))
        image = image.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR, translate=shift)
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, quality=92)


def one_image_record(image: Digit, rng: random.Random) -> dict:
    return record("digit", [image], rng.choice(ONE_IMAGE), image.digit)


def read_two_record(images: list[Digit], rng: random.Random) -> dict:
    return record("read", images, rng.choice(READ_TWO), "".join(str(image.digit) for image in images))


def add_two_record(images: list[Digit], rng: random.Random) -> dict:
    return record("sum", images, rng.choice(ADD_TWO), sum(image.digit for image in images))


def record(kind: str, images: list[Digit], question: str, answer: int | str) -> dict:
    return {
        "id": "-".join([kind, *(image.name for image in images)]),
        "images": [image.file for image in images],
        "conversations": [
            {"from": "human", "value": question},
            {"from": "gpt", "value": str(answer)},
        ],
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    output = Path(sys.argv[1])
    for side, count in make_digits(output).items():
        print(f"{output / side}.jsonl: {count} records")


if __name__ == "__main__":
    main()
