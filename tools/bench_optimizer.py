"""Measure on a CPU what checkpoints need of a rank's memory, and what gradients in bf16 cost in exactness.

python tools/bench_optimizer.py        writes reports/bench_optimizer.json

Four processes under data parallelism save and load a model in bf16, as this package does and as Megatron's
fully reshardable format does. Two processes compute the gradients of a tiny model of real conversations.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import checkpoint_memory  # noqa: E402
import gradient_error  # noqa: E402
import parity  # noqa: E402
import torch  # noqa: E402

from megatron_vlm.models.hf import open_source  # noqa: E402
from tiny.checkpoints import build_tiny_checkpoint  # noqa: E402
from tiny.distributed import run_distributed  # noqa: E402

REPORT = ROOT / "reports" / "bench_optimizer.json"
RANKS = 4


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    report = {
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
        "ranks": RANKS,
        "checkpoints": {name: memory(name == "gathered") for name in ("gathered", "own shares")},
        "gradients": {family: errors(family) for family in ("gemma3", "qwen3_vl", "qwen3_vl_moe")},
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))


def memory(gathered: bool) -> dict[str, int]:
    """The most of any rank."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_distributed(RANKS, checkpoint_memory.of_rank, folder, gathered)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def errors(family: str) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(build_tiny_checkpoint(family, Path(folder) / "model"))
        hf, batch, rows = parity.encode(source.processor, source.description, ["it", "t"] * 16)
        torch.save({"hf": hf, "batch": batch, "rows": rows}, f"{folder}/case.pt")
        return run_distributed(2, gradient_error.of_ranks, f"{folder}/model", f"{folder}/case.pt")[0]


if __name__ == "__main__":
    main()
