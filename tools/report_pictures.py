"""Draw the page of a run, light, dark, narrow, and of two runs: python tools/report_pictures.py

It writes docs/images/report_*.png. The figures are made up, by one formula; the page is the real one. It
needs Chromium.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/helpers"))

from logged_runs import begun_run, log_step, validate  # noqa: E402

from browser import browser  # noqa: E402
from megatron_vlm.callbacks.samples import BatchLog  # noqa: E402
from megatron_vlm.config import RunConfig  # noqa: E402
from megatron_vlm.extras.report.history import read_history  # noqa: E402
from megatron_vlm.extras.report.page import report_page  # noqa: E402
from megatron_vlm.files import atomic_write  # noqa: E402
from megatron_vlm.overrides import apply_overrides  # noqa: E402

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
STEPS = 400
VIEWS = {  # name: runs, width, height, dark
    "light": (1, 1280, 1500, False),
    "dark": (1, 1280, 1500, True),
    "narrow": (1, 400, 1400, False),
    "two": (2, 1280, 1500, False),
}


def made_up_run(folder: Path, lr: float, seed: int = 0) -> Path:
    """A run folder with the figures of STEPS steps."""
    chance = random.Random(seed)
    settings = {
        "name": f"gemma3_vl_4b lr {lr:g}",
        "run_dir": str(folder),
        "optimizer.lr": lr,
        "parallel.tp": 2,
    }
    settings |= {"train.steps": STEPS, "logging.tensorboard": False}
    config = apply_overrides(RunConfig(), settings)
    run = begun_run(config, STEPS)
    batches = BatchLog(folder, 0, 1, first_step=1)
    for step in range(1, STEPS + 1):
        loss = 0.8 + 1.6 * math.exp(-step * lr * 1e3) + chance.gauss(0, 0.03)
        rate = lr * min(1, step / 20) * (1 + math.cos(math.pi * step / STEPS)) / 2
        figures = {"mfu": 0.41 + chance.gauss(0, 0.01), "padding": 0.03 + chance.random() / 50}
        figures |= {"data_seconds": 0.05 + chance.random() / 10, "peak_memory_gb": 61 + step / STEPS}
        figures |= {"images_per_second_per_device": 11 + chance.random(), "epoch": step / 200}
        figures |= {"trained_tokens/captions": 9000, "trained_tokens/charts": 3000, "samples/captions": 60}
        figures |= {"samples/charts": 24}
        numbers = {"loss": loss, "lr": rate, "grad_norm": 1 + chance.random(), "trained_tokens": 12_000}
        log_step(run, dropped=step // 90, seconds=2.9 + chance.random() / 5, **numbers, **figures)
        batches.write(step, [{"__key__": [["a", "b"], ["c"]], "__restore_key__": step}])
        if step % 50 == 0:
            validate(run, 0.85 + 1.6 * math.exp(-step * lr * 1e3))
    run.callbacks.close()
    batches.close()
    (folder / "drops").mkdir()
    drop = {"key": "charts-000381", "reason": "over_length", "detail": "4630 tokens, seq_length = 4096"}
    atomic_write(folder / "drops/rank0.jsonl", json.dumps(drop) + "\n")
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place), browser() as page:
        runs = [made_up_run(Path("runs", f"lr_{lr:g}"), lr, seed) for seed, lr in enumerate((2e-5, 6e-6))]
        for name, (count, width, height, dark) in VIEWS.items():
            file = Path(place, f"{name}.html")
            file.write_text(report_page([read_history(run) for run in runs[:count]]), encoding="utf-8")
            page.open(file.as_uri(), width=width, height=height, dark=dark)
            drawn = Image.open(io.BytesIO(page.picture())).convert("RGB").quantize(128)
            out = io.BytesIO()
            drawn.save(out, "PNG", optimize=True)
            atomic_write(IMAGES / f"report_{name}.png", out.getvalue())
            print(
                f"report_{name}.png: {len(out.getvalue()) // 1000} kB, console: {page.complaints or 'silent'}"
            )


if __name__ == "__main__":
    main()
