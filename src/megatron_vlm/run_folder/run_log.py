"""What a run shows and leaves behind: progress bar, metrics.jsonl, TensorBoard, W&B, loss.png, contact sheet.

Steps are counted from 1. In a run folder:

    config.yaml     the full configuration
    metrics.jsonl   one row a step, its numbers as in docs/metrics.md; validation rows hold `valid_loss`
    tensorboard/    the same numbers as events
    loss.png        training and validation loss over steps
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_vlm.config import RunConfig
from megatron_vlm.files import read_rows
from megatron_vlm.overrides import to_yaml
from megatron_vlm.run_folder.folder import write_whole

PLAIN_LINES = 20  # lines that a whole run prints if there is no terminal for a bar
IN_WORDS = {  # figures of a step, as the bar shows them; docs/metrics.md explains them
    "epoch": "epoch {:.2f}",
    "margin": "margin {:.2f}",
    "accuracy": "accuracy {:.0%}",
    "mfu": "MFU {:.1%}",
    "tokens_per_second_per_device": "{:,.0f} tokens/s/device",
    "images_per_second_per_device": "{:,.1f} images/s/device",
    "padding": "padding {:.0%}",
    "data_seconds": "data {:.2f} s",
    "peak_memory_gb": "{:.1f} GB",
    "expert_balance": "experts {:.2f}",
}
TOTALS = ("trained_tokens", "dropped_samples")  # of a run since its first step, resumes included
OF_A_SOURCE = ("trained_tokens/", "samples/")  # so begin the names of further totals, if there are sources


class RunLogger:
    """Logs a run on the one rank with `is_writer`; does nothing on the others.

    `start_step` is the first step that will be logged: 1, or one more than the step of the loaded checkpoint.
    Rows of that and later steps from an interrupted run are dropped, so every step appears once.
    `totals` are the trained tokens and dropped samples before it, and those of each source; None: as the
    kept rows say.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: RunConfig,
        total_steps: int,
        start_step: int = 1,
        is_writer: bool = True,
        totals: dict[str, int] | None = None,
    ):
        self.is_writer, self.totals = is_writer, dict.fromkeys(TOTALS, 0)
        if not is_writer:
            return
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(self.run_dir / "config.yaml", to_yaml(config))
        self.total_steps, self.log_every = total_steps, config.logging.log_every
        self.totals = _keep_rows_before(self.run_dir / "metrics.jsonl", start_step)
        self.totals |= {total: number for total, number in (totals or {}).items() if _is_total(total)}
        self._dropped_before = self.totals["dropped_samples"]
        self._file = (self.run_dir / "metrics.jsonl").open(
            "a", encoding="utf-8", buffering=1
        )  # line-buffered
        self._events = _tensorboard(self.run_dir, start_step) if config.logging.tensorboard else None
        self._wandb = _wandb(config) if config.logging.wandb_project else None
        self._valid_loss: float | None = None
        self._first_step, self._started = start_step, time.monotonic()
        self._bar = self._progress_bar(config.name) if sys.stderr.isatty() else None

    def log_step(
        self,
        step: int,
        loss: float,
        lr: float,
        grad_norm: float,
        trained_tokens: int,
        seconds: float,
        dropped: int | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """One optimizer step: `trained_tokens` and `seconds` are this step's, `dropped` samples are those
        since `start_step`, and `figures` what `training.figures` says of it."""
        if not self.is_writer:
            return
        self.totals["trained_tokens"] += trained_tokens
        self.totals["dropped_samples"] = self._dropped_before + (dropped or 0)
        figures = dict(figures or {})
        for name in filter(_is_total, list(figures)):
            self.totals[name] = self.totals.get(name, 0) + figures.pop(name)
        rate = trained_tokens / max(seconds, 1e-9)
        if step % self.log_every == 0 or step in (1, self.total_steps):
            numbers = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_second": rate}
            self._write(step, {**numbers, "seconds": seconds, **self.totals, **figures})
        words = [f"loss {loss:.4f} · lr {lr:.2e} · grad {grad_norm:.2f} · {_short(rate)} trained tokens/s"]
        self._show(step, " · ".join([*words, *_in_words(figures)]))

    def log_eval(self, step: int, loss: float | None, by_source: Mapping[str, float] | None = None) -> None:
        """Log the validation loss after `step`, the last logged step, and the figures of each source; None
        if there is no validation data."""
        if loss is None or not self.is_writer:
            return
        self._valid_loss = loss
        figures = {f"valid_{name}": number for name, number in (by_source or {}).items()}
        self._write(step, {"valid_loss": loss, **figures})
        words = [f"{name} {number:.4f}" for name, number in figures.items() if name.startswith("valid_loss/")]
        self.message(" · ".join([f"step {step}: validation loss {loss:.4f}", *words]))

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        if self.is_writer:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def save(self) -> None:
        """Bring files on disk and loss.png up to date; called when a checkpoint is written."""
        if self.is_writer:
            self._file.flush()
            if self._events:
                self._events.flush()
            draw_losses(self.run_dir / "metrics.jsonl", self.run_dir / "loss.png")

    def close(self) -> None:
        """Finish everything; safe to call more than once."""
        if not self.is_writer or self._file.closed:
            return
        if self._bar is not None:
            self._bar.close()
        self.save()
        self._file.close()
        if self._events:
            self._events.close()
        if self._wandb:
            self._wandb.finish()

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        # JSON knows no NaN; null keeps the row readable everywhere
        row = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()
        if self._events:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)

    def _progress_bar(self, name: str) -> tqdm:
        return tqdm(total=self.total_steps, initial=self._first_step - 1, desc=name, unit="step")

    def _show(self, step: int, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        every = max(1, self.total_steps // PLAIN_LINES)
        if step % every == 0 or step in (self._first_step, self.total_steps):
            self.message(f"step {step}/{self.total_steps} · {text} · {self._time_left(step)} left")

    def _time_left(self, step: int) -> str:
        per_step = (time.monotonic() - self._started) / (step - self._first_step + 1)
        return tqdm.format_interval(per_step * (self.total_steps - step))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a last line that a kill cut short. Raises ConfigError."""
    return list(read_rows(path))


def draw_losses(metrics: str | Path, picture: str | Path) -> None:
    """Draw training and validation loss over steps as PNG; nothing is drawn if there are no rows."""
    rows = read_metrics(metrics)
    figure = _figure(7, 4)
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("valid_loss", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    if not axes.lines:
        return
    axes.set(xlabel="step", ylabel="loss per trained token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, Path(picture))


def contact_sheet(
    images: Sequence[Sequence[Any]],
    captions: Sequence[str],
    correct: Sequence[bool],
    path: str | Path,
    columns: int = 6,
) -> None:
    """Draw a picture of samples with their captions: green if `correct`, else red.

    `images` holds the PIL images of each sample, shown side by side. Raises ValueError if the three sequences
    differ in length or are empty.
    """
    if not len(images) == len(captions) == len(correct) > 0:
        raise ValueError(
            f"contact_sheet: {len(images)} samples of images, {len(captions)} captions and {len(correct)} "
            "verdicts; give one of each per sample, and at least one."
        )
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = _figure(2.1 * columns, 2.5 * rows)
    figure.subplots(rows, columns)
    for axes in figure.axes:
        axes.axis("off")
    for axes, pictures, caption, is_correct in zip(figure.axes, images, captions, correct, strict=False):
        axes.imshow(_side_by_side(pictures), interpolation="nearest")
        color = "green" if is_correct else "red"
        axes.set_title("\n".join(_wrapped(caption)), fontsize=7, color=color, parse_math=False)
    _save(figure, Path(path))


def _keep_rows_before(path: Path, start_step: int) -> dict[str, int]:
    """Drop the rows of `start_step` and later; returns the totals until there."""
    rows = []
    if path.exists():
        rows = [row for row in read_metrics(path) if row["step"] < start_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    names = dict.fromkeys([*TOTALS, *(name for row in rows for name in row if _is_total(name))])
    return {total: max((row.get(total, 0) for row in rows), default=0) for total in names}


def _is_total(name: str) -> bool:
    return name in TOTALS or name.startswith(OF_A_SOURCE)


def _tensorboard(run_dir: Path, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step)


def _wandb(config: RunConfig) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "logging.wandb_project is set but wandb is not installed; `pip install 'megatron-vlm[wandb]'`, "
            "or set logging.wandb_project=null."
        ) from error
    import yaml

    return wandb.init(
        project=config.logging.wandb_project,
        name=config.name,
        dir=config.run_dir,
        config=yaml.safe_load(to_yaml(config)),
        id=os.environ.get("WANDB_RUN_ID"),
        resume="allow",
    )


def _figure(width: float, height: float) -> Any:
    """A figure that needs no display and leaves no trace in matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    part = path.with_suffix(".part")
    figure.savefig(part, format="png", dpi=120)
    part.replace(path)


def _side_by_side(pictures: Sequence[Any]) -> Any:
    import numpy as np

    height = max(picture.height for picture in pictures)
    tiles = []
    for picture in pictures:
        pixels = np.asarray(picture.convert("RGB"))
        tiles.append(np.pad(pixels, ((0, height - picture.height), (0, 4), (0, 0)), constant_values=255))
    return np.concatenate(tiles, axis=1)


def _wrapped(caption: str) -> list[str]:
    return [line for part in caption.splitlines() for line in textwrap.wrap(part, 30) or [""]]


def _in_words(figures: Mapping[str, float]) -> list[str]:
    rates = [f"{name} {figures[name]:.2e}" for name in figures if name.startswith("lr_")]
    return [*rates, *(words.format(figures[name]) for name, words in IN_WORDS.items() if name in figures)]


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 10_000 else f"{number:.0f}"
