"""Shows a run and writes what it leaves behind: progress bar, metrics.jsonl, loss.png, and what trackers do.

Steps are counted from 1. In a run folder:

    config.yaml     the full configuration
    metrics.jsonl   one row a step, its numbers as in docs/metrics.md; validation rows hold `valid_loss`
    starts.jsonl    when and with what the run was started, see `starts`
    loss.png        training and validation loss over steps
"""

import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from megatron_vlm.config import RunConfig
from megatron_vlm.files import keep_rows_before, open_to_write, read_rows, write_whole
from megatron_vlm.messages import mask_addresses
from megatron_vlm.objectives import objective_of
from megatron_vlm.overrides import to_yaml
from megatron_vlm.run_folder.callbacks import Callback
from megatron_vlm.run_folder.folder import checkpoints
from megatron_vlm.run_folder.starts import note_start
from megatron_vlm.run_folder.trackers import Tracker, Trackers, trackers_of

PLAIN_LINES = 20  # lines that a whole run prints if there is no terminal for a bar
IN_WORDS = {  # figures of a step, as the bar shows them; docs/metrics.md explains them
    "epoch": "epoch {:.2f}",
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
    `totals` are the trained tokens before it, in all and of each source, as the checkpoint has them.
    `trackers` come after the configured ones; `callbacks` hear of a run on every rank.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: RunConfig,
        total_steps: int,
        start_step: int = 1,
        is_writer: bool = True,
        totals: dict[str, int] | None = None,
        trackers: Iterable[Callable[[RunConfig, int], Tracker]] = (),
        callbacks: Iterable[Callback] = (),
    ):
        self.run_dir = Path(run_dir)
        self.is_writer = is_writer
        self.callbacks = list(callbacks)
        self.total_steps = total_steps
        self._step = start_step - 1
        self._closed = False
        self.totals = dict.fromkeys(TOTALS, 0)
        if not is_writer:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(self.run_dir / "config.yaml", to_yaml(config))
        note_start(self.run_dir, start_step, total_steps)
        self.log_every = config.logging.log_every
        self._formats = {**objective_of(config).figures, **IN_WORDS}
        keep_rows_before(self.run_dir / "metrics.jsonl", start_step)
        self.totals |= {total: number for total, number in (totals or {}).items() if _is_total(total)}
        self._file = open_to_write(self.run_dir / "metrics.jsonl", append=True)
        here = replace(config, run_dir=str(run_dir))
        made = [make(here, start_step) for make in (*trackers_of(config), *trackers)]
        self._trackers = Trackers(made, self.message)
        self._first_step = start_step
        self._started = time.monotonic()
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=start_step - 1, desc=config.name, unit="step")

    def log_step(
        self,
        step: int,
        loss: float,
        lr: float,
        grad_norm: float,
        trained_tokens: int,
        seconds: float,
        dropped: int = 0,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """One optimizer step: `trained_tokens` and `seconds` are this step's, `dropped` samples are those
        since the run began, and `figures` what `training.figures` says of it."""
        self._step = step
        shown = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "seconds": seconds, **(figures or {})}
        for callback in self.callbacks:
            callback.on_step(step, shown)
        if not self.is_writer:
            return
        self.totals["trained_tokens"] += trained_tokens
        self.totals["dropped_samples"] = dropped
        figures = dict(figures or {})
        for name in filter(_is_total, list(figures)):
            self.totals[name] = self.totals.get(name, 0) + figures.pop(name)
        rate = trained_tokens / max(seconds, 1e-9)
        if step % self.log_every == 0 or step in (1, self.total_steps):
            numbers = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_second": rate}
            self._write(step, {**numbers, "seconds": seconds, **self.totals, **figures})
        words = [f"loss {loss:.4f} · lr {lr:.2e} · grad {grad_norm:.2f} · {_short(rate)} trained tokens/s"]
        self._show(step, " · ".join([*words, *_in_words(figures, self._formats)]))

    def log_eval(
        self, step: int, loss: float | None, by_source: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Log the validation loss after `step`, the last logged step, and the figures of each source; None
        if there is no validation data. Returns all of them, on every rank."""
        if loss is None:
            return {}
        figures = {f"valid_{name}": number for name, number in (by_source or {}).items()}
        for callback in self.callbacks:
            callback.on_validation(step, loss, figures)
        logged = {"valid_loss": loss, **figures}
        if self.is_writer:
            self._write(step, logged)
        shown = [f"{name} {number:.4f}" for name, number in figures.items() if name.startswith("valid_loss/")]
        self.message(" · ".join([f"step {step}: validation loss {loss:.4f}", *shown]))
        return logged

    def log_scores(self, step: int, scores: dict[str, float]) -> dict[str, float]:
        """Log scores of `step`, the last logged one or an earlier one. Returns them, on every rank."""
        if self.is_writer and scores:
            self._write(step, scores)
            self.message(
                f"step {step}: " + " · ".join(f"{name} {score:.4f}" for name, score in scores.items())
            )
        return scores

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        if self.is_writer:
            tqdm.write(mask_addresses(text), file=sys.stdout)
            sys.stdout.flush()

    def saved(self, step: int) -> None:
        """Tell the callbacks that the checkpoint of a step is complete."""
        for callback in self.callbacks:
            callback.on_save(step, checkpoints(self.run_dir) / f"step_{step:08d}")

    def save(self) -> None:
        """Bring files on disk and loss.png up to date; called when a step is saved, and at the end."""
        if self.is_writer:
            draw_losses(self.run_dir / "metrics.jsonl", self.run_dir / "loss.png")
            self._trackers.save()

    def close(self) -> None:
        """Finish everything; safe to call more than once. Callbacks hear only of an end without an error."""
        if self._closed:
            return
        self._closed = True
        at_its_end = self._step >= self.total_steps and sys.exception() is None
        for callback in self.callbacks if at_its_end else ():
            callback.on_end(self._step)
        if not self.is_writer:
            return
        if self._bar is not None:
            self._bar.close()
        self.save()
        self._file.close()
        self._trackers.close()

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        # JSON knows no NaN; null keeps the row readable everywhere
        row = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **row}).encode() + b"\n")
        self._file.flush()
        self._trackers.log(step, numbers)

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


def draw_losses(metrics: str | Path, picture: str | Path) -> None:
    """Draw training and validation loss over steps as PNG; nothing is drawn if there are no rows."""
    from matplotlib.figure import Figure  # it needs no display, and nothing global

    rows = list(read_rows(metrics))
    figure = Figure(figsize=(7, 4))
    axes = figure.add_axes((0.1, 0.13, 0.87, 0.83))  # finding these numbers takes longer than all else
    for key, label, style in (("loss", "training", "-"), ("valid_loss", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), float)]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    if not axes.lines:
        return
    axes.set(xlabel="step", ylabel="loss per trained token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    write_whole(picture, drawn.getvalue())


def _is_total(name: str) -> bool:
    return name in TOTALS or name.startswith(OF_A_SOURCE)


def _in_words(figures: Mapping[str, float], formats: Mapping[str, str | None]) -> list[str]:
    rates = [f"{name} {figures[name]:.2e}" for name in figures if name.startswith("lr_")]
    shown = [words.format(figures[name]) for name, words in formats.items() if words and name in figures]
    return rates + shown


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 10_000 else f"{number:.0f}"
