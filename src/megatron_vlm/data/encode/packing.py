"""Which documents share a row, under a token and a patch budget, and in which balanced order rows come.

Pure numpy; nothing here knows what a sample is. A document is an index into the arrays of costs, and every
document given is in exactly one returned row. A document over a budget raises ValueError: the caller drops
and counts it before.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from numpy.typing import ArrayLike

from megatron_vlm.data.accounts.drops import check_each_once

STRIPS_PER_ROOT = 3  # strips of equal patches = this times the square root of the number of groups
TRIES = 16  # lengths that are tried one by one, before the rest at once


@dataclass
class PackedRows:
    """Row `i` holds the documents `documents[starts[i]:starts[i + 1]]`."""

    documents: ndarray  # (G,)
    starts: ndarray  # (rows + 1,)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> ndarray:
        return self.documents[self.starts[row] : self.starts[row + 1]]

    def __iter__(self) -> Iterator[ndarray]:
        return (self[row] for row in range(len(self)))

    def sums(self, costs: ndarray) -> ndarray:
        """The cost of each row, given the cost of each document."""
        return np.add.reduceat(costs[self.documents], self.starts[:-1]) if len(self) else costs[:0]


def pack(
    lengths: ArrayLike,  # at least 1
    capacity: int,
    patches: ArrayLike | None = None,
    patch_capacity: int | None = None,
    rng: np.random.Generator | None = None,
) -> PackedRows:
    """Few rows of at most `capacity` tokens and `patch_capacity` patches each, by first-fit decreasing.

    `rng` decides which of several documents of equal length goes where, and the order of documents in a row;
    None: the first comes first, longer before shorter. The order of rows has no use (see `balanced_order`).

    First fit of sorted lengths fills one row after the other with the longest document that still fits. So a
    combination of lengths is found once and repeated while there are enough documents: there is at most one
    combination per distinct length. If that breaks the patch budget, documents are placed one by one.
    """
    lengths = np.asarray(lengths, int)
    _check_fits(lengths, capacity, "tokens")
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    rows = _pack_lengths(lengths, capacity, order)
    if patch_capacity is not None:
        assert patches is not None, "a patch budget needs the documents' patches"
        patches = np.asarray(patches, int)
        _check_fits(patches, patch_capacity, "patches")
        if len(rows) and rows.sums(patches).max() > patch_capacity:
            rows = _pack_both(lengths, capacity, patches, patch_capacity, order)
    return rows if rng is None else _shuffled_inside(rows, rng)


def pack_buffer(
    lengths: list[int], capacity: int, patches: list[int], patch_capacity: int | None
) -> list[list[int]]:
    """The documents of each row; rows are in a random order for which the lengths are the only seed.

    So equal buffers give equal rows, wherever and whenever they are packed.
    """
    rng = np.random.default_rng(lengths)
    rows = pack(lengths, capacity, patches, patch_capacity, rng)
    check_each_once(rows.documents, len(lengths), "documents to be packed")
    return [rows[row].tolist() for row in rng.permutation(len(rows))]


def balanced_order(
    attention: ndarray,
    patches: ndarray,
    group: int,
    rng: np.random.Generator,
    unbalanced: int = 0,
    strips: int | None = None,
) -> ndarray:
    """A random order of rows in which every `group` neighbours cost about the same in attention and patches.

    Rows are sorted by patches into strips, and within a strip by attention. They are cut into groups, and the
    groups, and the rows in each group, are put in random order. The first `unbalanced` rows are random (they
    complete a group that an earlier epoch began), and so are the last if the rest does not fill a group.
    """
    order = rng.permutation(len(attention))  # decides the order of equal rows below, too
    first, in_groups = order[:unbalanced], order[unbalanced:]
    grouped = len(in_groups) // group * group
    last, in_groups = in_groups[grouped:], in_groups[:grouped]
    groups = grouped // group
    if groups == 0:
        return order
    by_patches = in_groups[np.argsort(patches[in_groups], kind="stable")]
    strips = min(groups, strips or round(STRIPS_PER_ROOT * groups**0.5))
    edges = np.linspace(0, groups, strips + 1).astype(int) * group
    strip = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    sorted_rows = by_patches[np.lexsort((attention[by_patches], strip))]
    steps = rng.permuted(sorted_rows.reshape(groups, group), axis=1)
    return np.concatenate([first, rng.permutation(steps).ravel(), last])


def attention_cost(rows: PackedRows, lengths: ndarray) -> ndarray:
    """The sum of squared document lengths of each row."""
    return rows.sums(np.asarray(lengths, dtype=np.float64) ** 2)


def _check_fits(costs: ndarray, capacity: int, unit: str) -> None:
    if len(costs) and (worst := int(costs.max())) > capacity:
        raise ValueError(
            f"packing: document {int(costs.argmax())} has {worst} {unit}, over a row's {capacity}; drop it."
        )


def _pack_lengths(lengths: ndarray, capacity: int, order: ndarray) -> PackedRows:
    patterns, sizes, repeats = [np.zeros(0, int)], [], []
    for pattern, repeat in _patterns(np.bincount(lengths, minlength=capacity + 1).tolist(), capacity):
        patterns.append(np.tile(pattern, repeat))
        sizes.append(len(pattern))
        repeats.append(repeat)
    narrow = np.uint16 if capacity < 2**16 else np.int64  # numpy sorts 16 bits by radix
    row_lengths = np.concatenate(patterns).astype(narrow)
    documents = np.empty(len(lengths), int)
    by_length = order[np.argsort(lengths[order].astype(narrow), kind="stable")]
    documents[np.argsort(row_lengths, kind="stable")] = by_length
    return PackedRows(documents, np.concatenate([[0], np.cumsum(np.repeat(sizes, repeats), dtype=int)]))


def _patterns(counts: list[int], capacity: int) -> Iterator[tuple[list[int], int]]:
    """(lengths in a row, number of such rows), until `counts` documents of each length are used up."""
    lengths = _Lengths(counts)
    while (length := lengths.longest(capacity)) > 0:
        pattern, tokens_left, repeat = [], capacity, counts[length]
        while length > 0:
            use = min(tokens_left // length, counts[length])
            pattern += [length] * use
            repeat = min(repeat, counts[length] // use)
            tokens_left -= use * length
            length = lengths.longest(min(tokens_left, length - 1))
        for used, times in Counter(pattern).items():
            counts[used] -= times * repeat
        yield pattern, repeat


class _Lengths:
    """Finds lengths that `waiting`, a list by length, still has documents of; a used-up length stays so."""

    def __init__(self, waiting: list) -> None:
        self._waiting = waiting
        self._shorter = list(range(-1, len(waiting) - 1))  # for each length, a step down to one that is left

    def longest(self, max_length: int) -> int:
        """The greatest length left, up to `most`; 0 or less if there is none."""
        waiting, shorter = self._waiting, self._shorter
        while max_length > 0 and not waiting[max_length]:
            if (step := shorter[max_length]) > 0 and not waiting[step]:
                shorter[max_length] = shorter[step]
            max_length = shorter[max_length]
        return max_length


def _pack_both(
    lengths: ndarray, capacity: int, patches: ndarray, max_patches: int, order: ndarray
) -> PackedRows:
    """First-fit decreasing under both budgets, row by row: the longest document that fits in both.

    Among documents of one length, the one with the most patches that fit goes first. So documents without
    images are left for rows whose patches are used up.
    """
    # documents of each length, those with the most patches first
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(capacity + 1)]
    by_patches = order[np.argsort(-patches[order], kind="stable")]
    columns = (by_patches, lengths[by_patches], patches[by_patches])
    for document, length, count in zip(*map(ndarray.tolist, columns), strict=True):
        waiting[length].append((-count, document))
    fewest = np.array([-documents[-1][0] if documents else max_patches + 1 for documents in waiting])
    longest = _Lengths(waiting).longest
    # fill one row after the other with the longest document that still fits
    rows: list[list[int]] = []
    while longest(capacity) > 0:
        row, tokens_left, patches_left = [], capacity, max_patches
        while (length := _longest_within(longest, waiting, fewest, tokens_left, patches_left)) > 0:
            documents = waiting[length]
            negative, document = documents.pop(bisect_left(documents, (-patches_left, -1)))
            fewest[length] = -documents[-1][0] if documents else max_patches + 1
            row.append(document)
            tokens_left, patches_left = tokens_left - length, patches_left + negative
        rows.append(row)
    return PackedRows(np.array([d for row in rows for d in row], int), np.cumsum([0, *map(len, rows)]))


def _longest_within(
    longest: Callable, waiting: list, fewest: ndarray, tokens_left: int, patches_left: int
) -> int:
    """The greatest length up to `left` with a document of at most `patches_left` patches; 0 if none."""
    length = tokens_left
    for _ in range(TRIES):
        length = longest(length)
        if length <= 0 or -waiting[length][-1][0] <= patches_left:
            return length
        length -= 1
    fitting = np.flatnonzero(fewest[: length + 1] <= patches_left)
    return int(fitting[-1]) if len(fitting) else 0


def _shuffled_inside(rows: PackedRows, rng: np.random.Generator) -> PackedRows:
    row_of = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
    return PackedRows(rows.documents[np.lexsort((rng.random(len(row_of)), row_of))], rows.starts)
