"""Draw one image and what each family writes for its two boxes: python tools/boxes_picture.py

It writes docs/images/boxes.png. Processors have the image settings of the published checkpoints.
"""

from __future__ import annotations

import io
import sys
from itertools import chain
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont

from megatron_vlm.config import DataConfig
from megatron_vlm.extras.grounding.boxes import Boxes, ParsedAnswer, draw
from megatron_vlm.extras.grounding.objects import read_objects
from megatron_vlm.models.families import load

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `tiny` is not installed

from tiny.checkpoints import TINY_FAMILIES  # noqa: E402
from tiny.corpus import default_corpus  # noqa: E402

SIZE = (640, 428)
OBJECTS = {"ref": ["ball", "door"], "bbox": [[90, 270, 190, 370], [380, 60, 500, 360]]}
MESSAGE = {"role": "assistant", "content": [{"type": "text", "text": "<objects>"}]}
WIDTH, MARGIN, FONT_SIZE = 1400, 24, 17


def scene() -> Image.Image:
    """A ball and a door in front of a wall."""
    picture = Image.new("RGB", SIZE, "#d8d2c4")
    pen = ImageDraw.Draw(picture)
    pen.rectangle((0, 360, *SIZE), fill="#8a7f6d")
    ball, door = OBJECTS["bbox"]
    pen.ellipse(ball, fill="#c8442e")
    pen.rectangle(door, fill="#5d6f87")
    pen.ellipse((475, 205, 488, 218), fill="#e0c060")
    return picture


def words() -> dict[str, list[str]]:
    """What families write, and which families write it."""
    out = io.BytesIO()
    scene().save(out, "PNG")
    image, objects = (out.getvalue(), None, None), read_objects(OBJECTS, images=1)
    texts: dict[str, list[str]] = {}
    for name, parts in TINY_FAMILIES.items():
        if (box_format := load(name).box_format) is None or name == "llava":  # which cuts the sides off
            continue
        processor = parts.processor(default_corpus(), parts.template, **(parts.published or {}))
        (message,) = Boxes(processor, DataConfig(), box_format).written([MESSAGE], objects, [image])
        texts.setdefault(message["content"][0]["text"], []).append(name)
    return texts


def main() -> None:
    lines = []
    for text, families in words().items():
        written = (wrap(line.expandtabs(4), 66, drop_whitespace=False) for line in text.splitlines())
        lines += [", ".join(families), *("    " + line for line in chain.from_iterable(written)), ""]
    left = draw(
        scene(),
        [ParsedAnswer(box, label) for box, label in zip(OBJECTS["bbox"], OBJECTS["ref"], strict=True)],
    )
    step = FONT_SIZE + 6
    page = Image.new("RGB", (WIDTH, 2 * MARGIN + max(SIZE[1], step * len(lines))), "white")
    page.paste(left, (MARGIN, MARGIN))
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(FONT_SIZE)
    for number, line in enumerate(lines):
        colour = "#202020" if line.startswith(" ") else "#4363d8"
        pen.text((SIZE[0] + 2 * MARGIN, MARGIN + number * step), line, fill=colour, font=font)
    page.save(ROOT / "docs" / "images" / "boxes.png", optimize=True)


if __name__ == "__main__":
    main()
