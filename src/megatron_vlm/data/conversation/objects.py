"""Boxes, points and polygons that a record names, and the placeholders for them in its text.

`objects` is as ms-swift has it: `bbox`, `ref`, `bbox_type`, `image_id`, and `name`; or a list of objects. See
docs/boxes.md.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_vlm.data.conversation.turns import THINKING_KEYS, BadSample

REASON = "bad_objects"
UNITS = ("real", "norm1000", "norm1")
SHAPES = ("bbox", "box", "point", "polygon")  # other words for a placeholder, and for an object's numbers
LABELS = ("ref-object", "ref", "label")
PLACEHOLDER = re.compile(r"<(?:(bbox|box|point|polygon)(?::([^<>\s]+))?|(ref-object|ref)|objects)>")
POINT, BOX = 2, 4  # how many numbers each has; a polygon has more
_KINDS = {POINT: "point", BOX: "box"}


@dataclass(frozen=True)
class Shape:
    """A point (x, y), a box (x1, y1, x2, y2) or a polygon (x1, y1, x2, y2, x3, y3, ...) in an image."""

    numbers: list[float]
    image: int = 0
    name: str | None = None

    @property
    def kind(self) -> str:
        return _KINDS.get(len(self.numbers), "polygon")


@dataclass(frozen=True)
class Objects:
    shapes: list[Shape]
    labels: list[str]
    unit: str  # one of UNITS


def read_objects(written: Any, images: int) -> Objects:
    """The objects of a record with so many images. Raises BadSample for what cannot be in any image."""
    if isinstance(written, list):
        written = _by_field(written)
    if not isinstance(written, dict) or not isinstance(written.get("bbox", []), list):
        raise BadSample(REASON, "objects is neither a list of objects nor an object with a list `bbox`")
    unit = written.get("bbox_type") or "real"
    if unit not in UNITS:
        raise BadSample(REASON, f"bbox_type is {unit!r}, not one of {', '.join(UNITS)}")
    shapes = written.get("bbox", [])
    labels = written.get("ref") or []
    owners = written.get("image_id") or [0] * len(shapes)
    names = written.get("name") or [None] * len(shapes)
    for name, values in (("image_id", owners), ("name", names)):
        if not isinstance(values, list) or len(values) != len(shapes):
            raise BadSample(REASON, f"{name} is no list of {len(shapes)}, one for each bbox")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise BadSample(REASON, "ref is no list of texts")
    for number, (shape, image) in enumerate(zip(shapes, owners, strict=True)):
        _check_shape(shape, f"bbox {number}")
        if type(image) is not int or not 0 <= image < images:
            besides = "; a box of a video is not read: give its frame as an image" if not images else ""
            raise BadSample(REASON, f"bbox {number} is in image {image!r} of {images}{besides}")
    return Objects(
        [Shape(shape, image, name) for shape, image, name in zip(shapes, owners, names, strict=True)],
        labels,
        unit,
    )


def _by_field(items: list) -> dict[str, list]:
    """A list of objects as the lists of their fields."""
    fields: dict[str, list] = {"bbox": [], "ref": [], "image_id": [], "name": []}
    for item in items:
        named = [item[word] for word in SHAPES if word in item] if isinstance(item, dict) else []
        if len(named) != 1:
            raise BadSample(REASON, f"an object has one of {', '.join(SHAPES)}, this is {item!r}")
        numbers = named[0]
        if isinstance(numbers, list) and all(isinstance(pair, list) for pair in numbers):
            numbers = [number for pair in numbers for number in pair]  # a polygon of pairs
        fields["bbox"].append(numbers)
        fields["image_id"].append(item.get("image", item.get("image_id", 0)))
        fields["name"].append(item.get("name"))
        fields["ref"] += [item[word] for word in LABELS if word in item]
    return fields


def _check_shape(numbers: Any, place: str) -> None:
    if not isinstance(numbers, list) or len(numbers) < POINT or len(numbers) % 2:
        raise BadSample(REASON, f"{place} is {numbers!r}, no list of pairs of numbers")
    if not ({*map(type, numbers)} <= {int, float} and all(map(math.isfinite, numbers))):
        raise BadSample(REASON, f"{place} is {numbers}, not of finite numbers")
    xs = numbers[::2]
    ys = numbers[1::2]
    if len(numbers) == BOX and (xs[0] > xs[1] or ys[0] > ys[1]):
        raise BadSample(REASON, f"{place} is {numbers}: x1 > x2 or y1 > y2")
    if len(numbers) > POINT and (min(xs) == max(xs) or min(ys) == max(ys)):
        raise BadSample(REASON, f"{place} is {numbers}, which has no area")


# -- placeholders


@dataclass(frozen=True)
class Words:
    """How things are written in the place of their placeholders."""

    shape: Callable[[Shape], str]
    label: Callable[[str], str]
    answer: Callable[[list[tuple[Shape, str | None]]], str]  # shapes, each with its label


NO_WORDS = Words(lambda shape: "", lambda label: "", lambda objects: "")


def with_objects(messages: list[dict], objects: Objects, words: Words, some: bool = False) -> list[dict]:
    """The messages with `words` in place of all placeholders, which take the objects in their order.

    Raises BadSample for a placeholder without an object, and, unless `some` are enough, the reverse.
    """
    filling = _Filling(objects, words)
    filled = [filling.message(message) for message in messages]
    if (shapes := len(filling.shapes)) + (labels := len(filling.labels)) and not some:
        raise BadSample(REASON, f"no placeholder takes {shapes} of the bbox and {labels} of the ref")
    return filled


class _Filling:
    """The objects that are left for the placeholders to come."""

    def __init__(self, objects: Objects, words: Words):
        self.shapes = list(objects.shapes)
        self.labels = list(objects.labels)
        self._named = {shape.name: shape for shape in objects.shapes if shape.name}
        self._words = words

    def message(self, message: dict) -> dict:
        texts = {key: message[key] for key in THINKING_KEYS if isinstance(message.get(key), str)}
        thoughts = {key: PLACEHOLDER.sub(self._written, text) for key, text in texts.items()}
        parts = [
            part | {"text": PLACEHOLDER.sub(self._written, part["text"])} if part["type"] == "text" else part
            for part in message["content"]
        ]
        return message | thoughts | {"content": parts}

    def _written(self, placeholder: re.Match[str]) -> str:
        word, name, label = placeholder.groups()
        if label:
            return self._words.label(_next(self.labels, placeholder))
        if not word:
            return self._words.answer(self._rest())
        if name is None:
            shape = _next(self.shapes, placeholder)
        elif shape := self._named.get(name):
            self.shapes = [other for other in self.shapes if other is not shape]
        else:
            raise BadSample(REASON, f"{placeholder[0]} names no object")
        if word in ("point", "polygon") and shape.kind != word:
            raise BadSample(REASON, f"{placeholder[0]} takes {shape.numbers}, which is a {shape.kind}")
        return self._words.shape(shape)

    def _rest(self) -> list[tuple[Shape, str | None]]:
        shapes = self.shapes
        labels = self.labels
        self.shapes = []
        self.labels = []
        if labels and len(labels) != len(shapes):
            raise BadSample(REASON, f"<objects> has {len(shapes)} bbox and {len(labels)} ref left")
        return list(zip(shapes, labels or [None] * len(shapes), strict=True))


def _next(left: list, placeholder: re.Match[str]) -> Any:
    if not left:
        raise BadSample(REASON, f"nothing in objects is left for {placeholder[0]}")
    return left.pop(0)
