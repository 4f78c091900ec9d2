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
KINDS = {"which": 0.2, "alone": 0.15, "where": 0.65}  # shares of the training questions
UNSEEN = 297  # scans that are held out
OF_WHICH = 4  # the weight of a digit in the loss: a box has nine times as many tokens
SIDES = (112, 140, 168, 224)  # of canvases, in pixels
SHARES = (0.33, 0.43)  # of a canvas's side: the least and the greatest side of a scan
Box = tuple[int, int, int, int]  # left, top, right, bottom


def make_boxes(output: Path, train: int = 16_000, held_out: int = 300, seed: int = 0) -> dict[str, int]:
    """Write the data; returns the number of records of each file. Equal arguments give equal files."""
    from sklearn.datasets import load_digits  # slow to import

    scans, rng = load_digits(), random.Random(seed)
    numbers = list(range(len(scans.target)))
    rng.shuffle(numbers)
    sides = {"train": (numbers[UNSEEN:], train), "held_out": (numbers[:UNSEEN], held_out)}
    (output / "images").mkdir(parents=True, exist_ok=True)
    for side, (own, count) in sides.items():
        of_digit = [[scans.images[number] for number in own if scans.target[number] == n] for n in range(10)]
        with (output / f"{side}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                kind = rng.choices([*KINDS], [*KINDS.values()])[0] if side == "train" else "where"
                image = f"images/{side}-{number:05d}.jpg"
                boxes = draw(of_digit, 2 if kind == "where" else 1, output / image, rng)
                digit = rng.choice([*boxes])
                name = f"{kind}-{side}-{number:05d}"
                file.write(json.dumps(record(name, image, digit, boxes[digit])) + "\n")
    return {side: count for side, (_, count) in sides.items()}


def draw(of_digit: list[list[np.ndarray]], count: int, file: Path, rng: random.Random) -> dict[int, Box]:
    """Write a canvas with `count` different digits that do not overlap; returns the square of each digit."""
    side = rng.choice(SIDES)
    canvas = np.zeros((side, side), np.uint8)
    boxes = dict(zip(rng.sample(range(10), count), free_places(side, count, rng), strict=True))
    for digit, (left, top, right, bottom) in boxes.items():
        scan = Image.fromarray((rng.choice(of_digit[digit]) * (255 / 16)).astype(np.uint8))
        scan = scan.resize((right - left, bottom - top), Image.Resampling.BICUBIC)
        canvas[top:bottom, left:right] = np.asarray(scan)
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
        question, answer = exchange(WHICH, str(digit))
        return {"id": name, "messages": [question, answer | {"weight": OF_WHICH}], "images": [image]}
    objects = {"ref": [str(digit)], "bbox": [list(box)], "bbox_type": "real"}
    return {"id": name, "messages": exchange(WHERE, "<bbox>"), "images": [image], "objects": objects}


def exchange(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for side, count in make_boxes(Path(sys.argv[1])).items():
        print(f"{side}.jsonl: {count} records")
