"""Selects, cuts and repeats the rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
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
        """Each row `repeats` times, or as often as its own number says: 0, 0, 1, 1."""
        return self[torch.arange(self.batch_size).repeat_interleave(torch.as_tensor(repeats).cpu())]


def is_number(index: object) -> bool:
    """Whether this selects one row."""
    return isinstance(index, int | np.integer) or (isinstance(index, Tensor) and index.dim() == 0)
