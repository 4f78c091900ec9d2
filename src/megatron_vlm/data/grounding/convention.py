"""A family's way to write coordinates: their unit, order, brackets, tokens, JSON; and to read them back."""

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
# a text in JSON, the limits of an object, and coordinates
_IN_ANSWER = re.compile(rf'"(?:[^"\\]|\\.){{0,1000}}"(?=\s*[,:}}\]])|[{{}}]|{COORDINATES.pattern}')
_IN_JSON = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` makes one for each call
_TAG = re.compile(r"<[^<>{}]+>")


@dataclass(frozen=True)
class Convention:
    """A way to write boxes, points and labels.

    unit        the number at the right and bottom edges, 1000 or 1; None: the pixels of the resized image
    decimals    digits behind the point
    rows_first  y before x
    pair        a corner; `comma` is between corners
    one         what is around a box that stands alone
    each        what is around one of several, `several` what is around all, `between` is between them
    label       what is around a label
    keys        of an answer in JSON: what shape has which key; empty: answers are not JSON
    polygons    whether shapes of more corners than a box may be written
    """

    unit: int | None
    decimals: int = 0
    rows_first: bool = False
    pair: str = "{}, {}"
    comma: str = ", "
    one: str = "[{}]"
    each: str = "[{}]"
    several: str = "{}"
    between: str = ", "
    label: str = "{}"
    keys: dict[str, str] = field(default_factory=dict)
    indent: str = "\t"
    polygons: bool = False

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
        for label, group in groupby(objects, key=lambda each: each[2]):
            shapes = [self.corners(numbers) for numbers, *_ in group]
            text = self.one.format(shapes[0])
            if len(shapes) > 1:
                text = self.several.format(self.between.join(map(self.each.format, shapes)))
            before = "" if label is None else self.label.format(label) + ("" if has_tags else " ")
            texts.append(before + text)
        return ("" if has_tags else "\n").join(texts)

    def _entry(self, numbers: list[float], kind: str, label: str | None) -> str:
        named = "" if label is None else f', "label": {_IN_JSON(label)}'
        return f'{self.indent}{{"{self.keys[kind]}": [{self.corners(numbers)}]{named}}}'

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
        begin = None  # of an object
        alone: list[str] = []  # lists by themselves since then
        for found in _IN_ANSWER.finditer(text):
            if found[0] == "{" or begin is None:
                yield from ((coordinates, None) for coordinates in alone)
                alone = []
            if found[0] == "{":
                begin = found.start()
            elif found[0] != "}":
                alone += [each[1] for each in COORDINATES.finditer(found[0])]
            elif begin is not None:
                yield from self._of_object(text[begin : found.end()])
                begin = None
                alone = []
        if begin is None:
            yield from ((coordinates, None) for coordinates in alone)
        else:
            yield from self._of_object(text[begin:])

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
        for found in re.finditer(pattern, text, re.DOTALL):
            if before and found["label"] is not None:
                label = found["label"]
            else:
                for coordinates in COORDINATES.finditer(found["boxes"]):
                    yield coordinates[1], label


def _of_json(text: str) -> str:
    """A text in JSON, also one that a model wrote wrongly."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return text[1:-1]
