"""Boxes and points that a record names, and the placeholders for them in its text.

`objects` is as ms-swift has it: `bbox`, `ref`, `bbox_type`, `image_id`, and `name`; or a list of objects. See
docs/how-to/boxes.md.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_vlm.data.accounts.drops import BadSample

REASON = "bad_objects"
FILLED = ("reasoning_content", "tool_calls")  # of a turn, beside its content
UNITS = ("real", "norm1000", "norm1")
SHAPES = ("bbox", "box", "point")  # other words for a placeholder, and for an object's numbers
LABELS = ("ref-object", "ref", "label", "caption")
OF_AN_OBJECT = {*SHAPES, *LABELS, "image", "image_id", "name", "bbox_type"}
OF_ALL = {"bbox", "ref", "image_id", "name", "bbox_type", "size"}
PLACEHOLDER = re.compile(r"<(?:(bbox|box|point)(?::([^<>\s]+))?|(ref-object|ref)|objects)>")
FAR = 1e9  # no number is as far from an image; NaN is not below it either
POINT, BOX = 2, 4  # how many numbers each has


@dataclass(frozen=True)
class Shape:
    """A point (x, y) or a box (x1, y1, x2, y2) in an image."""

    numbers: list[float]
    image: int = 0
    name: str | None = None
    label: str | None = None  # if the record says it of this shape, and not in a list of labels alone

    @property
    def kind(self) -> str:
        return "point" if len(self.numbers) == POINT else "box"


@dataclass(frozen=True)
class Objects:
    shapes: list[Shape]
    labels: list[str]
    unit: str  # one of UNITS
    size: list[int] | None = None  # (width, height) of its images, where the record says it


def objects_of(value: Any, messages: list[dict], images: int, some: bool) -> Objects | None:
    """Return the objects that placeholders of the messages stand for; None if there is nothing to write.

    Raises BadSample as `read_objects` and `with_objects`.
    """
    objects = read_objects(value, images)
    filled = with_objects(messages, objects, NO_WORDS, some)
    return objects if objects.shapes or filled != messages or some else None


def read_objects(fields: Any, images: int) -> Objects:
    """The objects of a record with so many images. Raises BadSample for what cannot be in any image."""
    own_labels: list[str | None] = []
    if isinstance(fields, list):
        fields, own_labels = _by_field(fields)
    if not isinstance(fields, dict) or not isinstance(fields.get("bbox") or [], list):
        raise BadSample(REASON, "objects is neither a list of objects nor an object with a list `bbox`")
    _check_keys(fields, OF_ALL)
    unit = fields.get("bbox_type") or "real"
    if unit not in UNITS:
        raise BadSample(REASON, f"bbox_type is {unit!r:.60}, not one of {', '.join(UNITS)}")
    size = fields.get("size")
    if size is not None and not (isinstance(size, list) and [type(side) for side in size] == [int, int]):
        raise BadSample(REASON, f"size is {size!r:.60}, not [width, height]")
    # lists of one length: the shape, image and name of each object; labels are of their own
    shapes = fields.get("bbox") or []
    labels = fields.get("ref") or []
    owners = fields.get("image_id") or [0] * len(shapes)
    names = fields.get("name") or [None] * len(shapes)
    for name, values in (("image_id", owners), ("name", names)):
        if not isinstance(values, list) or len(values) != len(shapes):
            raise BadSample(REASON, f"{name} is no list of {len(shapes)}, one for each bbox")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise BadSample(REASON, "ref is no list of texts")
    texts = [name for name in names if name is not None]
    if not all(isinstance(name, str) for name in texts) or len({*texts}) != len(texts):
        raise BadSample(REASON, "name is no list of texts that differ")
    # each shape has its numbers, lies in an image that there is, and is not in a unit that nobody named
    for number, (shape, image) in enumerate(zip(shapes, owners, strict=True)):
        _check_shape(shape, f"bbox {number}")
        if type(image) is not int or not 0 <= image < images:
            besides = "; a box of a video is not read: give its frame as an image" if not images else ""
            raise BadSample(REASON, f"bbox {number} is in image {image!r:.60} of {images}{besides}")
    if fields.get("bbox_type") is None and _are_shares(shapes):
        detail = f"its numbers are all from 0 to 1, such as {shapes[0]!r:.60}, without a bbox_type"
        raise BadSample(REASON, f"{detail}; give norm1 for shares of width and height, or real for pixels")
    all_shapes = map(Shape, shapes, owners, names, own_labels or [None] * len(shapes))
    return Objects(list(all_shapes), labels, unit, size)


def _are_shares(shapes: list[list[float]]) -> bool:
    """Return whether shapes can hardly be in pixels: none reaches beyond the first pixel."""
    numbers = [number for shape in shapes for number in shape]
    is_within_one = bool(numbers) and 0 <= min(numbers) and max(numbers) <= 1
    return is_within_one and any(len(shape) > POINT or shape != [*map(int, shape)] for shape in shapes)


def _check_keys(fields: dict, known_keys: set[str]) -> None:
    """An unknown key may say a unit, an image, or a label."""
    for key, value in fields.items():
        if key not in known_keys and value is not None:
            raise BadSample(REASON, f"{key!r:.60} is unknown; there are {', '.join(sorted(known_keys))}")


def _by_field(items: list) -> tuple[dict[str, Any], list[str | None]]:
    """A list of objects as the lists of their fields, and the label of each object."""
    fields: dict[str, Any] = {"bbox": [], "image_id": [], "name": []}
    own_labels: list[str | None] = []
    units: list[Any] = []
    for item in items:
        shape_keys = [word for word in SHAPES if item.get(word) is not None] if isinstance(item, dict) else []
        if len(shape_keys) != 1:
            raise BadSample(REASON, f"an object has one of {', '.join(SHAPES)}, this is {item!r:.100}")
        _check_keys(item, OF_AN_OBJECT)
        (word,) = shape_keys
        numbers = item[word]
        if word != "bbox" and isinstance(numbers, list) and Shape(numbers).kind != word:
            raise BadSample(REASON, f"{word} is {numbers!r:.100}")
        fields["bbox"].append(numbers)
        fields["image_id"].append(next((item[key] for key in ("image", "image_id") if item.get(key)), 0))
        fields["name"].append(item.get("name"))
        own_labels.append(next((item[key] for key in LABELS if item.get(key) is not None), None))
        units.append(item.get("bbox_type"))
    if any(unit != units[0] for unit in units):
        raise BadSample(REASON, f"bbox_type is not the same everywhere: {units!r:.100}")
    return fields | {
        "ref": [label for label in own_labels if label is not None],
        "bbox_type": units[0] if units else None,
    }, own_labels


def _check_shape(numbers: Any, place: str) -> None:
    if not isinstance(numbers, list) or len(numbers) not in (POINT, BOX):
        raise BadSample(REASON, f"{place} is {numbers!r:.100}, no list of two or four numbers")
    if not ({*map(type, numbers)} <= {int, float} and all(abs(number) < FAR for number in numbers)):
        raise BadSample(REASON, f"{place} is {numbers!r:.100}, not of finite numbers below {FAR:g}")
    if len(numbers) == BOX and not (numbers[0] < numbers[2] and numbers[1] < numbers[3]):
        raise BadSample(REASON, f"{place} is {numbers}; a box has x1 < x2 and y1 < y2")


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
    try:
        filled = [filling.message(message) for message in messages]
    except RecursionError as error:
        raise BadSample(REASON, "a call of a tool is nested too deeply") from error
    if (shapes := len(filling.shapes)) + (labels := len(filling.labels)) and not some:
        raise BadSample(REASON, f"no placeholder takes {shapes} of the bbox and {labels} of the ref")
    return filled


class _Filling:
    """The objects that are left for the placeholders to come."""

    def __init__(self, objects: Objects, words: Words):
        self.shapes = list(objects.shapes)
        self.labels = list(objects.labels)
        self._has_shapes = bool(objects.shapes)
        self._has_own_labels = any(shape.label for shape in objects.shapes)
        self._named = {shape.name: shape for shape in objects.shapes if shape.name}
        self._words = words

    def message(self, message: dict) -> dict:
        beside = {key: self._filled(message[key]) for key in FILLED if key in message}
        parts = [
            part | {"text": PLACEHOLDER.sub(self._written, part["text"])} if part["type"] == "text" else part
            for part in message["content"]
        ]
        return message | beside | {"content": parts}

    def _filled(self, value: Any) -> Any:
        """The value with all its texts, such as the arguments of a tool's call, filled."""
        if isinstance(value, dict):
            return {key: self._filled(inside) for key, inside in value.items()}
        if isinstance(value, list):
            return [self._filled(inside) for inside in value]
        return PLACEHOLDER.sub(self._written, value) if isinstance(value, str) else value

    def _written(self, placeholder: re.Match[str]) -> str:
        word, name, label = placeholder.groups()
        if label:
            text = _next(self.labels, placeholder)
            if f'"{placeholder[0]}"' == placeholder.string[placeholder.start() - 1 : placeholder.end() + 1]:
                text = json.dumps(text, ensure_ascii=False)[1:-1]  # as part of JSON
            return self._words.label(text)
        if not word:
            return self._words.answer(self._rest())
        if name is None:
            shape = _next(self.shapes, placeholder)
        elif shape := self._named.get(name):
            self.shapes = [other for other in self.shapes if other is not shape]
        else:
            raise BadSample(REASON, f"{placeholder[0]} names no object")
        if word == "point" and shape.kind != word:
            raise BadSample(REASON, f"{placeholder[0]} takes {shape.numbers}, which is a {shape.kind}")
        return self._words.shape(shape)

    def _rest(self) -> list[tuple[Shape, str | None]]:
        shapes = self.shapes
        if self._has_shapes and not shapes:
            raise BadSample(REASON, "nothing in objects is left for <objects>")
        labels = [shape.label for shape in shapes] if self._has_own_labels else self.labels
        self.shapes = []
        self.labels = [label for label in self.labels if label not in labels]
        if labels and len(labels) != len(shapes):
            raise BadSample(REASON, f"<objects> has {len(shapes)} bbox and {len(labels)} ref left")
        return list(zip(shapes, labels or [None] * len(shapes), strict=True))


def _next(waiting: list, placeholder: re.Match[str]) -> Any:
    if not waiting:
        raise BadSample(REASON, f"nothing in objects is left for {placeholder[0]}")
    return waiting.pop(0)
