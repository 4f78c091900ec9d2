"""Draw the pages of a run, of two runs, and of training data: python tools/report_pictures.py

It writes docs/images/report*.png, of figures that are made up by one formula, and preview.png, of receipts
that are drawn here and a tiny checkpoint. The pages are the real ones. It needs Chromium.
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

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from logged_runs import begun_run, log_step, validate  # noqa: E402

from browser import Page, browser  # noqa: E402
from megatron_vlm.callbacks.samples import BatchLog  # noqa: E402
from megatron_vlm.config import RunConfig  # noqa: E402
from megatron_vlm.extras.preview.preview import preview_page  # noqa: E402
from megatron_vlm.extras.report.history import read_history  # noqa: E402
from megatron_vlm.extras.report.page import report_page  # noqa: E402
from megatron_vlm.files import atomic_write  # noqa: E402
from megatron_vlm.overrides import apply_overrides  # noqa: E402
from tiny.checkpoints import build_tiny_checkpoint  # noqa: E402

IMAGES = ROOT / "docs" / "images"
STEPS = 400
VIEWS = {  # name: runs, width, height, dark
    "report": (1, 1280, 1500, False),
    "report_dark": (1, 1280, 1500, True),
    "report_narrow": (1, 400, 1400, False),
    "report_two": (2, 1280, 1500, False),
}


def made_up_run(folder: Path, lr: float, seed: int = 0) -> Path:
    """A run folder with the figures of STEPS steps."""
    chance = random.Random(seed)
    settings = {
        "name": f"gemma3_vl_4b lr {lr:g}",
        "run_dir": str(folder),
        "optimizer.lr": lr,
        "parallel.tp": 2,
        "model.hf_path": "google/gemma-3-4b-it",
        "data.train_data_path": "captions.jsonl,charts.jsonl",
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
        figures |= {"tokens_per_second": 22_000 * (1 + chance.gauss(0, 0.02))}
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


RECEIPT = (("Espresso", 2.4), ("Croissant", 3.1), ("Orange juice", 4.2), ("Sandwich", 6.8), ("Tip", 1.5))


def preview_of_receipts(folder: Path) -> str:
    """The page of two records about receipts, and of one with two pictures and one place for them."""
    font = ImageFont.load_default
    records = []
    # a receipt, a question about it, and the answer
    for number, items in enumerate((RECEIPT, RECEIPT[1:4])):
        total = f"{sum(price for _, price in items):.2f}"
        receipt = Image.new("RGB", (480, 360), "white")
        pen = ImageDraw.Draw(receipt)
        pen.text((160, 20), "CAFE CENTRAL", "black", font(22))
        for line, (item, price) in enumerate((*items, ("TOTAL", float(total)))):
            pen.text((40, 70 + 44 * line), item, "black", font(24))
            pen.text((370, 70 + 44 * line), f"{price:.2f}", "black", font(24))
        receipt.save(folder / f"receipt_{number}.png")
        question = "<image>What did the guest pay, and for what?"
        answer = f"{total} for {', '.join(item.lower() for item, _ in items)}."
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        records.append({"id": f"cafe-{number:03d}", "messages": turns, "images": [f"receipt_{number}.png"]})
    records.append(records[0] | {"id": "cafe-002", "images": [f"receipt_{n}.png" for n in (0, 1)]})
    (folder / "receipts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    build_tiny_checkpoint("qwen3_vl", folder / "tiny-qwen3-vl")
    settings = {"name": "receipts", "model.hf_path": "tiny-qwen3-vl", "data.dataset_type": "hf"}
    settings |= {"data.train_data_path": "receipts.jsonl", "data.min_pixels": 100_000}
    config = apply_overrides(RunConfig(), settings | {"data.max_drop_share": 1.0})
    return preview_page(config, 2, 2)[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place), browser() as page:
        runs = [made_up_run(Path("runs", f"lr_{lr:g}"), lr, seed) for seed, lr in enumerate((2e-5, 6e-6))]
        for name, (count, width, height, dark) in VIEWS.items():
            file = Path(place, f"{name}.html")
            file.write_text(report_page([read_history(run) for run in runs[:count]]), encoding="utf-8")
            draw(page, file, name, width, height, dark)
        file = Path(place, "preview.html")
        file.write_text(preview_of_receipts(Path(place)), encoding="utf-8")
        draw(page, file, "preview", 1280, 1060)


def draw(page: Page, file: Path, name: str, width: int, height: int, dark: bool = False) -> None:
    """Write docs/images/NAME.png, the top of a page in a window of a size."""
    page.open(file.as_uri(), width=width, height=height, dark=dark)
    drawn = Image.open(io.BytesIO(page.picture())).convert("RGB").quantize(128)
    out = io.BytesIO()
    drawn.save(out, "PNG", optimize=True)
    atomic_write(IMAGES / f"{name}.png", out.getvalue())
    print(f"{name}.png: {len(out.getvalue()) // 1000} kB, console: {page.complaints or 'silent'}")


if __name__ == "__main__":
    main()
