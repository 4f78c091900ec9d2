"""Selects, cuts and repeats the rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

# a slice, row numbers (negative ones count from the end), or one bool per row
Rows = slice | Sequence[int] | Sequence[bool] | np.ndarray | Tensor


class Batched(ABC):
    """Everything that follows from taking rows. No selection is empty: that raises ValueError."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The number of rows, at least one."""

    @abstractmethod
    def _take(self, rows: slice | list[int]) -> Self:
        """These rows, which exist; a slice shares memory."""

    def __getitem__(self, rows: Rows) -> Self:
        numbers, index = np.arange(self.batch_size), rows
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
        if chunk_size < 1:
            raise ValueError(f"{type(self).__name__}.chunk: chunk_size is {chunk_size}; give at least 1.")
        return [self[start : start + chunk_size] for start in range(0, self.batch_size, chunk_size)]

    def split(self, sizes: int | Sequence[int]) -> list[Self]:
        """Pieces of these sizes in order, or all of one size, as `torch.split` does."""
        if isinstance(sizes, int):
            return self.chunk(sizes)
        if sum(sizes) != self.batch_size or min(sizes) < 1:
            raise ValueError(
                f"{type(self).__name__}.split: sizes {list(sizes)} add up to {sum(sizes)}; "
                f"give positive sizes that add up to the {self.batch_size} rows."
            )
        ends = np.cumsum(sizes).tolist()
        return [self[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def repeat(self, repeats: int) -> Self:
        """All rows `repeats` times: 0, 1, 0, 1."""
        return self[list(range(self.batch_size)) * repeats]

    def repeat_interleave(self, repeats: int | Sequence[int] | Tensor) -> Self:
        """Each row `repeats` times, or as often as its own number says: 0, 0, 1, 1."""
        counts = [repeats] * self.batch_size if isinstance(repeats, int) else list(map(int, repeats))
        if len(counts) != self.batch_size or min(counts) < 0:
            raise ValueError(
                f"{type(self).__name__}.repeat_interleave: repeats are {counts}; "
                f"give one number, 0 or more, for each of {self.batch_size} rows."
            )
        return self[[row for row, count in enumerate(counts) for _ in range(count)]]


def is_number(index: object) -> bool:
    """Whether this selects one row."""
    return isinstance(index, int | np.integer) or (isinstance(index, Tensor) and index.dim() == 0)
