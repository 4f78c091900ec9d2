"""Boxes of a record → the words of a family, and back: for one model's processor and one convention."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle

from PIL import Image, ImageDraw
from transformers import ProcessorMixin

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import REFUSALS, BadSample, refused_by_processor
from megatron_vlm.data.image_processors import explain_unknown, get_image_spec
from megatron_vlm.data.image_processors.base import Frame
from megatron_vlm.data.media.images import SizedImage, call_with_timeout, image_size, target_size
from megatron_vlm.extras.grounding.convention import CONVENTIONS, Convention
from megatron_vlm.extras.grounding.objects import REASON, Objects, Shape, Words, with_objects

COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080")
ROUNDING = 1e-6  # of a side: sums such as x + width end beside an edge


@dataclass(frozen=True)
class ParsedAnswer:
    """A point or box in a text: numbers x, y, x, y, ... and what it is of, if the text says so."""

    numbers: list[float]
    label: str | None = None


class Boxes:
    """Writes and reads boxes as a model's family does, or as `data.box_format` says; `family` is its own."""

    def __init__(self, processor: ProcessorMixin, data: DataConfig, family: str | None):
        self._name = data.box_format or family
        self._seconds = data.decode_seconds
        self._processor = processor
        self._image_spec = get_image_spec(processor)

    @property
    def tells(self) -> bool:
        """Whether there is a convention."""
        return self._name is not None

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tags of the convention, which record text may hold as they are."""
        return CONVENTIONS[self._name].tokens if self._name else ()

    def written(
        self, messages: list[dict], objects: Objects, images: Sequence[SizedImage], some: bool = False
    ) -> list[dict]:
        """The messages with the family's words in place of their placeholders, see `with_objects`.

        Only the headers of images are read. Raises BadSample for a shape that is not inside its image, or not
        inside what the model sees of it.
        """
        convention = self._convention()
        axes: dict[int, tuple[_Axis, _Axis]] = {}  # x and y of each image

        def numbers(shape: Shape) -> list[float]:
            if shape.image not in axes:
                axes[shape.image] = self._axes(images[shape.image], len(images) == 1, objects)
            pairs = zip(shape.numbers, cycle(axes[shape.image]), strict=False)
            return [axis.seen(number, shape) for number, axis in pairs]

        words = Words(
            lambda shape: convention.shape(numbers(shape)),
            convention.label.format,
            lambda pairs: convention.answer([(numbers(shape), shape.kind, label) for shape, label in pairs]),
        )
        return with_objects(messages, objects, words, some)

    def parse(
        self,
        text: str,
        size: tuple[int, int],
        alone: bool = True,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
    ) -> list[ParsedAnswer]:
        """The shapes in an answer about an image of `size` (width, height), in pixels of that image.

        `alone`: it is its conversation's only one. `max_pixels` and `min_pixels` are its limits when the
        model saw it. What a model wrote may lie outside the image. Raises BadSample if there is no
        convention, or if the processor cannot take such an image.
        """
        limited = size if self._image_spec.makes_one_size else target_size(size, max_pixels, min_pixels)
        frame = self._frame(limited, alone)
        starts = (frame.left, frame.top)
        lengths = (frame.image_width, frame.image_height)

        def on_image(shares: list[float]) -> list[float]:
            axes = cycle(zip(frame[:2], starts, lengths, size, strict=True))  # of x, of y
            return [
                (share * picture_side - start) / length * side
                for share, (picture_side, start, length, side) in zip(shares, axes, strict=False)
            ]

        return [ParsedAnswer(on_image(shape.numbers), shape.label) for shape in self.seen(text, frame[:2])]

    def seen(self, text: str, picture: tuple[int, int]) -> list[ParsedAnswer]:
        """The shapes in a text, in shares of the picture (width, height) that the model sees of an image."""
        unit = self._convention().unit
        ends = picture if unit is None else (unit, unit)
        return [
            ParsedAnswer([number / end for number, end in zip(numbers, cycle(ends), strict=False)], label)
            for numbers, label in self._convention().read(text)
        ]

    def _convention(self) -> Convention:
        if self._name is None:
            detail = f"this family publishes no way to write boxes; there are {', '.join(CONVENTIONS)}"
            raise BadSample("no_box_format", detail)
        return CONVENTIONS[self._name]

    @functools.cached_property
    def _unknown_reason(self) -> str | None:
        return explain_unknown(self._processor)

    def _axes(self, image: SizedImage, alone: bool, objects: Objects) -> tuple["_Axis", "_Axis"]:
        data, scaling = image
        size = call_with_timeout(self._seconds, image_size, data)
        if objects.size and objects.size != [*size]:
            record_size, file_size = (" x ".join(map(str, sides)) for sides in (objects.size, size))
            raise BadSample(
                REASON, f"the boxes are of an image of {record_size}, and its file has {file_size}"
            )
        frame = self._frame(scaling.of(size), alone)
        width, height = {"real": size, "norm1000": (1000, 1000), "norm1": (1, 1)}[objects.unit]
        image_name = f"the {width} x {height}, in bbox_type {objects.unit}, of"
        ends = frame[:2] if self._convention().unit is None else (self._convention().unit,) * 2
        return (
            _Axis(width, frame.left / frame.width, frame.image_width / frame.width, ends[0], image_name),
            _Axis(height, frame.top / frame.height, frame.image_height / frame.height, ends[1], image_name),
        )

    def _frame(self, size: tuple[int, int], alone: bool) -> Frame:
        try:
            width, height = size
            frame = self._image_spec.frame(width, height, alone)
        except REFUSALS as error:
            raise refused_by_processor(error) from error
        is_whole = frame[2:] == (0, 0, *frame[:2])
        if self._unknown_reason and not (is_whole and self._convention().unit):
            detail = f"how many pixels an image has when it is resized is not known: {self._unknown_reason}"
            raise BadSample("no_box_format", f"{detail}; data.box_format=thousandths needs no pixels")
        return frame


@dataclass(frozen=True)
class _Axis:
    """x or y of an image: from the unit of a record to what the family writes."""

    end: float  # the number at the image's far edge, in the record
    start: float  # where the image begins, as a share of the picture that the model sees
    length: float  # of the image, as a share of that picture
    written_end: float  # the number at the far edge of the picture, as the family writes it
    whole: str  # the image, for messages

    def seen(self, number: float, shape: Shape) -> float:
        """The number as the family writes it. Raises BadSample if the shape leaves the image."""
        share = _inside(number / self.end, self.whole, shape)
        share = self.start + share * self.length
        share = _inside(share, "the middle that the processor cuts out of", shape)
        return share * self.written_end


def _inside(share: float, image_name: str, shape: Shape) -> float:
    if not -ROUNDING <= share <= 1 + ROUNDING:
        raise BadSample(REASON, f"{shape.numbers} is not inside {image_name} image {shape.image}")
    return min(max(share, 0.0), 1.0)


def draw(picture: Image.Image, shapes: Iterable[ParsedAnswer]) -> Image.Image:
    """The picture with the shapes, given in its pixels, and their labels."""
    picture = picture.convert("RGB")
    pen = ImageDraw.Draw(picture)
    width = max(1, max(picture.size) // 200)
    far = 2 * max(picture.size)
    for number, shape in enumerate(shapes):
        colour = COLOURS[number % len(COLOURS)]
        numbers = [min(max(number, -far), far) for number in shape.numbers]  # a model may write any
        corners = list(zip(numbers[::2], numbers[1::2], strict=True))
        (x, y), *other_corners = corners
        if not other_corners:
            pen.ellipse((x - 2 * width, y - 2 * width, x + 2 * width, y + 2 * width), fill=colour)
        elif len(corners) == 2:
            (x_min, x_max), (y_min, y_max) = (sorted(axis) for axis in zip(*corners, strict=True))
            pen.rectangle((x_min, y_min, x_max, y_max), outline=colour, width=width)
        else:
            pen.polygon(corners, outline=colour, width=width)
        if shape.label:
            pen.text((x + 2 * width, y + 2 * width), shape.label, fill=colour)
    return picture
