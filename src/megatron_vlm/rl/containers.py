"""Samples of reinforcement learning, whose tensors differ in shape, as one batch.

`TensorList` stands where a tensor with a batch axis would, for samples of different shapes. `TensorBatch`
maps names to tensors and TensorLists of one batch size. Both select, cut and repeat rows (`Batched`). Names
and meanings of the methods are as in SkyRL's containers (skyrl/backends/skyrl_train/training_batch.py).
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.batch import HOST_FIELDS, GenericVisualInputs
from megatron_vlm.messages import listed, suggestion

VISUAL_FIELDS = tuple(field.name for field in dataclasses.fields(GenericVisualInputs))
# what processors give besides, which pad images to one size (LFM2-VL's, Gemma 4's, LLaVA-OneVision's)
VISUAL_FIELDS += ("pixel_attention_mask", "spatial_shapes", "image_position_ids", "batch_num_images")
VISUAL_FIELDS += ("target_sizes", "target_sizes_videos")


# a slice, row numbers (negative ones count from the end), or one bool per row
Rows = slice | Sequence[int] | Sequence[bool] | np.ndarray | Tensor


class Batched:
    """Everything that follows from `batch_size`, at least 1, and `_take(rows)`, which gives rows that exist.
    No selection is empty: that raises ValueError. A slice shares memory."""

    def __getitem__(self, rows: Rows) -> Self:
        index = rows
        numbers = np.arange(self.batch_size)
        if not isinstance(rows, slice):
            index = torch.as_tensor(rows).cpu().numpy() if len(rows) else []
        chosen = list(map(int, numbers[index]))
        if not chosen:
            raise ValueError(
                f"{type(self).__name__}: none of {len(numbers)} rows is selected, but a batch has at least "
                "one; check the selection before you use it."
            )
        # torch has no negative steps
        return self._take(rows if isinstance(rows, slice) and (rows.step or 1) > 0 else chosen)

    def chunk(self, chunk_size: int) -> list[Self]:
        """Pieces of `chunk_size` rows in order; the last may be smaller. `torch.chunk` takes their number."""
        return self.split(chunk_size)

    def split(self, sizes: int | list[int]) -> list[Self]:
        """Pieces of these sizes in order, or all of one size, as `torch.split` does."""
        pieces = torch.arange(self.batch_size).split(sizes)
        edges = np.cumsum([0, *map(len, pieces)]).tolist()
        return [self[start:stop] for start, stop in pairwise(edges)]

    def repeat(self, repeats: int) -> Self:
        """All rows `repeats` times: 0, 1, 0, 1."""
        return self[torch.arange(self.batch_size).repeat(repeats)]

    def repeat_interleave(self, repeats: int | Sequence[int] | Tensor) -> Self:
        """Each row `repeats` times, one number for all or one for each: 0, 0, 1, 1."""
        return self[torch.arange(self.batch_size).repeat_interleave(torch.as_tensor(repeats).cpu())]


def is_number(index: object) -> bool:
    """Whether this selects one row."""
    return isinstance(index, int | np.integer) or (isinstance(index, Tensor) and index.dim() == 0)


class TensorList(Batched):
    """At least one tensor, all of one dtype and device, of any shapes: entry i belongs to sample i.

    A sample without images has an entry of zero rows, such as (0, 3) for a grid. `self[i]` is a tensor,
    `self[rows]` a TensorList of the same tensors; `self[i] = tensor` replaces one here and in no other list.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self.tensors = list(tensors)
        if not self.tensors:
            raise ValueError("TensorList: an empty list has no dtype and no device; give a tensor.")
        for row, tensor in enumerate(self.tensors):
            self._check(row, tensor)

    def _check(self, row: int, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"TensorList: entry {row} is of type {type(tensor).__name__}; give tensors.")
        first = self.tensors[0]
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"TensorList: entry {row} is {tensor.dtype} on {tensor.device}, the list {first.dtype} on "
                f"{first.device}; bring all to one dtype and device with `.to`."
            )

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def batch_size(self) -> int:
        return len(self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, index: int | Rows) -> Any:
        return self.tensors[index] if is_number(index) else super().__getitem__(index)

    def __setitem__(self, row: int, tensor: Tensor) -> None:
        self._check(int(row), tensor)
        self.tensors[int(row)] = tensor

    def _take(self, rows: slice | list[int]) -> TensorList:
        return TensorList(self.tensors[rows] if isinstance(rows, slice) else [self.tensors[i] for i in rows])

    @staticmethod
    def cat(lists: Iterable[TensorList]) -> TensorList:
        """The entries of all lists, in order."""
        return TensorList(tensor for tensor_list in lists for tensor in tensor_list.tensors)

    def to(self, *args, **kwargs) -> TensorList:
        """`Tensor.to` of each entry."""
        return TensorList(tensor.to(*args, **kwargs) for tensor in self.tensors)

    def pin_memory(self, device: str | None = None) -> TensorList:
        """A copy in page-locked memory; torch's DataLoader calls it."""
        return TensorList(tensor.pin_memory() for tensor in self.tensors)

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same entries by shape, dtype, device and values."""
        if not isinstance(other, TensorList):
            return NotImplemented
        return len(self) == len(other) and all(map(_equal, self.tensors, other.tensors))

    def __reduce__(self):
        return _restored_list, ([_packed(tensor) for tensor in self.tensors],)

    def __repr__(self) -> str:
        return f"TensorList({[tuple(t.shape) for t in self.tensors]}, {self.dtype}, {self.device})"


Field = Tensor | TensorList


class TensorBatch(Batched, UserDict[str, Field]):
    """Names mapped to tensors and TensorLists of one batch size.

    `self["name"]` is a field, `self[rows]` a batch of these rows, where a slice shares memory, `self[i]` a
    batch of one row. `len`, iteration and `in` are as for a mapping of names. Given to the constructor,
    a field None is absent, and a list of tensors, or what keeps one in `tensors`, becomes a TensorList.
    All fields are on one device, except for batch.HOST_FIELDS, which the model reads on the host.
    Raises ValueError that names the keys if batch sizes or devices differ.
    """

    def __init__(self, fields: Mapping[str, Field | Sequence[Tensor] | None] | None = None, **more: Field):
        every = {**(fields or {}), **more}
        super().__init__({key: value for key, value in every.items() if value is not None})

    @classmethod
    def from_samples(cls, samples: Iterable[Mapping[str, Any]]) -> TensorBatch:
        """The batch of `samples`: a list of dicts, a stack of tensordict, or another iterable of mappings.

        Numbers and tensors without axes become a tensor (B,), other tensors and arrays a TensorList. A
        sample may lack visual fields (VISUAL_FIELDS) or have None there: it gets an entry of zero rows.
        Raises ValueError for any other key that a sample lacks.
        """
        rows = [{key: value for key, value in sample.items() if value is not None} for sample in samples]
        keys = dict.fromkeys(key for row in rows for key in row)
        return cls({key: _field_of_samples(key, [row.get(key) for row in rows]) for key in keys})

    def samples(self) -> list[dict[str, Tensor]]:
        """Each row as a dict of tensors without batch axis."""
        return [{key: field[row] for key, field in self.items()} for row in range(self.batch_size)]

    def to_tensordict(self):
        """A LazyStackedTensorDict of the samples; `from_samples` is the inverse. Needs `tensordict`."""
        from tensordict import TensorDict, lazy_stack

        return lazy_stack([TensorDict(sample, batch_size=[]) for sample in self.samples()])

    @property
    def batch_size(self) -> int:
        if not self.data:
            raise ValueError("TensorBatch: without fields there is no batch size; set a field first.")
        return len(next(iter(self.values())))

    @property
    def device(self) -> torch.device:
        """Where the fields are, apart from HOST_FIELDS."""
        devices = (field.device for key, field in self.items() if key not in HOST_FIELDS)
        return next(devices, torch.device("cpu"))

    def __getitem__(self, index: str | int | Rows) -> Any:
        if not isinstance(index, str):
            return super().__getitem__([int(index)] if is_number(index) else index)
        if index not in self.data:
            raise KeyError(f"TensorBatch has no field {index}{suggestion(index, self.data)}")
        return self.data[index]

    def __setitem__(self, key: str, value: Field | Sequence[Tensor]) -> None:
        if not isinstance(key, str):
            raise TypeError(f"TensorBatch: {key!r} is no name; fields are set by name, not by row.")
        field = _field(key, value)
        for name, other in self.items():
            anywhere = not HOST_FIELDS.isdisjoint((name, key))
            fits = len(other) == len(field) and (anywhere or other.device == field.device)
            if name != key and not fits:
                raise ValueError(
                    f"TensorBatch: {key} has batch size {len(field)} and is on {field.device}, "
                    f"{name} has {len(other)} and is on {other.device}; give every field one "
                    "entry for each sample, and bring all of them to one device with `.to`."
                )
        self.data[key] = field

    def select(self, keys: Iterable[str]) -> TensorBatch:
        """These fields alone."""
        return TensorBatch({key: self[key] for key in keys})

    def _take(self, rows: slice | list[int]) -> TensorBatch:
        return TensorBatch({key: field[rows] for key, field in self.items()})

    @staticmethod
    def cat(batches: Iterable[TensorBatch]) -> TensorBatch:
        """The rows of all batches, in order. A batch may lack visual fields, as in `from_samples`.

        Rows of a tensor and of a TensorList become a TensorList. Raises ValueError for any other field that a
        batch lacks, and for one that differs in dtype, device or, as a tensor, in the shape of a row.
        """
        batches = list(batches)
        keys = dict.fromkeys(key for batch in batches for key in batch)
        return TensorBatch({key: _cat(key, batches) for key in keys})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TensorBatch:
        """A copy on `device`, except for HOST_FIELDS. The dtype of a field is changed by assigning it."""
        moved = {k: f.to(device, non_blocking=non_blocking) for k, f in self.items() if k not in HOST_FIELDS}
        return TensorBatch({**self, **moved})

    def pin_memory(self, device: str | None = None) -> TensorBatch:
        """A copy in page-locked memory; torch's DataLoader calls it."""
        return TensorBatch({key: field.pin_memory() for key, field in self.items()})

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same fields by name, kind, shape, dtype, device and values."""
        if not isinstance(other, TensorBatch):
            return NotImplemented
        return self.keys() == other.keys() and all(_equal(field, other[key]) for key, field in self.items())

    def __reduce__(self):
        return _restored_batch, ({k: _packed(f) if isinstance(f, Tensor) else f for k, f in self.items()},)

    def __repr__(self) -> str:
        field_shapes = {
            k: f if isinstance(f, TensorList) else (tuple(f.shape), f.dtype) for k, f in self.items()
        }
        return f"TensorBatch({field_shapes})"


def _field(key: str, value: object) -> Field:
    if isinstance(value, Tensor) and not (value.dim() and len(value)):
        raise ValueError(
            f"TensorBatch: {key} has shape {tuple(value.shape)}; "
            "the first axis has to be that of the samples, at least one."
        )
    if isinstance(value, Tensor | TensorList):
        return value
    try:
        return TensorList(getattr(value, "tensors", value))  # SkyRL's TensorList has `tensors`
    except (TypeError, ValueError) as error:
        raise ValueError(f"TensorBatch: {key}: {error}") from error


def _field_of_samples(key: str, values: list[Any]) -> Field:
    """The samples' values of one key as a field; a sample that lacks the key has None."""
    try:
        tensors = [None if value is None else torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"from_samples: {key}: {error}; give numbers or tensors.") from error
    if all(tensor is not None and tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    return _filled(key, tensors)


def _cat(key: str, batches: list[TensorBatch]) -> Field:
    fields = [batch.get(key) for batch in batches]
    if not all(isinstance(field, Tensor) for field in fields):
        rows = [[None] * b.batch_size if f is None else f for b, f in zip(batches, fields, strict=True)]
        return _filled(key, [tensor for row in rows for tensor in row])
    _field(key, fields)  # raises if dtypes or devices differ
    if len(shapes := {tuple(field.shape[1:]) for field in fields}) > 1:
        raise ValueError(
            f"TensorBatch.cat: {key} has rows of shapes {sorted(shapes)}; "
            "only a TensorList can hold rows of several shapes."
        )
    return torch.cat(fields)


def _filled(key: str, tensors: list[Tensor | None]) -> TensorList:
    """With an entry of zero rows for each None. Raises ValueError if there is one and the field needs all."""
    lacking = [row for row, tensor in enumerate(tensors) if tensor is None]
    if lacking and key not in VISUAL_FIELDS:
        raise ValueError(
            f"TensorBatch: {len(lacking)} of {len(tensors)} samples lack {key}: "
            f"{listed(list(map(str, lacking)), 5)}; give it to all. "
            f"Only visual fields may be absent: {', '.join(VISUAL_FIELDS)}."
        )
    like = next(tensor for tensor in tensors if tensor is not None)
    no_rows = like.new_empty((0, *like.shape[1:]))
    return _field(key, [no_rows if tensor is None else tensor for tensor in tensors])


def _equal(first: Field, other: Field) -> bool:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return (first.dtype, first.device) == (other.dtype, other.device) and torch.equal(first, other)
    return isinstance(first, TensorList) and first == other


def _packed(tensor: Tensor) -> tuple:
    """The parts of a tensor to pickle: its own pickle has all that it is a view of, and fails for uint16."""
    data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return data, tensor.dtype, tensor.shape, tensor.device


def _unpacked(parts: tuple) -> Tensor:
    data, dtype, shape, device = parts
    writable = np.require(data, requirements="W")  # memory that processes share may not be
    return torch.from_numpy(writable).view(dtype).reshape(shape).to(device)


def _restored_list(tensors: list[tuple]) -> TensorList:
    return TensorList(map(_unpacked, tensors))


def _restored_batch(fields: dict[str, tuple | TensorList]) -> TensorBatch:
    return TensorBatch({key: _unpacked(f) if isinstance(f, tuple) else f for key, f in fields.items()})
