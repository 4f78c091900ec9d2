"""Families' ways to write coordinates: their unit, order, brackets, tokens, JSON; and to read them back."""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

_NUMBER = r"-?\d{1,20}(?:\.\d{1,20})?"
# limits keep what is tried at one place short, wherever brackets are left open
COORDINATES = re.compile(rf"[\[(]\s{{,20}}({_NUMBER}(?:[\s,()]{{1,20}}{_NUMBER}){{1,255}})\s{{,20}}[\])]")
_LABEL = re.compile(r'"label"\s*:\s*("(?:[^"\\]|\\.)*")')
# an object in which no other is, also one that is cut: texts in JSON, and what is no brace
_OBJECT = re.compile(r'\{(?:"(?:[^"\\]|\\.){0,1000}"(?=\s*[,:}\]])|[^{}]){0,1000}+(?:\}|$)')
_IN_JSON = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` makes one for each call
_TAG = re.compile(r"<[^<>{}]+>")


@dataclass(frozen=True)
class Convention:
    """A way to write boxes, points and labels."""

    unit: int | None  # the number at the right and bottom edges; None: the pixels of the resized image
    decimals: int = 0  # digits behind the point
    rows_first: bool = False  # y before x
    pair: str = "{}, {}"  # a corner
    comma: str = ", "  # between corners
    one: str = "[{}]"  # around a box that stands alone
    each: str = "[{}]"  # around one of several
    several: str = "{}"  # around all of several
    between: str = ", "  # between several
    label: str = "{}"  # around a label
    keys: dict[str, str] = field(default_factory=dict)  # of shapes in an answer in JSON; empty: it is no JSON
    indent: str = "\t"

    @functools.cached_property
    def tokens(self) -> tuple[str, ...]:
        """The tags around boxes and labels, which a tokenizer may have as special tokens."""
        return tuple(_TAG.findall(self.one + self.label))

    @functools.cached_property
    def _corner(self) -> str:
        places = ("{1", "{0") if self.rows_first else ("{0", "{1")
        return self.pair.format(*(f"{place}:.{self.decimals}f}}" for place in places))

    def corners(self, numbers: list[float]) -> str:
        """Numbers x, y, x, y, ... in this unit as text."""
        return self.comma.join(map(self._corner.format, numbers[::2], numbers[1::2]))

    def shape(self, numbers: list[float]) -> str:
        """The text of a shape that stands alone."""
        return self.one.format(self.corners(numbers))

    def answer(self, objects: list[tuple[list[float], str, str | None]]) -> str:
        """The text of a whole answer: (numbers, kind of shape, label) of each object."""
        if self.keys:
            lines = [self._entry(numbers, kind, label) for numbers, kind, label in objects]
            inside = "\n" + ",\n".join(lines) + "\n" if lines else ""
            return f"```json\n[{inside}]\n```"
        has_tags = self.label != "{}"
        texts = []
        for label, group in groupby(objects, key=lambda entry: entry[2]):
            shapes = [self.corners(numbers) for numbers, *_ in group]
            text = self.one.format(shapes[0])
            if len(shapes) > 1:
                text = self.several.format(self.between.join(map(self.each.format, shapes)))
            before = "" if label is None else self.label.format(label) + ("" if has_tags else " ")
            texts.append(before + text)
        return ("" if has_tags else "\n").join(texts)

    def _entry(self, numbers: list[float], kind: str, label: str | None) -> str:
        label_text = "" if label is None else f', "label": {_IN_JSON(label)}'
        return f'{self.indent}{{"{self.keys[kind]}": [{self.corners(numbers)}]{label_text}}}'

    # -- back

    def read(self, text: str) -> Iterator[tuple[list[float], str | None]]:
        """(numbers x, y, x, y, ... in this unit, label) of each shape in a family's text."""
        for coordinates, label in self._in_json(text) if self.keys else self._in_words(text):
            numbers = [float(number) for number in re.findall(_NUMBER, coordinates)]
            if len(numbers) % 2 == 0:
                if self.rows_first:
                    rows = numbers[::2]
                    columns = numbers[1::2]
                    numbers = [number for corner in zip(columns, rows, strict=True) for number in corner]
                yield numbers, label

    def _in_json(self, text: str) -> Iterator[tuple[str, str | None]]:
        end = 0  # of the object before
        for entry in _OBJECT.finditer(text):
            yield from ((match[1], None) for match in COORDINATES.finditer(text, end, entry.start()))
            yield from self._of_object(entry[0])
            end = entry.end()
        yield from ((match[1], None) for match in COORDINATES.finditer(text, end))

    def _of_object(self, entry: str) -> Iterator[tuple[str, str | None]]:
        label = _LABEL.search(entry)
        for coordinates in re.findall(
            rf'"(?:{"|".join(self.keys.values())})"\s*:\s*{COORDINATES.pattern}', entry
        ):
            yield coordinates, _of_json(label[1]) if label else None

    def _in_words(self, text: str) -> Iterator[tuple[str, str | None]]:
        begin, end = (re.escape(tag) for tag in _TAG.findall(self.one) or ("", ""))
        boxes = f"{begin}(?P<boxes>.*?)(?:{end}|$)" if begin else f"(?P<boxes>{COORDINATES.pattern})"
        before, after = (re.escape(tag) for tag in self.label.split("{}"))
        pattern = f"{before}(?P<label>.{{,1000}}?){after}|{boxes}" if before else boxes
        label = None
        for match in re.finditer(pattern, text, re.DOTALL):
            if before and match["label"] is not None:
                label = match["label"]
            else:
                for coordinates in COORDINATES.finditer(match["boxes"]):
                    yield coordinates[1], label


def _of_json(text: str) -> str:
    """A text in JSON, also one that a model wrote wrongly."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return text[1:-1]


# The ways in which families write boxes, by name. Each new one is also in `config.BoxFormat`.
CONVENTIONS = {
    # Qwen2.5-VL: `process_bbox.ipynb` and `spatial_understanding.ipynb` of QwenLM/Qwen2.5-VL
    "bbox_2d_pixels": Convention(unit=None, keys={"box": "bbox_2d", "point": "point_2d"}),
    # Qwen3-VL and Qwen3.5: `omni_recognition.ipynb` and `spatial_understanding.ipynb` of QwenLM/Qwen3-VL
    "bbox_2d": Convention(unit=1000, keys={"box": "bbox_2d", "point": "point_2d"}),
    # Gemma 4: ai.google.dev/gemma/docs/capabilities/vision/image; Gemma 3 was not trained on boxes
    "box_2d": Convention(unit=1000, rows_first=True, keys={"box": "box_2d", "point": "point"}, indent="  "),
    # Qwen2-VL: arXiv 2409.12191, section 2.2; `process_bbox.ipynb` of QwenLM/Qwen2.5-VL
    "box_tokens": Convention(
        unit=1000,
        pair="({},{})",
        comma=",",
        one="<|box_start|>{}<|box_end|>",
        each="<|box_start|>{}<|box_end|>",
        between="",
        label="<|object_ref_start|>{}<|object_ref_end|>",
    ),
    # InternVL: internvl.readthedocs.io, "Chat Data Format", grounding and detection data
    "ref_box": Convention(
        unit=1000, one="<box>[[{}]]</box>", several="<box>[{}]</box>", label="<ref>{}</ref>"
    ),
    # GLM-4.1V to GLM-4.6V: README.md of zai-org/GLM-V, "Grounding": the style of brackets varies
    "begin_of_box": Convention(
        unit=1000,
        pair="{},{}",
        comma=",",
        one="<|begin_of_box|>[{}]<|end_of_box|>",
        several="<|begin_of_box|>[{}]<|end_of_box|>",
        between=",",
    ),
    # no family's own, for models whose families publish nothing
    "pixels": Convention(unit=None),
    "thousandths": Convention(unit=1000),
    # LLaVA: table 7 of arXiv 2310.03744, and issue 606 of haotian-liu/LLaVA for the padding
    "shares": Convention(unit=1, decimals=2),
}
