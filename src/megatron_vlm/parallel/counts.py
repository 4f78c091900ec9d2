"""Counts that are added over all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch.distributed as dist


class SharedCounts(Protocol):
    """Counts that are added over all ranks, as in `data.drops.DropReport`."""

    def to_tell(self) -> list[int]: ...

    def tell_others(self, told: list[int]) -> None: ...


def add_counts(counts: dict[str, int]) -> dict[str, int]:
    """Counts by name, added over all ranks. Every rank calls it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, counts)
    return dict(sum(map(Counter, gathered), Counter()))
