"""Measure packing and balance, print a table and write reports/bench_packing.json.

python tools/bench_packing.py [--documents 1000000] [--out FILE]

Documents are drawn at random, lengths and patches only. Two distributions: "lognormal" has lengths of median
600 (sigma 0.9), 60 % of them with images of 0.3 to 0.9 of their tokens; "images" has a text of median 150 and
in 60 % an image of median 700 pixels a side, cut into visual tokens of 28 x 28 pixels. A visual token is 4
patches. Seconds are CPU time of one core, the best of three.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from megatron_vlm.data.encode.packing import attention_cost, balanced_order, pack, pack_buffer

ROOT = Path(__file__).resolve().parent.parent
BUFFER, RANKS, BALANCED_DOCUMENTS = 1000, 8, 100_000
# quantity -> (limit, whether it is the most or the least allowed)
LIMITS = {
    "seconds": (1.0, "most"),
    "fill_global": (0.999, "least"),
    "fill_buffer": (0.994, "least"),
    "lost": (0, "most"),
    "straggler_tokens": (1.05, "most"),
    "straggler_patches": (1.05, "most"),
    "straggler_attention": (1.3, "most"),
}


def lognormal(count: int, capacity: int, rng: np.random.Generator) -> tuple[ndarray, ndarray]:
    tokens = np.clip(rng.lognormal(np.log(600), 0.9, count), 16, capacity).astype(int)
    share = np.where(rng.random(count) < 0.6, rng.uniform(0.3, 0.9, count), 0)
    return tokens, 4 * (tokens * share).astype(int)


def images(count: int, capacity: int, rng: np.random.Generator) -> tuple[ndarray, ndarray]:
    text = rng.lognormal(np.log(150), 1.0, count).astype(int) + 16
    side = np.clip(rng.lognormal(np.log(700), 0.5, count), 56, 1600)
    visual = np.where(rng.random(count) < 0.6, (side / 28).astype(int) ** 2, 0)
    return np.minimum(text + visual, capacity), 4 * np.minimum(visual, capacity)


def measure(
    documents: int, distribution: Callable[..., tuple[ndarray, ndarray]], capacity: int
) -> dict[str, Any]:
    tokens, patches = distribution(documents, capacity, np.random.default_rng(0))
    rows, seconds = timed(lambda: pack(tokens, capacity, rng=np.random.default_rng(1)))
    stream = buffered(tokens, np.arange(documents), capacity)
    # the patch budget: a fifth above the mean of full rows, so that it limits many rows
    budget = max(int(1.2 * rows.sums(patches).mean()), int(patches.max()))
    both, seconds_both = timed(
        lambda: pack(tokens, capacity, patches, budget, np.random.default_rng(1)), times=1
    )
    fewest = max(tokens.sum() / capacity, patches.sum() / budget)
    return {
        "distribution": distribution.__name__,
        "capacity": capacity,
        "documents": documents,
        "seconds": round(seconds, 3),
        "fill_global": fill(tokens, len(rows), capacity),
        "fill_buffer": fill(tokens, len(stream), capacity),
        "lost": lost(rows.documents, documents)
        + lost(both.documents, documents)
        + lost(np.concatenate(stream), documents),
        "patch_budget": budget,
        "rows_with_patch_budget_over_bound": round(len(both) / fewest, 5),
        "seconds_with_patch_budget": round(seconds_both, 3),
        **stragglers(*distribution(BALANCED_DOCUMENTS, capacity, np.random.default_rng(2)), capacity),
    }


def timed(work: Callable[[], Any], times: int = 3) -> tuple[Any, float]:
    """What `work` returns, and the seconds of its fastest run."""
    seconds = []
    for _ in range(times):
        began = time.process_time()
        result = work()
        seconds.append(time.process_time() - began)
    return result, min(seconds)


def fill(tokens: ndarray, rows: int, capacity: int) -> float:
    return round(float(tokens.sum() / (rows * capacity)), 5)


def lost(packed: ndarray, documents: int) -> int:
    """The number of documents that are missing or there twice."""
    return documents - len(np.unique(packed)) + len(packed) - documents


def stragglers(tokens: ndarray, patches: ndarray, capacity: int) -> dict[str, float]:
    """The ranks' greatest cost divided by their mean cost, averaged over steps: for global packing, and for
    packing by every rank from its own buffers."""
    rng = np.random.default_rng(3)
    rows = pack(tokens, capacity, rng=rng)
    order = balanced_order(attention_cost(rows, tokens), rows.sums(patches), RANKS, rng)
    steps = order[: len(order) // RANKS * RANKS].reshape(-1, RANKS)
    streams = [buffered(tokens, np.arange(rank, len(tokens), RANKS), capacity) for rank in range(RANKS)]
    together = range(min(map(len, streams)))
    found = {}
    for name, cost in {"tokens": tokens, "patches": patches, "attention": tokens.astype(float) ** 2}.items():
        found[f"straggler_{name}"] = straggler(rows.sums(cost)[steps])
        costs = [[cost[stream[step]].sum() for stream in streams] for step in together]
        found[f"straggler_{name}_stream"] = straggler(np.array(costs))
    return found


def buffered(tokens: ndarray, documents: ndarray, capacity: int) -> list[ndarray]:
    """The rows that one stream makes, each with its documents."""
    buffers = np.array_split(documents, max(1, len(documents) // BUFFER))
    return [
        buffer[row]
        for buffer in buffers
        for row in pack_buffer(tokens[buffer].tolist(), capacity, [0] * len(buffer), None)
    ]


def straggler(costs_SR: ndarray) -> float:
    """The greatest over the mean cost, averaged over steps; `costs_SR` has the cost of each step and rank."""
    costs_SR = costs_SR[costs_SR.sum(1) > 0]  # a step without any cost is balanced
    return round(float((costs_SR.max(1) / costs_SR.mean(1)).mean()), 4)


def met(quantity: str, value: float) -> bool:
    limit, kind = LIMITS[quantity]
    return value <= limit if kind == "most" else value >= limit


def show(rows: list[dict]) -> None:
    names = [f"{row['distribution']} {row['capacity']}" for row in rows]
    print(f"{'':<22}{'limit':>10}" + "".join(f"{name:>17}" for name in names))
    for quantity, (limit, kind) in LIMITS.items():
        marks = [f"{row[quantity]}{'' if met(quantity, row[quantity]) else ' !'}" for row in rows]
        sign = "<=" if kind == "most" else ">="
        print(f"{quantity:<22}{f'{sign} {limit}':>10}" + "".join(f"{mark:>17}" for mark in marks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench_packing.json")
    arguments = parser.parse_args()
    rows = [
        measure(arguments.documents, distribution, capacity)
        for distribution in (lognormal, images)
        for capacity in (4096, 8192)
    ]
    show(rows)
    report = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "buffer": BUFFER,
        "ranks": RANKS,
        "limits": {name: f"at {kind} {limit}" for name, (limit, kind) in LIMITS.items()},
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
