"""Questions about where a digit lies, as a JSONL with JPEG images beside it.

    python make_boxes.py OUTPUT

The digits are scikit-learn's, as in `make_digits.py`, on dark canvases of several sizes. A record is as it is
for ms-swift: its box is in pixels of its image, whatever a family makes of it.

    OUTPUT/images/train-00042.jpg
    OUTPUT/train.jsonl         {"messages": ..., "images": ..., "objects": {"ref": ["7"], "bbox": [[...]]}}
    OUTPUT/held_out.jsonl      about scans that train.jsonl never shows, and always with a second digit beside

A model of random weights learns to find a digit among two only when it can read one and can say where one is.
So a part of the training questions are about a digit that is alone.
"""

import json
import random
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from PIL import Image

WHICH, WHERE = "<image>Which digit is this?", "<image>Where is the <ref-object>?"
KINDS = {"which": 0.2, "alone": 0.2, "where": 0.6}  # shares of the training questions
SIDES = (112, 140, 168, 224)  # of canvases, in pixels
SHARES = (0.35, 0.45)  # of a canvas's side: the least and the greatest side of a scan
FAINTEST = 4  # of 16, that belongs to a digit's box
BICUBIC = Image.Resampling.BICUBIC
Box = tuple[int, int, int, int]  # left, top, right, bottom


def make_boxes(output: Path, train: int = 16_000, held_out: int = 300, seed: int = 0) -> dict[str, int]:
    """Write the data; returns the number of records of each file. Equal arguments give equal files."""
    from sklearn.datasets import load_digits  # slow to import

    scans, rng = load_digits(), random.Random(seed)
    numbers = list(range(len(scans.target)))
    rng.shuffle(numbers)
    sides = {"train": (numbers[held_out:], train), "held_out": (numbers[:held_out], held_out)}
    (output / "images").mkdir(parents=True, exist_ok=True)
    for side, (own, count) in sides.items():
        with (output / f"{side}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                kind = rng.choices([*KINDS], [*KINDS.values()])[0] if side == "train" else "where"
                image = f"images/{side}-{number:05d}.jpg"
                boxes = draw(scans, own, 2 if kind == "where" else 1, output / image, rng)
                digit = rng.choice([*boxes])
                name = f"{kind}-{side}-{number:05d}"
                file.write(json.dumps(record(name, image, digit, boxes[digit])) + "\n")
    return {side: count for side, (_, count) in sides.items()}


def draw(scans, numbers: list[int], count: int, file: Path, rng: random.Random) -> dict[int, Box]:
    """Write a canvas with `count` different digits that do not overlap; returns the box of each digit."""
    side = rng.choice(SIDES)
    canvas, boxes = np.zeros((side, side), np.uint8), {}
    for left, top, right, _ in free_places(side, count, rng):
        number = rng.choice([number for number in numbers if int(scans.target[number]) not in boxes])
        scan, length = scans.images[number], right - left
        scaled = Image.fromarray((scan * (255 / 16)).astype(np.uint8)).resize((length, length), BICUBIC)
        canvas[top : top + length, left : left + length] = np.asarray(scaled)
        rows, columns = (axis * length / len(scan) for axis in np.nonzero(scan >= FAINTEST))
        cell = length / len(scan)
        ends = (left + columns.min(), top + rows.min(), left + columns.max() + cell, top + rows.max() + cell)
        boxes[int(scans.target[number])] = tuple(map(round, ends))
    Image.fromarray(canvas).convert("RGB").save(file, quality=92)
    return boxes


def free_places(side: int, count: int, rng: random.Random) -> list[Box]:
    """Squares on a canvas that do not overlap."""
    while True:
        places = []
        for _ in range(count):
            length = round(side * rng.uniform(*SHARES))
            left, top = rng.randint(0, side - length), rng.randint(0, side - length)
            places.append((left, top, left + length, top + length))
        if not any(shared_area(one, other) for one, other in combinations(places, 2)):
            return places


def shared_area(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0, width) * max(0, height)


def record(name: str, image: str, digit: int, box: Box) -> dict:
    if name.startswith("which"):
        return {"id": name, "messages": exchange(WHICH, str(digit)), "images": [image]}
    objects = {"ref": [str(digit)], "bbox": [list(box)], "bbox_type": "real"}
    return {"id": name, "messages": exchange(WHERE, "<bbox>"), "images": [image], "objects": objects}


def exchange(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for side, count in make_boxes(Path(sys.argv[1])).items():
        print(f"{side}.jsonl: {count} records")
