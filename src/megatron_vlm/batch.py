"""The batch contract: everything that crosses from data to model.

`encode_batch` returns a dict with these keys and `training.step` takes it:

    input_ids       (B, S) int64     image tokens already expanded by the processor
    labels          (B, S) int64     next-token ids, already shifted, IGNORE_INDEX where not trained
    loss_mask       (B, S) float32   the weight of `labels` in the loss, 1 as a rule; 0 where not trained
    position_ids    (B, S) or (3, B, S) int64, restarting at each document
    attention_mask  (B, S) int32     document number in its row, 1, 2, ...; 0 is padding
    visual_inputs   GenericVisualInputs or None, items concatenated in document order
    __key__         list of B lists of sample keys: which samples made each row
    routes          may be absent: (B, S, layers, k) int16, see `models.stream.Stream`
    asked           may be absent: of each row, which is a prompt, what its rewards are computed from,
                    see `data.encode.questions.PromptEncoder`
    __restore_key__ where its samples lie, in numbers and names; the loader's `replay` makes it again
    __dropped__     may be absent: {reason: samples dropped since the batch before}; the loader takes it out

`check` raises for a batch that is anything else. Data workers call it on every batch that they hand over.

Shape legend, used as suffix of local names in model, packing and position code:
B rows, S tokens per row, T tokens of one document or sample, G documents, N items (images or videos),
P raw patches, F numbers in a patch, M visual tokens, D language-model width, E tower width, H heads,
K head width, V padded vocabulary, R rotated channels of a head, L layers, I and O the inputs and outputs of a
linear, X experts, J the experts of a token, Z rows of tokens at their experts, Q ranks, Y groups of answers.
In the shapes of pixels: (N, C, H, W) has colours, height, width; t is the number of moments of a video.
Megatron is sequence first: hidden states are (S, B, D).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100
DROPPED = "__dropped__"
_FIELDS_OF_KIND = (  # pixels; what says how many rows of them each item has, if not 1; one entry per item
    ("pixel_values", ("image_grid_thw", "image_tiles"), "image_sizes"),
    ("pixel_values_videos", ("video_grid_thw", "video_frames"), "second_per_grid_ts"),
)
# Visual fields that stay on the CPU: the model reads their values on the host to launch work.
HOST_FIELDS = frozenset(name for _, grids, other in _FIELDS_OF_KIND for name in (*grids, other))


# a document's (T,) ids and visual inputs -> its positions, (T,) or (3, T) int64
PositionIds = Callable[[Tensor, "GenericVisualInputs | None"], Tensor]


def count_up(input_ids_T: Tensor, visual: GenericVisualInputs | None) -> Tensor:
    """(T,) int64: 0, 1, 2, ..."""
    return torch.arange(len(input_ids_T))


def rows_of_items(grid: Tensor) -> Tensor:
    """(N,): how many rows of pixels each item has, from its grid (N, 3), or from that number itself."""
    return grid.reshape(len(grid), -1).prod(-1)


def document_spans(attention_mask: Tensor) -> list[slice]:
    """Where each document lies among the B * S tokens of a batch; nothing is counted beyond its end."""
    numbers_BS = attention_mask.numpy().astype(np.int64)
    rows, length = numbers_BS.shape
    of_row = np.arange(rows)[:, None] * (length + 1)
    numbers = np.where(numbers_BS > 0, numbers_BS + of_row, 0).ravel()
    edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
    return [slice(start, stop) for start, stop in pairwise(edges) if numbers[start]]


def is_raw(pixels: Tensor) -> bool:
    """Whether these are colours from 0 to 255, before the HF processor's arithmetic."""
    return pixels.dtype == torch.uint8


@dataclass
class GenericVisualInputs:
    """The visual tensors of a sample or of a micro batch; a field that is None is absent.

    Sizes follow the HF processors: `pixel_values` is (N, C, H, W) for fixed-size and Pixtral towers and
    (P, features) for patch towers, grids are (N, 3) in raw patches, `image_sizes` is (N, 2) in pixels. Where
    an item has several rows of pixels, `image_tiles` and `video_frames` (N,) say how many.

    Float pixels are ready for the tower. uint8 pixels are raw, see `is_raw`: images and frames are resized
    and cut as the tower wants them, with colours last; the model's `PixelNormalizer` makes them ready. Raw
    images, tiles and frames are (N, H, W, C). Raw patches of images are (P, h * w * C), of one moment even if
    the tower wants each repeated; of videos (P, t * h * w * C), of as many moments as the tower joins.
    """

    pixel_values: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    image_grid_thw: Tensor | None = None
    video_grid_thw: Tensor | None = None
    image_sizes: Tensor | None = None
    second_per_grid_ts: Tensor | None = None
    image_tiles: Tensor | None = None
    video_frames: Tensor | None = None

    @classmethod
    def cat(cls, items: list[GenericVisualInputs]) -> GenericVisualInputs | None:
        """Concatenate along the first axis, in order; None if there is nothing.

        Trailing axes that differ (Pixtral pads to its largest image) are padded with zeros right and bottom.
        """
        parts: dict[str, list[Tensor]] = {}
        for item in items:
            for name, tensor in item.as_model_kwargs().items():
                parts.setdefault(name, []).append(tensor)
        merged = {name: cat_padded(tensors) for name, tensors in parts.items()}
        return cls(**merged) if merged else None

    def as_model_kwargs(self) -> dict[str, Tensor]:
        """The fields that are present, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def normalized_for_model(self) -> dict[str, Tensor]:
        """`as_model_kwargs` with a leading per-sample axis merged into the item axis.

        (B, N, C, H, W) pixels become (B*N, C, H, W), (B, N, 3) grids become (B*N, 3), and so on.
        """
        pairs = {"image_sizes": (3,), "image_grid_thw": (3,), "video_grid_thw": (3,)}
        axes = dict.fromkeys(HOST_FIELDS, (2,)) | pairs  # how many there then are; of pixels 3 or 5
        values = self.as_model_kwargs()
        return {key: v.flatten(0, 1) if v.dim() in axes.get(key, (3, 5)) else v for key, v in values.items()}

    def items(self) -> list[GenericVisualInputs]:
        """Each image alone, then each video alone; `cat` is the inverse."""
        items = []
        for pixels, grids, other in _FIELDS_OF_KIND:
            values = {name: v for name in (pixels, *grids, other) if (v := getattr(self, name)) is not None}
            if pixels in values:
                rows = next((rows_of_items(values[name]).tolist() for name in grids if name in values), 1)
                parts = {name: v.split(rows if name == pixels else 1) for name, v in values.items()}
                columns = zip(*parts.values(), strict=True)
                items += [type(self)(**dict(zip(parts, column, strict=True))) for column in columns]
        return items

    @property
    def videos(self) -> int:
        """How many there are besides images."""
        return next((len(x) for x in (self.video_grid_thw, self.video_frames) if x is not None), 0)

    def map(self, fn: Callable[[Tensor], Tensor]) -> GenericVisualInputs:
        """A copy with `fn` applied to every tensor present."""
        return type(self)(**{name: fn(value) for name, value in self.as_model_kwargs().items()})

    def map_pixels(self, fn: Callable[[Tensor], Tensor]) -> GenericVisualInputs:
        """A copy with `fn` applied to what is not in HOST_FIELDS."""
        fields = self.as_model_kwargs()
        return type(self)(**{name: v if name in HOST_FIELDS else fn(v) for name, v in fields.items()})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GenericVisualInputs:
        """A copy on `device`, except for HOST_FIELDS."""
        return self.map_pixels(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: str | None = None) -> GenericVisualInputs:
        """A copy with pixels in pinned memory; torch's DataLoader calls it."""
        return self.map_pixels(lambda t: t.pin_memory())


Batch = TypedDict(
    "Batch",
    {
        "input_ids": Tensor,
        "labels": Tensor,
        "loss_mask": Tensor,
        "position_ids": Tensor,
        "attention_mask": Tensor,
        "visual_inputs": GenericVisualInputs | None,
        "__key__": list[list[str]],
        "__restore_key__": Any,
        "routes": NotRequired[Tensor],
        "asked": NotRequired[list[dict[str, Any]]],
        "__dropped__": NotRequired[dict[str, int]],
    },
)


class Prompt(TypedDict):
    """A conversation that the model is to continue: on the host; its pixels may be on the device."""

    input_ids: Tensor  # (T,)
    position_ids: Tensor  # (T,) or (3, T)
    visual_inputs: GenericVisualInputs | None


_DTYPES = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
    "attention_mask": torch.int32,
}


def check(batch: Batch) -> Batch:
    """The batch itself. Raises ValueError that names the key, and the row or the sizes, if it breaks the
    contract above."""
    if missing := Batch.__required_keys__ - batch.keys():
        raise ValueError(f"batch: {', '.join(sorted(missing))} missing; see megatron_vlm/batch.py.")
    rows, length = batch["input_ids"].shape
    for key, dtype in _DTYPES.items():
        tensor, shape = batch[key], (rows, length)
        if key == "position_ids" and tensor.dim() == 3:
            shape = (3, rows, length)
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(f"batch: {key} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}.")
    # documents are numbered from 1 without gaps, and no token predicts one of the next document
    documents = batch["attention_mask"].numpy()
    before, after = documents[:, :-1], documents[:, 1:]
    trained = batch["labels"].numpy() != IGNORE_INDEX
    _check_tokens("loss_mask and labels disagree", (batch["loss_mask"].numpy() != 0) != trained)
    _check_tokens("a loss weight is negative or no number", ~(batch["loss_mask"].numpy() >= 0))
    _check_tokens("the first document is not 1", documents[:, :1] > 1)
    same_or_next = (after == before) | (after == before + 1) & (before != 0)
    _check_tokens("documents are not counted", ~same_or_next & (after != 0), first=1)
    _check_tokens("a document is trained to predict the next", trained[:, :-1] & (after != before))
    if len(batch["__key__"]) != rows:
        raise ValueError(f"batch: __key__ has {len(batch['__key__'])} lists for {rows} rows.")
    _check_place(batch["__restore_key__"])
    if (visual := batch["visual_inputs"]) is not None:
        _check_pixels(visual)
    return batch


def _all_items(ids: Any, visual: GenericVisualInputs | None) -> GenericVisualInputs | None:
    raise TypeError("a document is cut, and DataNeeds has no first_items")


@dataclass(frozen=True)
class DataNeeds:
    """The needs that a model has of its data.

    visual_keys       the outputs of the HF processor that it takes; they are fields of `GenericVisualInputs`
    position_ids      computes the positions of a document
    images_or_videos  whether a sample must not hold both
    of_processor      makes them of the processor's outputs if those have another form; else changes nothing
    box_format        names how the family writes boxes, see `extras.grounding`; None: it publishes no way
    frames_as_images  whether the frames of videos are among `pixel_values`, and their tokens are image tokens
    misfit            says why the model cannot take a document (ids, visual inputs); None if it can
    first_items       gives the images and videos of a document that was cut to the ids, behind a whole one

    Raises TypeError for an unknown visual key.
    """

    visual_keys: tuple[str, ...] = ("pixel_values",)
    position_ids: PositionIds = count_up
    images_or_videos: bool = False
    of_processor: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    box_format: str | None = None
    frames_as_images: bool = False
    misfit: Callable[[Any, GenericVisualInputs | None], str | None] = lambda ids, visual: None
    first_items: Callable[[Any, GenericVisualInputs | None], GenericVisualInputs | None] = _all_items

    def __post_init__(self) -> None:
        GenericVisualInputs(**dict.fromkeys(self.visual_keys))

    @property
    def videos(self) -> bool:
        return self.frames_as_images or "pixel_values_videos" in self.visual_keys


def _check_tokens(problem: str, wrong: np.ndarray, first: int = 0) -> None:
    if wrong.any():
        row, token = np.argwhere(wrong)[0]
        raise ValueError(f"batch: {problem}; row {row}, token {token + first}.")


def _check_place(key: Any) -> None:
    """Refuses a record in the place of where it lies: the key is written to disk."""
    if isinstance(key, list | tuple):
        for part in key:
            _check_place(part)
    elif not isinstance(key, int | str | None):
        raise ValueError(f"batch: __restore_key__ holds a {type(key).__name__}, not only numbers and names.")


def _check_pixels(visual: GenericVisualInputs) -> None:
    for pixels, grids, other in _FIELDS_OF_KIND:
        grid = next((name for name in grids if getattr(visual, name) is not None), grids[0])
        pixel_values, counts, other_values = (getattr(visual, name) for name in (pixels, grid, other))
        if pixel_values is None and (counts is not None or other_values is not None):
            raise ValueError(f"batch: {grid} or {other} without {pixels}.")
        if counts is not None and (rows := int(rows_of_items(counts).sum())) != len(pixel_values):
            raise ValueError(f"batch: {pixels} has {len(pixel_values)} patches, {grid} {rows}.")
        items = pixel_values if counts is None else counts
        if other_values is not None and len(other_values) != len(items):
            raise ValueError(f"batch: {other} has {len(other_values)} entries for {len(items)} items.")


def cat_padded(tensors: list[Tensor]) -> Tensor:
    if len({t.shape[1:] for t in tensors}) == 1:
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    sizes = [max(t.shape[axis] for t in tensors) for axis in range(1, tensors[0].dim())]
    out = tensors[0].new_zeros(sum(map(len, tensors)), *sizes)
    for part, t in zip(out.split([len(t) for t in tensors]), tensors, strict=True):
        part[(slice(None), *map(slice, t.shape[1:]))] = t
    return out


def fully_masked(batch: Batch) -> Batch:
    """A copy of `batch` that trains no token and names no sample."""
    return batch | {
        "labels": torch.full_like(batch["labels"], IGNORE_INDEX),
        "loss_mask": torch.zeros_like(batch["loss_mask"]),
        "__key__": [[] for _ in batch["__key__"]],
    }
