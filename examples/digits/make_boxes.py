"""Questions about where a digit lies, as a JSONL with JPEG images beside it.

    python make_boxes.py OUTPUT

The digits are scikit-learn's, as in `make_digits.py`, on dark canvases. A record is as it is
for ms-swift: its box is in pixels of its image, whatever a family makes of it.

    OUTPUT/images/train-00042.jpg
    OUTPUT/train.jsonl         {"messages": ..., "images": ..., "objects": {"ref": ["7"], "bbox": [[...]]}}
    OUTPUT/held_out.jsonl      about scans that train.jsonl never shows

Two or three different digits lie on a canvas, each in a cell of its own and free within it. A model that does
not heed the question names the right one of them in 5 of 12 cases. The question stands before the image, so
each visual token already knows what is sought. A part of the training questions asks which digit a canvas
shows, and there it is alone.
"""

import json
import random
import sys
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

WHICH, WHERE = "Which digit is this?<image>", "Where is the <ref-object>?<image>"
WHICH_SHARE = 0.4  # of the training canvases, and with one question each a fifth of the questions
OF_WHICH = 8  # the weight of a digit in the loss: a box has twenty times as many tokens
UNSEEN = 297  # scans that are held out
SIDE, CELLS = 100, 4  # of a canvas: its pixels, and in how many cells they lie
CELL = SIDE // CELLS
LEAST = 23  # the side of the smallest scan; the largest one fills its cell
Box = tuple[int, int, int, int]  # left, top, right, bottom
Scans = list[list[np.ndarray]]  # of each digit


def make_boxes(output: Path, train: int = 13_000, held_out: int = 300, seed: int = 0) -> dict[str, int]:
    """Write so many canvases of each kind; returns the number of records. Equal arguments give equal files.

    A training canvas is asked about each of its digits, a held-out one about one.
    """
    rng = random.Random(seed)
    counts = {"train": train, "held_out": held_out}
    (output / "images").mkdir(parents=True, exist_ok=True)
    for side, count in counts.items():
        records = []
        for number in range(count):
            which = side == "train" and rng.random() < WHICH_SHARE
            canvas, boxes = draw(scans(side), 1 if which else 2 + number % 2, rng)
            image = f"images/{side}-{number:05d}.jpg"
            canvas.convert("RGB").save(output / image, quality=92)
            name = f"{'which' if which else 'where'}-{side}-{number:05d}"
            asked = [*boxes] if side == "train" else [*boxes][:1]
            records += [record(f"{name}-{digit}", image, digit, boxes) for digit in asked]
        lines = "".join(json.dumps(each) + "\n" for each in records)
        (output / f"{side}.jsonl").write_text(lines, encoding="utf-8")
        counts[side] = len(records)
    return counts


@cache
def scans(side: str) -> Scans:
    """The scans of "train" or "held_out"; no scan is in both."""
    from sklearn.datasets import load_digits  # slow to import

    found = load_digits()
    numbers = list(range(len(found.target)))
    random.Random(0).shuffle(numbers)
    mine = numbers[UNSEEN:] if side == "train" else numbers[:UNSEEN]
    return [[found.images[number] for number in mine if found.target[number] == n] for n in range(10)]


def draw(of_digit: Scans, count: int, rng: random.Random) -> tuple[Image.Image, dict[int, Box]]:
    """A canvas with `count` different digits, and the square of each in a random order."""
    canvas, boxes = Image.new("L", (SIDE, SIDE)), {}
    for digit, place in zip(rng.sample(range(10), count), rng.sample(range(CELLS**2), count), strict=True):
        side = rng.randint(LEAST, CELL)
        left = place % CELLS * CELL + rng.randint(0, CELL - side)
        top = place // CELLS * CELL + rng.randint(0, CELL - side)
        scan = Image.fromarray((rng.choice(of_digit[digit]) * (255 / 16)).astype(np.uint8))
        canvas.paste(scan.resize((side, side), Image.Resampling.BICUBIC), (left, top))
        boxes[digit] = (left, top, left + side, top + side)
    return canvas, boxes


def record(name: str, image: str, digit: int, boxes: dict[int, Box]) -> dict:
    """A question about one digit of a canvas; `others` are the boxes of the others, for the demo alone."""
    if name.startswith("which"):
        question, answer = exchange(WHICH, str(digit))
        return {"id": name, "messages": [question, answer | {"weight": OF_WHICH}], "images": [image]}
    objects = {"ref": [str(digit)], "bbox": [list(boxes[digit])], "bbox_type": "real"}
    others = [list(box) for other, box in boxes.items() if other != digit]
    messages = exchange(WHERE, "<bbox>")
    return {"id": name, "messages": messages, "images": [image], "objects": objects, "others": others}


def exchange(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for side, count in make_boxes(Path(sys.argv[1])).items():
        print(f"{side}.jsonl: {count} records")
