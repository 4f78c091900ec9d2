"""Which context-parallel rank holds which tokens of a micro batch, and which keys travel. Host only, numpy.

A micro batch is a stream of documents. Every rank gets equally many of its tokens, as pieces (document,
start, stop). A query needs the keys before it in its document. So a document that stays on one rank costs no
traffic; only what balance demands is cut.
"""

import itertools
from collections.abc import Sequence

Piece = tuple[int, int, int]  # document, first token, token after the last
MOST_WORK = 1.25  # of the mean: among placements below it, the one with the least traffic is taken


def place(
    lengths: Sequence[int], ranks: int, blocks: Sequence[tuple[int, int, int]] = ()
) -> list[list[Piece]]:
    """The pieces of every rank, by document and token.

    The ranks' numbers of tokens differ by one at most, except that no cut falls inside a block (document,
    start, stop), whose tokens all see each other. Every process computes the same.
    """
    if ranks == 1:
        return [[(document, 0, length) for document, length in enumerate(lengths)]]
    placements = [_dealt(lengths, ranks, most_work) for most_work in (1.0, 1.1, 1.2)]
    mean = sum(work(0, length) for length in lengths) / ranks

    def cost(placement: list[list[Piece]]) -> tuple[float, float]:
        heaviest = max(sum(work(a, b) for _, a, b in pieces) for pieces in placement) / max(mean, 1)
        return max(heaviest, MOST_WORK), max(map(received, placement)) + heaviest

    best = min(placements, key=cost)
    return [_merged(pieces) for pieces in _without_cut_blocks(best, blocks)]


def work(start: int, stop: int) -> float:
    """Pairs of a query of [start, stop) and a key that it sees."""
    return (stop * (stop + 1) - start * (start + 1)) / 2


def received(pieces: Sequence[Piece]) -> int:
    """The number of keys that a rank with these pieces does not hold and needs."""
    needed: dict[int, int] = {}
    for document, _, stop in pieces:
        needed[document] = max(needed.get(document, 0), stop)
    return sum(needed.values()) - sum(stop - start for _, start, stop in pieces)


def _dealt(lengths: Sequence[int], ranks: int, most_work: float) -> list[list[Piece]]:
    """Cuts documents, most work first, among the fewest ranks with room that stay below `most_work` means.
    A document on k ranks is cut into 2k runs: each of the k takes one from the front and one from the back,
    which is equal work. What fits nowhere fills the gaps.
    """
    total = sum(lengths)
    room = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    load = [0.0] * ranks
    limit = most_work * sum(work(0, length) for length in lengths) / ranks
    placement: list[list[Piece]] = [[] for _ in range(ranks)]
    remaining: list[Piece] = []

    def give(rank: int, document: int, start: int, stop: int) -> int:
        """Give the rank as much as it has room for; return the end."""
        stop = min(stop, start + room[rank])
        if start < stop:
            placement[rank].append((document, start, stop))
            room[rank] -= stop - start
            load[rank] += work(start, stop)
        return stop

    def takers(length: int) -> list[int]:
        """The ranks that share a document; none if too few have room."""
        by_load = sorted(range(ranks), key=lambda rank: (load[rank], -room[rank]))
        chosen: list[int] = []
        for count in range(1, ranks + 1):
            chosen = [rank for rank in by_load if room[rank] >= length // count][:count]
            if len(chosen) == count and load[chosen[-1]] + work(0, length) / count <= limit:
                return chosen
        return chosen if len(chosen) == ranks else []

    # the longest first: what is short fits into the gaps that they leave
    for document in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
        length, chosen = lengths[document], takers(lengths[document])
        runs = 2 * len(chosen) if len(chosen) > 1 else 1
        edges = [round(i * length / runs) for i in range(runs + 1)]
        for i, (start, stop) in enumerate(itertools.pairwise(edges)):
            reached = give(chosen[min(i, runs - 1 - i)], document, start, stop) if chosen else start
            if reached < stop:
                remaining.append((document, reached, stop))
    # now only numbers of tokens must come out even, whatever the work
    for document, start, stop in remaining:
        while start < stop:
            start = give(max(range(ranks), key=room.__getitem__), document, start, stop)
    return placement


def _without_cut_blocks(
    placement: list[list[Piece]], blocks: Sequence[tuple[int, int, int]]
) -> list[list[Piece]]:
    """Cuts inside a block move to its nearer end."""
    if not blocks:
        return placement
    of_document: dict[int, list[tuple[int, int]]] = {}
    for document, start, stop in blocks:
        of_document.setdefault(document, []).append((start, stop))

    def moved(document: int, cut: int) -> int:
        for start, stop in of_document.get(document, ()):
            if start < cut < stop:
                return start if cut - start <= stop - cut else stop
        return cut

    return [[(d, moved(d, a), moved(d, b)) for d, a, b in pieces] for pieces in placement]


def _merged(pieces: list[Piece]) -> list[Piece]:
    """In order, without empty ones, and neighbours joined."""
    merged: list[Piece] = []
    for document, start, stop in sorted(pieces):
        if merged and merged[-1][0] == document and merged[-1][2] == start:
            merged[-1] = (document, merged[-1][1], stop)
        elif start < stop:
            merged.append((document, start, stop))
    return merged
