"""Shows a run and writes what it leaves behind: progress bar, metrics.jsonl and loss.png.

Steps are counted from 1. In a run folder:

    config.yaml     the full configuration
    metrics.jsonl   one row a step, see docs/reference/metrics.md; validation rows hold `valid_loss`
    starts.jsonl    a line for each start: step, total_steps, time, command, processes, host, device, versions
    loss.png        training and validation loss over steps
"""

import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import atomic_write, open_file, open_to_write
from megatron_vlm.imports import installed_versions
from megatron_vlm.job import watchdog
from megatron_vlm.objectives import objective_of
from megatron_vlm.overrides import to_yaml

STARTS = "starts.jsonl"
PLAIN_LINES = 20  # lines that a whole run prints if there is no terminal for a bar
IN_WORDS = {  # figures of a step, as the bar shows them; docs/reference/metrics.md explains them
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


class RunLog(Callback):
    """Writes the run's log on the first rank.

    Rows of an interrupted run from the first step on are dropped, so every step appears once.
    """

    def __init__(self, config: RunConfig):
        self._config = config  # as the user gave it
        self._totals = dict.fromkeys(TOTALS, 0)
        self._file: BinaryIO | None = None  # on the first rank
        self._bar: tqdm | None = None

    def state_dict(self) -> dict[str, Any]:
        return self._totals

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._totals |= state

    def on_train_begin(self, run: Run) -> None:
        if not run.is_first_rank:
            return
        watchdog.beat("opening the log and its trackers")
        self._folder = Path(run.config.run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._first_step = run.step + 1
        self._started = time.monotonic()
        self._formats = {**objective_of(run.config).figures, **IN_WORDS}
        steps = run.milestones.steps
        atomic_write(self._folder / "config.yaml", to_yaml(self._config))
        note_start(self._folder, self._first_step, steps)
        keep_rows_before(self._folder / "metrics.jsonl", self._first_step)
        self._file = open_to_write(self._folder / "metrics.jsonl", "ab")
        if sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=run.step, desc=run.config.name, unit="step")
        for note in run.notes:
            run.message(note)

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if self._file is None:
            return
        row = dict(metrics)
        tokens = row["trained_tokens"]
        for name in filter(_is_total, metrics):
            self._totals[name] = self._totals.get(name, 0) + row.pop(name)
        self._totals["dropped_samples"] = run.feed.dropped_everywhere()
        rate = tokens / max(metrics["seconds"], 1e-9)
        if run.step % run.config.logging.log_every == 0 or run.step in (1, run.milestones.last):
            run.log({**row, "tokens_per_second": rate, **self._totals})
        words = [f"loss {row['loss']:.4f} · lr {row['lr']:.2e} · grad {row['grad_norm']:.2f}"]
        words += [f"{_short(rate)} trained tokens/s", *_in_words(row, self._formats)]
        self._show(run, " · ".join(words))

    def on_validation_end(self, run: Run, metrics: dict[str, float]) -> None:
        run.log(metrics)
        words = [f"{name} {value:.4f}" for name, value in metrics.items() if _is_shown(name)]
        if "valid_loss" in metrics:
            words.insert(0, f"validation loss {metrics['valid_loss']:.4f}")
        run.message(f"step {run.step}: {' · '.join(words)}")

    def on_log(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        if self._file is None:
            return
        # JSON knows no NaN; null keeps the row readable everywhere
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}).encode() + b"\n")
        self._file.flush()

    def on_save(self, run: Run, checkpoint: Path) -> None:
        self._draw()

    def on_train_end(self, run: Run) -> None:
        """Say what the run dropped, and why it ended early."""
        dropped = run.feed.dropped_by_reason()  # which all ranks add up
        if dropped:
            folder = Path(run.config.run_dir, "drops")
            run.message(f"dropped samples: {dropped}; which and why: {folder}")
        if run.milestones.why:
            run.message(run.milestones.why)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._draw()
        if self._file is not None:
            self._file.close()

    def _draw(self) -> None:
        if self._file is not None:
            draw_losses(self._folder / "metrics.jsonl", self._folder / "loss.png")

    def _show(self, run: Run, text: str) -> None:
        steps = run.milestones.steps
        if self._bar is not None:
            self._bar.total = steps
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(run.step - self._bar.n)
            return
        if run.step % max(1, steps // PLAIN_LINES) == 0 or run.step in (self._first_step, steps):
            per_step = (time.monotonic() - self._started) / (run.step - self._first_step + 1)
            time_left = tqdm.format_interval(per_step * (steps - run.step))
            run.message(f"step {run.step}/{steps} · {text} · {time_left} left")


def note_start(run_dir: str | Path, first_step: int, total_steps: int) -> None:
    """Add a line about this start to starts.jsonl: time, command, host and versions."""
    row = {"step": first_step, "total_steps": total_steps, "time": time.time(), "command": sys.argv}
    row |= {"processes": watchdog.world_size(), "host": socket.gethostname(), "device": _device()}
    row["versions"] = {"python": sys.version.split()[0], **installed_versions()}
    with open_to_write(Path(run_dir) / STARTS, "ab") as file:
        file.write(json.dumps(row).encode() + b"\n")


def _device() -> str:
    torch = sys.modules.get("torch")  # a run has imported it
    return torch.cuda.get_device_name() if torch and torch.cuda.is_available() else "CPU"


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
    atomic_write(picture, drawn.getvalue())


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The JSON objects, each with a `step`, of a file to which a run adds lines. A last line that was cut
    short is left out. Raises ConfigError that names any other bad line."""
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not (isinstance(row, dict) and type(row.get("step")) is int):  # True is no step
                raise ConfigError(
                    f"{path}: line {number} is not what a run wrote; take the line out, or move "
                    "the file away to go on without it."
                )
            yield row


def last_lines(path: str | Path, most_bytes: int = 1 << 22) -> list[str]:
    """The lines at the end of a text, as far as they are in its last `most_bytes`; the first may be cut."""
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes).decode(errors="replace").splitlines()


def keep_rows_before(path: Path, step: int) -> None:
    """Takes the rows of `step` and of later steps out of a file of `read_rows`, if it is there."""
    if path.exists():
        rows = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] < step]
        atomic_write(path, "".join(rows))


def _is_total(name: str) -> bool:
    return name in TOTALS or name.startswith(OF_A_SOURCE)


def _is_shown(name: str) -> bool:
    """Whether a metric of a validation is printed: losses of sources, rewards, and scores."""
    return name.startswith(("valid_loss/", "valid_reward", "score/"))


def _in_words(figures: Mapping[str, float], formats: Mapping[str, str | None]) -> list[str]:
    rates = [f"{name} {figures[name]:.2e}" for name in figures if name.startswith("lr_")]
    texts = [words.format(figures[name]) for name, words in formats.items() if words and name in figures]
    return rates + texts


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 10_000 else f"{number:.0f}"
