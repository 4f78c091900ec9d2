"""Draw the pages of a run, of two runs, and of training data: python tools/report_pictures.py

It writes docs/images/report*.png, of runs on the tutorial's images, and preview.png, of receipts drawn
here, with a tiny checkpoint. It needs Chromium and takes about two minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from browser import Page, browser  # noqa: E402
from megatron_vlm.config import RunConfig  # noqa: E402
from megatron_vlm.extras.preview.preview import preview_page  # noqa: E402
from megatron_vlm.extras.report.history import read_history  # noqa: E402
from megatron_vlm.extras.report.page import report_page  # noqa: E402
from megatron_vlm.files import atomic_write  # noqa: E402
from megatron_vlm.overrides import apply_overrides  # noqa: E402
from tiny.checkpoints import build_tiny_checkpoint  # noqa: E402

IMAGES = ROOT / "docs" / "images"
VIEWS = {  # name: runs, width, height, dark
    "report": (1, 1280, 1500, False),
    "report_dark": (1, 1280, 1500, True),
    "report_two": (2, 1280, 1500, False),
}


def trained_run(folder: Path, lr: float) -> Path:
    """A run of 200 steps on the images of the tutorial, which lie in the working directory."""
    command = [
        sys.executable,
        "-m",
        "megatron_vlm.cli",
        "train",
        "--model",
        "my-model",
        "--run-dir",
        str(folder),
    ]
    command += ["--data", "colors/train.jsonl", "--valid-data", "colors/held_out.jsonl", "train.epochs=40"]
    settings = ["global_batch_size=4", "micro_batch_size=4", "train.eval_every=20", f"name=colors, lr {lr:g}"]
    subprocess.run([*command, *settings, f"optimizer.lr={lr:g}", "optimizer.warmup_steps=20"], check=True)
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
        # the first code of the tutorial draws its images
        tutorial = (ROOT / "docs/start/tutorial.md").read_text(encoding="utf-8")
        exec(re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL)[0], {})
        build_tiny_checkpoint("qwen3_vl", Path("my-model"))
        runs = [trained_run(Path("runs", f"lr_{lr:g}"), lr) for lr in (3e-3, 3e-4)]
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
