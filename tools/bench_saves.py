"""Measure on a CPU how long training stands still while a checkpoint is written beside it.

python tools/bench_saves.py        writes reports/bench_saves.json

One process saves a model of 20 million parameters (bf16 with fp32 Adam) in both ways in turns, and computes
between them. What is compared is the time until training may go on. No way can be shorter than a copy of as
many bytes, which is measured in turns with them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import checkpoint_memory  # noqa: E402
import torch  # noqa: E402

from megatron_vlm.config import ParallelConfig, RunConfig  # noqa: E402
from tiny.distributed import run_distributed  # noqa: E402

REPORT = ROOT / "reports" / "bench_saves.json"
TIMES = 7


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        (seconds,) = run_distributed(1, blocked, folder)
    report = {"date": str(datetime.date.today()), "torch": torch.__version__, **seconds}
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))


def blocked(folder: str) -> dict[str, float]:
    """Medians of the seconds for which a save holds training up, in both ways, and of a copy alone."""
    from megatron_vlm.callbacks.checkpoints import CheckpointWriter
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    run = RunConfig(run_dir=folder)
    parts = checkpoint_memory.parts(run)
    writers = {}
    for beside in (False, True):
        run.train.async_save = beside
        writers[beside] = CheckpointWriter(run, *parts)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    copies = []
    source = torch.empty(0)
    for number in range(2 * (TIMES + 1)):  # the first of each loads what it needs, and does not count
        beside = bool(number % 2)
        began = time.perf_counter()
        writers[beside].save(number + 1, {}, {})
        seconds[beside].append(time.perf_counter() - began)
        while beside and time.perf_counter() < began + 1:  # as a step of training
            torch.ones(300, 300) @ torch.ones(300, 300)
        writers[beside].wait()
        if not number:
            files = Path(folder, "checkpoints").glob("step_*/*")
            source = torch.zeros(sum(file.stat().st_size for file in files), dtype=torch.uint8)
            place = torch.zeros_like(source)
        began = time.perf_counter()
        place.copy_(source)
        copies.append(time.perf_counter() - began)
    waited, beside = (statistics.median(seconds[way][1:]) for way in (False, True))
    return {
        "bytes": source.nbytes,
        "waited": waited,
        "beside": beside,
        "copy": statistics.median(copies[1:]),
        "ratio": beside / waited,
    }


if __name__ == "__main__":
    main()
