"""Checks that every row given to data workers comes back, in a sample or counted as dropped.

A row that is missing, doubled or in another's place ends the run with an error that names it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_vlm.messages import listed, printable

REMEDY = "This is a bug: please report it; nothing is lost when you start again from the last checkpoint."


class LostSample(RuntimeError):
    """A row was neither trained on nor counted as dropped."""


def lost(keys: Sequence[Any], happened: str) -> LostSample:
    """The error that says what `happened` to the rows with `keys`."""
    return LostSample(f"data: {listed([*map(printable, keys)])}: {happened}. {REMEDY}")


class Ledger:
    """A sampler: the `(place, rows)` of an order. It remembers those that have not come back.

    key          a row's key
    documents    how many documents a row has
    """

    def __init__(
        self, order: Iterable[tuple[Any, Sequence]], key: Callable[[Any], str], documents: int = 1
    ) -> None:
        self._order, self._key, self._documents = order, key, documents
        self._out: deque[tuple[Any, list[str]]] = deque()

    def __iter__(self) -> Iterator[tuple[Any, Sequence]]:
        for place, rows in self._order:
            self._out.append((place, [self._key(row) for row in rows]))
            yield place, rows

    def settled(self, items: Iterable[tuple[Any, Any, Mapping[int, str]]]) -> Iterator[tuple]:
        """Yields what `EncodedRows` gave for each entry. Raises LostSample when a row is not in a sample nor
        dropped, and when entries are missing or out of order."""
        for place, sample, dropped in items:
            asked_at, keys = self._out.popleft() if self._out else (None, [])
            kept = [key for n, key in enumerate(keys) if n not in dropped for _ in range(self._documents)]
            found = [] if sample is None else sample.document_keys
            if (place, found) != (asked_at, kept):
                wrong = keys if place != asked_at else sorted(set(kept) ^ set(found)) or kept
                gave = f"workers gave {found} at {place} where {kept} at {asked_at} were due"
                raise lost(wrong or found, gave)
            yield place, sample, dropped
        if self._out:
            raise lost([key for _, keys in self._out for key in keys], "not given back by workers")


def check_each_once(documents: ArrayLike, count: int, what: str) -> None:
    """Raises LostSample unless `documents` are 0 … count - 1, in any order."""
    times = np.bincount(np.asarray(documents, int), minlength=count)
    if len(times) > count or (times != 1).any():
        raise lost(np.flatnonzero(times != 1).tolist(), f"of {count} {what}, not taken exactly once")
