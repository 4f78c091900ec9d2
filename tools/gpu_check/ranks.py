"""Every layout of the tests of parity, on as many GPUs as there are, by NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import parity
import torch
import torch.distributed as dist

from gpu_check.rows import Row
from gpu_check.sizes import ON_CUDA, About, Sizes
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import rank_environment

FAMILIES = ("gemma3", "qwen3_vl_moe")  # one without experts, one with
ON_A_CPU = {"TP2+SP"}  # which shows that this part works
SECONDS = 300  # of the ranks of one family


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    """Called once for the table, and again on each of the ranks that it starts."""
    if "RANK" in os.environ:
        yield from on_this_rank(Path(os.environ["GPU_CHECK_CASES"]))
        return
    cards = torch.cuda.device_count() if ON_CUDA else 2
    for family in FAMILIES:
        if family in about.families:
            yield from of_family(family, cards, about)


def of_family(family: str, cards: int, about: About) -> Iterator[Row]:
    layouts = [name for name in parity.layouts_of(family) if 1 < parity.LAYOUTS[name][0] <= cards]
    if not ON_CUDA:
        layouts = [name for name in layouts if name in ON_A_CPU]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = build_tiny_checkpoint(family, folder / "checkpoint")
        torch.save(parity.cases_of(family, path), folder / "cases.pt")
        for processes in sorted({parity.LAYOUTS[name][0] for name in layouts}):
            asked = {name: [] for name in layouts if parity.LAYOUTS[name][0] == processes}
            (folder / "asked.json").write_text(json.dumps(asked))
            found = measured(processes, folder)
            if isinstance(found, str):
                yield Row("ranks", f"{family}, {processes} ranks: {found}", "FAILED", wrong=True)
                continue
            for each in found:
                what = f"{family}, {each['layout']}, {each['input']}, {each['worst_parameter']}"
                yield Row("ranks", what, each["max_rel_grad"], wrong=not each["passed"])
    if not layouts:
        yield Row("ranks", f"{family}: {cards} GPU", "left out")


def measured(processes: int, folder: Path) -> list[dict] | str:
    """The rows of `parity.measure` in so many processes, or what the first of them ended with."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, str(Path(__file__).parent), "--only", "ranks", "--out", str(folder)]
    ranks = []
    for rank in range(processes):
        given = rank_environment(rank, processes, store.port) | {"GPU_CHECK_CASES": str(folder)}
        with open(folder / f"rank{rank}.log", "w") as log:
            ranks.append(subprocess.Popen(words, env=os.environ | given, stdout=log, stderr=log))
    try:
        for number, rank in enumerate(ranks):
            if rank.wait(SECONDS):
                last = (folder / f"rank{number}.log").read_text(errors="replace").split()
                return f"rank {number} ended with code {rank.returncode}: {' '.join(last)[-400:]}"
        return json.loads((folder / "found.json").read_text())
    except subprocess.TimeoutExpired:
        return f"was ended after {SECONDS} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def on_this_rank(folder: Path) -> Iterator[Row]:
    asked = json.loads((folder / "asked.json").read_text())
    found = parity.measure(asked, str(folder / "checkpoint"), str(folder / "cases.pt"))
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    yield from ()
