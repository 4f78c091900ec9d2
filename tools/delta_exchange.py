"""Compare two ways of a gated delta net under context parallelism: reports/delta_exchange.json.

python tools/delta_exchange.py [rows per case]

heads: each rank gets all tokens of the cut documents, for its part of the heads, and gives back the
outputs.
states: the ranks compute a cut document piece after piece, and hand on the state and the convolution's last
tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from megatron_vlm.parallel.context import Piece, place
from megatron_vlm.recipes.published import CONFIGS

ROOT = Path(__file__).resolve().parent.parent
MODEL = "qwen35_27b"
# tokens of a row, mean length of its documents (None: one document); lengths are lognormal with sigma 1
ROWS = [(32_768, 1_500), (32_768, None), (65_536, 8_000), (131_072, 2_000), (131_072, 8_000), (131_072, None)]
RANKS = (2, 4, 8)
NARROW, WIDE = 2, 4  # bytes of bf16, and of the fp32 of states


def lengths(tokens: int, mean: int | None, rng: np.random.Generator) -> list[int]:
    documents: list[int] = [] if mean else [tokens]
    while sum(documents) < tokens:
        documents.append(int(np.clip(rng.lognormal(np.log(mean) - 0.5, 1), 16, tokens)))
    documents[-1] -= sum(documents) - tokens
    return documents


def cut_pieces(placement: list[list[Piece]]) -> list[list[Piece]]:
    """The pieces of each rank that belong to documents on several ranks."""
    holders: dict[int, set[int]] = {}
    for rank, pieces in enumerate(placement):
        for document, _, _ in pieces:
            holders.setdefault(document, set()).add(rank)
    return [[piece for piece in pieces if len(holders[piece[0]]) > 1] for pieces in placement]


def by_heads(placement: list[list[Piece]], text: dict) -> tuple[float, float]:
    """(bytes that the busiest rank receives in a forward pass, the most work as a multiple of the mean)."""
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    outputs = values * text["linear_value_head_dim"]
    inputs = 2 * keys * text["linear_key_head_dim"] + outputs + 2 * values
    ranks = len(placement)
    cut = [sum(stop - start for _, start, stop in pieces) for pieces in cut_pieces(placement)]
    sizes = [sum(stop - start for _, start, stop in pieces) for pieces in placement]
    received = max((sum(cut) - own) * inputs / ranks + own * (1 - 1 / ranks) * outputs for own in cut)
    work = [size - own + sum(cut) / ranks for size, own in zip(sizes, cut, strict=True)]
    return NARROW * received, max(work) / np.mean(work)


def by_states(placement: list[list[Piece]], text: dict) -> tuple[float, float]:
    """As `by_heads`; the work is the time until the last rank is done, which waits for states."""
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key, value = text["linear_key_head_dim"], text["linear_value_head_dim"]
    taps = (text["linear_conv_kernel_dim"] - 1) * (2 * keys * key + values * value)
    state = WIDE * values * key * value + NARROW * taps
    cut = cut_pieces(placement)
    received = max(sum(start > 0 for _, start, _ in pieces) for pieces in cut)
    waiting = sorted((piece, rank) for rank, pieces in enumerate(cut) for piece in pieces)
    free, done = [0] * len(placement), {}
    while waiting:  # of what can start next, what can start first
        starts = [
            (max(free[rank], done[document, start] if start else 0), number)
            for number, ((document, start, _), rank) in enumerate(waiting)
            if not start or (document, start) in done
        ]
        begins, number = min(starts)
        (document, start, stop), rank = waiting.pop(number)
        free[rank] = done[document, stop] = begins + stop - start
    sizes = [sum(stop - start for _, start, stop in pieces) for pieces in placement]
    own = [sum(stop - start for _, start, stop in pieces) for pieces in cut]
    # documents that are whole fill the time in which a rank waits
    ends = [
        max(end, size) if cut_here else size for end, size, cut_here in zip(free, sizes, own, strict=True)
    ]
    return received * state, max(ends) / np.mean(sizes)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    config = json.loads((CONFIGS / f"{MODEL}.json").read_text(encoding="utf-8"))
    rows = []
    for tokens, mean in ROWS:
        for ranks in RANKS:
            rng = np.random.default_rng(0)
            placements = [place(lengths(tokens, mean, rng), ranks) for _ in range(count if mean else 1)]
            row = {"tokens": tokens, "mean": mean, "ranks": ranks}
            for way in (by_heads, by_states):
                found = [way(placement, config["text_config"]) for placement in placements]
                row[way.__name__] = np.mean(found, axis=0).round(4).tolist()
            rows.append(row)
    report = json.dumps({"model": MODEL, "rows_of_a_case": count, "rows": rows}, indent=1)
    (ROOT / "reports" / "delta_exchange.json").write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
