"""Draws shapes on a picture."""

from collections.abc import Iterable

from PIL import Image, ImageDraw

from megatron_vlm.data.grounding.boxes import Found

COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080")


def draw(picture: Image.Image, shapes: Iterable[Found]) -> Image.Image:
    """The picture with the shapes, given in its pixels, and their labels."""
    picture = picture.convert("RGB")
    pen = ImageDraw.Draw(picture)
    width = max(1, max(picture.size) // 200)
    far = 2 * max(picture.size)
    for number, shape in enumerate(shapes):
        colour = COLOURS[number % len(COLOURS)]
        numbers = [min(max(number, -far), far) for number in shape.numbers]  # a model may write any
        corners = list(zip(numbers[::2], numbers[1::2], strict=True))
        (x, y), *others = corners
        if not others:
            pen.ellipse((x - 2 * width, y - 2 * width, x + 2 * width, y + 2 * width), fill=colour)
        elif len(corners) == 2:
            (left, right), (top, bottom) = (sorted(axis) for axis in zip(*corners, strict=True))
            pen.rectangle((left, top, right, bottom), outline=colour, width=width)
        else:
            pen.polygon(corners, outline=colour, width=width)
        if shape.label:
            pen.text((x + 2 * width, y + 2 * width), shape.label, fill=colour)
    return picture
