"""Layouts of the tests of parity on as many GPUs as there are, by NCCL: in fp32 against Transformers, and in
bf16 against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity
import saved_cases
import torch
import torch.distributed as dist
from torch import Tensor

from gpu_check.exact import MOST_OF_THEIRS, errors
from gpu_check.rows import Row, read
from gpu_check.sizes import ON_CUDA, About, Sizes
from megatron_vlm.config import ParallelConfig
from megatron_vlm.models.families import load
from megatron_vlm.parallel import setup
from megatron_vlm.training.step import mean_loss
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import rank_environment

FAMILIES = ("gemma3", "qwen3_vl_moe")  # one without experts, one with
OVERLAPPED = "TP2+SP overlapped"
LAYOUTS = parity.LAYOUTS | {OVERLAPPED: (2, ParallelConfig(tp=2, tp_comm_overlap=True))}
ON_A_CPU = ("TP2+SP",)  # which shows that this part works
IN_BF16 = ("TP2+SP", OVERLAPPED)
TWO_LENGTHS = "two lengths"
ROWS = ["t", "ititit"]  # micro batches of that input


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    """Called once for the table, and again on each of the ranks that it starts."""
    if "RANK" in os.environ:
        yield from on_this_rank(Path(os.environ["GPU_CHECK_CASES"]))
        return
    cards = torch.cuda.device_count() if ON_CUDA else 2
    if cards == 1:
        yield Row("ranks", "there is one GPU", "left out")
        return
    families = [family for family in FAMILIES if family in about.families]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in families:
            path = build_tiny_checkpoint(family, folder / family / "checkpoint")
            cases = parity.cases_of(family, path) | {TWO_LENGTHS: parity.case_for(path, ROWS)}
            torch.save(cases, folder / family / "cases.pt")
        # the overlapped products come last, as they may wait for each other without a limit
        for processes, overlapped in ((2, False), (4, False), (2, True)):
            layouts = {family: layouts_of(family, processes, overlapped) for family in families}
            if processes <= cards and families:
                (folder / "layouts.json").write_text(json.dumps(layouts))
                log = "ranks_overlapped" if overlapped else f"ranks_{processes}"
                yield from launch_ranks(processes, folder, about.folder / log)


def layouts_of(family: str, processes: int, overlapped: bool) -> list[str]:
    if overlapped:
        return [OVERLAPPED]
    names = parity.layouts_of(family) if ON_CUDA else ON_A_CPU
    return [name for name in names if LAYOUTS[name][0] == processes]


def launch_ranks(processes: int, folder: Path, logs: Path) -> Iterator[Row]:
    """The rows of so many ranks as they are found, and one that is wrong for the first rank that fails. The
    logs are `logs` with the number of a rank behind it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, str(Path(__file__).parent), "--only", "ranks", "--out", str(folder)]
    ranks: dict[Path, subprocess.Popen] = {}
    for rank in range(processes):
        environment = rank_environment(rank, processes, store.port) | {"GPU_CHECK_CASES": str(folder)}
        log = Path(f"{logs}_{rank}.log")
        with open(log, "w") as file:
            ranks[log] = subprocess.Popen(words, env=os.environ | environment, stdout=file, stderr=file)
    reported = len(read(folder))
    try:
        while True:
            codes = {log: rank.poll() for log, rank in ranks.items()}
            new_rows = read(folder)[reported:]
            yield from new_rows
            reported += len(new_rows)
            for log, code in codes.items():
                if code:
                    last = " ".join(log.read_text(errors="replace").split())[-400:]
                    yield Row("ranks", f"{log.stem}, code {code}: {last}", "FAILED", wrong=True)
                    return
            if None not in codes.values():
                return
            time.sleep(0.1)
    finally:
        for rank in ranks.values():
            rank.kill()
            rank.wait()


def on_this_rank(folder: Path) -> Iterator[Row]:
    """Rank 0's are written into the folder, from which `launch_ranks` reads them."""
    setup.init_distributed(ParallelConfig(), seed=1)
    for row in compare_layouts(folder):
        if dist.get_rank() == 0:
            yield row
    dist.barrier()


def compare_layouts(folder: Path) -> Iterator[Row]:
    layouts_by_family = json.loads((folder / "layouts.json").read_text())
    for family, layouts in layouts_by_family.items():
        path, file = str(folder / family / "checkpoint"), str(folder / family / "cases.pt")
        for layout in layouts:
            if layout in IN_BF16:
                yield from against_one_process(family, layout, path, saved_cases.read(file)[TWO_LENGTHS])
            for each in parity.measure({layout: []}, path, file, LAYOUTS):
                what = f"{family}, {each['layout']}, {each['input']}, {each['worst_parameter']}"
                yield Row("ranks", what, each["max_rel_grad"], wrong=not each["passed"])


def against_one_process(family: str, layout: str, path: str, case: dict[str, Any]) -> Iterator[Row]:
    """Errors of gradients in bf16 against Transformers' in fp32, over the errors of one process. With experts
    there is no limit, as in `exact.ratios`."""
    expected = {key: grad.float() for key, grad in case["grads"].items() if grad is not None}
    loss, grads = in_bf16(ParallelConfig(), path, case)
    error_alone = errors({"gradients": grads}, {"gradients": expected})["gradients"]
    limit = None if load(family).has_experts else MOST_OF_THEIRS
    layout_loss, grads = in_bf16(LAYOUTS[layout][1], path, case)
    error = errors({"gradients": grads}, {"gradients": expected})["gradients"]
    what = f"{family}, {layout}, bf16, micro batches of two lengths"
    yield Row("ranks", f"{what}, error of gradients over one process's", error / error_alone, limit)
    yield Row("ranks", f"{what}, loss differs from one process's by", abs(layout_loss - loss))


def in_bf16(layout: ParallelConfig, path: str, case: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step with all rows on each data-parallel rank: of several ranks with the same
    rows, the mean is that of one process."""
    setup.reset_layout(layout, seed=1)
    model = parity.Model(layout, path, dtype="bf16")
    batches = [parity.on_device(without_padding(row)) for row in case["rows"]]
    loss, _ = mean_loss(parity.backward(model.ddp, batches))
    if layout.distributed_optimizer:
        parity.gather_sharded_grads(model.ddp)
    grads = {key: grad.float().cpu() for key, grad in parity.gradients_of(model.chunks, model.rules)}
    return loss, grads


def without_padding(row: dict[str, Any]) -> dict[str, Any]:
    """A batch of one row without the padding behind it."""
    length = int(row["attention_mask"].sum())
    return {key: x[..., :length] if torch.is_tensor(x) else x for key, x in row.items()}
