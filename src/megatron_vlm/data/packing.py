"""Which documents share a row: packing of exact lengths under a token and a patch budget, balanced order.

Pure numpy; nothing here knows what a sample is. A document is an index into the arrays of its costs, and
every document given is in exactly one row that comes back. One over a budget raises ValueError: the caller
drops and counts it before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

STRIPS_PER_ROOT = (
    3  # strips of equal patches for each root of the number of groups; see reports/bench_packing.json
)


@dataclass
class Rows:
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
        """What each row costs, where `costs` says it of each document."""
        return np.add.reduceat(costs[self.documents], self.starts[:-1]) if len(self) else costs[:0]


def pack(
    lengths: ndarray,
    capacity: int,
    patches: ndarray | None = None,
    patch_capacity: int | None = None,
    rng: np.random.Generator | None = None,
) -> Rows:
    """First-fit decreasing: few rows of at most `capacity` tokens and `patch_capacity` patches each.

    `rng` decides which of several documents of one length goes where and the order of documents in a row;
    None: the first comes first, longest first. Rows come in no useful order (see `balanced_order`).

    First fit of sorted lengths fills one row after the other with the longest document that still fits, so a
    row is found once per combination of lengths and repeated while there are enough documents: at most one
    combination per distinct length. Only rows over the patch budget are packed again, document by document.
    """
    lengths = np.asarray(lengths)
    _check_fits(lengths, capacity, "tokens")
    rows = _pack_lengths(lengths, capacity, rng)
    if patch_capacity is not None:
        assert patches is not None, "a patch budget needs the documents' patches"
        patches = np.asarray(patches)
        _check_fits(patches, patch_capacity, "patches")
        rows = _within_patches(rows, lengths, capacity, patches, patch_capacity)
    return rows if rng is None else _shuffled_inside(rows, rng)


def pack_buffer(
    lengths: list[int], capacity: int, patches: list[int], patch_capacity: int | None
) -> list[list[int]]:
    """The documents of each row, rows in a random order that follows from the lengths alone.

    So equal buffers give equal rows, wherever and whenever they are packed.
    """
    rng = np.random.default_rng(lengths)
    rows = pack(np.array(lengths, int), capacity, np.array(patches, int), patch_capacity, rng)
    assert len(rows.documents) == len(lengths), "packing lost a document"
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

    Rows are sorted by patches into strips and within a strip by attention, cut into groups, and the groups
    put in random order, as the rows within each. The first `unbalanced` rows are any (they complete a group
    that an earlier epoch began); so are the last ones when the rest is no multiple of `group`.
    """
    order = rng.permutation(len(attention))  # also decides between equals below
    first, rest = order[:unbalanced], order[unbalanced:]
    whole = len(rest) // group * group
    last, rest = rest[whole:], rest[:whole]
    groups = whole // group
    if groups == 0:
        return order
    by_patches = rest[np.argsort(patches[rest], kind="stable")]
    strips = min(groups, strips or round(STRIPS_PER_ROOT * groups**0.5))
    edges = np.linspace(0, groups, strips + 1).astype(int) * group
    strip = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    sorted_rows = by_patches[np.lexsort((attention[by_patches], strip))]
    steps = rng.permuted(sorted_rows.reshape(groups, group), axis=1)
    return np.concatenate([first, rng.permutation(steps).ravel(), last])


def attention_cost(rows: Rows, lengths: ndarray) -> ndarray:
    """The sum of squared document lengths of each row."""
    return rows.sums(np.asarray(lengths, dtype=np.float64) ** 2)


def _check_fits(costs: ndarray, capacity: int, unit: str) -> None:
    if len(costs) and (worst := int(costs.max())) > capacity:
        raise ValueError(
            f"packing: document {int(costs.argmax())} has {worst} {unit}, over a row's {capacity}; drop it."
        )


def _pack_lengths(lengths: ndarray, capacity: int, rng: np.random.Generator | None) -> Rows:
    counts = np.bincount(lengths, minlength=capacity + 1).tolist()
    patterns, repeats = [], []
    for pattern, repeat in _patterns(counts, capacity):
        patterns.append(np.tile(pattern, repeat))
        repeats.append((len(pattern), repeat))
    if not patterns:
        return Rows(np.zeros(0, int), np.zeros(1, int))
    wanted = np.concatenate(patterns).astype(_narrow(capacity))
    sizes, times = np.array(repeats).T
    starts = np.concatenate([[0], np.cumsum(np.repeat(sizes, times))])
    documents = np.empty(len(lengths), int)
    shuffled = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    by_length = shuffled[np.argsort(lengths[shuffled].astype(_narrow(capacity)), kind="stable")]
    documents[np.argsort(wanted, kind="stable")] = by_length
    return Rows(documents, starts)


def _narrow(capacity: int) -> type:
    return np.uint16 if capacity < 2**16 else np.int64  # numpy sorts 16 bits by radix


def _patterns(counts: list[int], capacity: int) -> Iterator[tuple[list[int], int]]:
    """(lengths of a row, number of such rows), until `counts` documents of each length are used up."""
    shorter = list(range(-1, capacity))  # a step towards the next length of which documents are left

    def longest(most: int) -> int:
        while most > 0 and not counts[most]:
            if not counts[step := shorter[most]] and step > 0:
                shorter[most] = shorter[step]
            most = shorter[most]
        return most

    while (length := longest(capacity)) > 0:
        pattern, left, repeat = [], capacity, counts[length]
        while length > 0:
            use = min(left // length, counts[length])
            pattern += [length] * use
            repeat = min(repeat, counts[length] // use)
            left -= use * length
            length = longest(min(left, length - 1))
        for used, times in Counter(pattern).items():
            counts[used] -= times * repeat
        yield pattern, repeat


def _within_patches(rows: Rows, lengths: ndarray, capacity: int, patches: ndarray, most: int) -> Rows:
    """Rows over the budget are packed again, together with enough rows of few patches to go with them."""
    totals = rows.sums(patches)
    over = int((totals > most).sum())
    if over == 0:
        return rows
    by_patches = np.argsort(totals, kind="stable")
    few, many = by_patches[: len(rows) - over], by_patches[len(rows) - over :]
    room = np.cumsum(most - totals[few])
    needed = 2 * int((totals[many] - most).sum())  # room cannot all be used
    partners = few[: min(len(few), int(np.searchsorted(room, needed)) + 1)]
    kept = np.setdiff1d(np.arange(len(rows)), np.concatenate([many, partners]))
    again = np.concatenate([rows[row] for row in (*many, *partners)])
    packed = _pack_both(lengths[again], capacity, patches[again], most)
    return _rows([*(rows[row] for row in kept), *(again[row] for row in packed)])


def _pack_both(lengths: ndarray, capacity: int, patches: ndarray, most: int) -> list[list[int]]:
    """First-fit decreasing under both budgets, a row at a time: the longest document that fits in both.

    Of documents of one length, those of most patches come first, so that text is left to fill rows up.
    """
    waiting: list[list[int]] = [[] for _ in range(capacity + 1)]
    for document in np.argsort(-patches, kind="stable").tolist():
        waiting[lengths[document]].append(document)
    none = most + 1
    fewest = np.array([patches[docs[-1]] if docs else none for docs in waiting])  # patches, by length
    rows, left = [], len(lengths)
    while left:
        row, tokens_left, patches_left = [], capacity, most
        while len(fits := np.flatnonzero(fewest[: tokens_left + 1] <= patches_left)):
            length = int(fits[-1])
            docs = waiting[length]
            pick = next(i for i, document in enumerate(docs) if patches[document] <= patches_left)
            document = docs.pop(pick)
            fewest[length] = patches[docs[-1]] if docs else none
            row.append(document)
            tokens_left, patches_left = tokens_left - length, patches_left - int(patches[document])
        rows.append(row)
        left -= len(row)
    return rows


def _rows(rows: list) -> Rows:
    sizes = [len(row) for row in rows]
    return Rows(np.concatenate([np.asarray(row, int) for row in rows]), np.cumsum([0, *sizes]))


def _shuffled_inside(rows: Rows, rng: np.random.Generator) -> Rows:
    row_of = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
    return Rows(rows.documents[np.lexsort((rng.random(len(row_of)), row_of))], rows.starts)
