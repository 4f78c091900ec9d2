"""Batches of a run's data → what a page shows of their rows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.batch import Batch, GenericVisualInputs, document_spans, is_raw
from megatron_vlm.data.chatml.sample import ChatMLSample
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.image_processors.base import ImageProcessorSpec
from megatron_vlm.data.media.images import image_size
from megatron_vlm.extras.grounding.boxes import Boxes, ParsedAnswer, draw
from megatron_vlm.models.hf import Source

READ = "read"
TRAINED = "trained"
VISUAL = "visual"


@dataclass
class TokenRun:
    """Adjacent tokens of one kind: READ or TRAINED text, or the placeholders of one VISUAL item."""

    kind: str
    tokens: int
    text: str = ""
    pictures: tuple[Image.Image, ...] = ()  # of an image, or the frames of a video


@dataclass
class Original:
    """A sample before it was encoded: its record's id, and path, width and height of each image."""

    record_id: str | None
    images: list[tuple[str, int, int]]


def original_of(sample: ChatMLSample) -> Original:
    sizes = map(image_size, sample.imgs or ())
    paths = sample.paths or [None] * len(sample.imgs or ())
    images = [(path or "image", *size) for path, size in zip(paths, sizes, strict=True)]
    return Original(sample.record_id, images)


@dataclass
class ShownDocument:
    key: str
    original: Original
    tokens: int
    trained: int
    runs: list[TokenRun]


@dataclass
class Row:
    documents: list[ShownDocument]
    tokens: int  # without padding
    length: int


class RowReader:
    """Batches → what the page shows of their rows. The boxes that `boxes` reads in a document's text are
    drawn on its image, if it has a single one."""

    def __init__(self, source: Source, boxes: Boxes, originals: Mapping[str, Original]):
        self._originals = originals
        self._tokenizer = source.processor.tokenizer
        self._image_spec = get_image_spec(source.processor)
        self._description = source.description
        self._boxes = boxes

    def __call__(self, batch: Batch) -> list[Row]:
        marks_BS, pictures = self._marks(batch)
        return [self._row(batch, row, marks_S, pictures) for row, marks_S in enumerate(marks_BS)]

    def _row(self, batch: Batch, row: int, marks_S: Tensor, pictures: list[tuple[Image.Image, ...]]) -> Row:
        numbers_S = batch["attention_mask"][row]
        documents = []
        for number, key in enumerate(batch["__key__"][row], start=1):
            places = (numbers_S == number).nonzero().flatten()
            span = slice(int(places[0]), int(places[-1]) + 1)
            runs = self._draw_boxes(list(self._runs(batch["input_ids"][row, span], marks_S[span], pictures)))
            trained = int((batch["loss_mask"][row, span] > 0).sum())
            documents.append(ShownDocument(key, self._originals[key], span.stop - span.start, trained, runs))
        return Row(documents, int((numbers_S > 0).sum()), len(numbers_S))

    def _draw_boxes(self, runs: list[TokenRun]) -> list[TokenRun]:
        """The runs, with the boxes of their text on the picture that shows the whole of their only image."""
        places = [place for place, run in enumerate(runs) if run.kind == VISUAL]
        beside = places == list(range(places[0], places[-1] + 1)) if places else False
        if not self._boxes.tells or not beside or (len(places) > 1 and self._image_spec.overview_index == 0):
            return runs
        first_run = places[self._image_spec.overview_index]  # an image in tiles has a run for each
        pictures = list(runs[first_run].pictures)
        picture = pictures[self._image_spec.overview_index]
        boxes = self._boxes.seen("".join(run.text for run in runs), picture.size)
        pictures[self._image_spec.overview_index] = with_shapes(picture, boxes)
        runs[first_run] = replace(runs[first_run], pictures=tuple(pictures))
        return runs

    def _marks(self, batch: Batch) -> tuple[Tensor, list[tuple[Image.Image, ...]]]:
        """Marks of the tokens, and the pictures of every image and video in text order. A token's mark is 0
        if it is read, 1 if it is trained, and n + 2 if it stands for the n-th image or video."""
        # the mask of a label belongs to the token after it
        marks_BS = torch.nn.functional.pad(batch["loss_mask"][:, :-1] > 0, (1, 0)).long()
        ids = batch["input_ids"].flatten()
        visual = batch["visual_inputs"]
        if visual is None:
            return marks_BS, []
        kinds = torch.zeros_like(ids)
        for span in document_spans(batch["attention_mask"]):
            kinds[span] = self._description.visual_kinds(ids[span])
        places = {kind: iter((kinds == kind).nonzero().flatten().tolist()) for kind in (1, 2)}
        pictures = []
        for item, count in zip(visual.items(), self._description.visual_tokens(visual), strict=True):
            kind = 1 if item.pixel_values is not None else 2
            next_places = [next(places[kind]) for _ in range(count)]
            marks_BS.view(-1)[next_places[0] : next_places[-1] + 1] = len(pictures) + 2
            pictures.append(tuple(pictures_of(item, self._image_spec)))
        return marks_BS, pictures

    def _runs(
        self, ids_T: Tensor, marks_T: Tensor, pictures: list[tuple[Image.Image, ...]]
    ) -> Iterator[TokenRun]:
        cuts = (marks_T[1:] != marks_T[:-1]).nonzero().flatten() + 1
        for ids, marks in zip(ids_T.tensor_split(cuts), marks_T.tensor_split(cuts), strict=True):
            mark = int(marks[0])
            if mark > 1:
                yield TokenRun(VISUAL, len(ids), pictures=pictures[mark - 2])
            else:
                yield TokenRun(TRAINED if mark else READ, len(ids), self._tokenizer.decode(ids))


def pictures_of(item: GenericVisualInputs, kind: ImageProcessorSpec) -> list[Image.Image]:
    """The image, or every frame of the video, as the model sees it."""
    frames_TCHW = kind.frames(item)
    if not is_raw(frames_TCHW):
        colours = (kind.images.image_mean, kind.images.image_std)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in colours)
        frames_TCHW = ((frames_TCHW.float() * std + mean) * 255).round().clamp(0, 255).byte()
    return [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames_TCHW]


def seen_pictures(visual: GenericVisualInputs | None, processor: ProcessorMixin) -> list[Image.Image]:
    """The images of a prompt whole as the model sees them, and of each video the frames."""
    kind = get_image_spec(processor)
    pictures = []
    for item in visual.items() if visual is not None else ():
        parts = pictures_of(item, kind)
        pictures += [parts[kind.overview_index]] if item.pixel_values is not None else parts
    return pictures


def with_shapes(
    picture: Image.Image, shapes: Iterable[ParsedAnswer], label: str | None = None
) -> Image.Image:
    """The picture with shapes, which are in shares of it, and their labels or the one given."""
    scaled = []
    for shape in shapes:
        numbers = [share * picture.size[place % 2] for place, share in enumerate(shape.numbers)]
        scaled.append(ParsedAnswer(numbers, label or shape.label))
    return draw(picture, scaled)
