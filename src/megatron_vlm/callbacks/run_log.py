"""Shows a run and writes what it leaves behind: progress bar and metrics.jsonl.

Steps are counted from 1. In a run folder:

    config.yaml     the full configuration
    metrics.jsonl   one row a step, see docs/reference/metrics.md; validation rows hold `valid_loss`
    starts.jsonl    a line for each start: step, total_steps, time, command, processes, host, device, versions
"""

import json
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import atomic_write, open_file, open_to_write
from megatron_vlm.imports import installed_versions
from megatron_vlm.job import watchdog
from megatron_vlm.messages import plural
from megatron_vlm.objectives import objective_of
from megatron_vlm.overrides import to_yaml
from megatron_vlm.run_folder import checkpoints

STARTS = "starts.jsonl"
# metrics of a step in its line and beside the bar, which have room for few; see docs/reference/metrics.md
SHOWN = {"loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "grad {:.2f}"}
RATE = {"tokens_per_second": "{:,.0f} tok/s"}
BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
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
        # the first metric of the objective that is shown, such as its reward, says more than the norm
        of_objective = [item for item in objective_of(run.config).figures.items() if item[1]]
        self._formats = dict([*SHOWN.items()][: 2 if of_objective else 3] + of_objective[:1]) | RATE
        steps = run.milestones.steps
        # a resumed run keeps the scale of its adapters, see `with_own_start`
        adapter = replace(self._config.adapter, lora_alpha=run.config.adapter.lora_alpha)
        atomic_write(self._folder / "config.yaml", to_yaml(replace(self._config, adapter=adapter)))
        note_start(self._folder, self._first_step, steps)
        keep_rows_before(self._folder / "metrics.jsonl", self._first_step)
        self._file = open_to_write(self._folder / "metrics.jsonl", "ab")
        if sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=run.step, bar_format=BAR, dynamic_ncols=True)
        for note in run.notes:
            run.message(note)

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if self._file is None:
            return
        row = dict(metrics)
        for name in filter(_is_total, metrics):
            self._totals[name] = self._totals.get(name, 0) + row.pop(name)
        self._totals["dropped_samples"] = run.feed.dropped_everywhere()
        is_logged = run.step % run.config.logging.log_every == 0 or run.step in (1, run.milestones.last)
        if is_logged:
            run.log({**row, **self._totals})
        words = [text.format(row[name]) for name, text in self._formats.items() if name in row]
        self._show(run, " · ".join(words), is_logged or run.step == self._first_step)

    def on_validation_end(self, run: Run, metrics: dict[str, float]) -> None:
        run.log(metrics)
        words = [f"{name} {value:.4f}" for name, value in metrics.items() if _is_shown(name)]
        if "valid_loss" in metrics and "valid_reward" not in metrics:  # which it is, negated
            words.insert(0, f"validation loss {metrics['valid_loss']:.4f}")
        self._message(run, f"step {run.step} · {' · '.join(words)}")

    def on_log(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        if self._file is None:
            return
        # JSON knows no NaN; null keeps the row readable everywhere
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}).encode() + b"\n")
        self._file.flush()

    def on_train_end(self, run: Run) -> None:
        """Say where the run is, how to go on with it, what it dropped, and why it ended early."""
        if not run.stopped_by and run.step:
            for line in closing_lines(run.config, run.step):
                run.message(line)
        dropped = run.feed.dropped_by_reason()  # which all ranks add up
        if dropped:
            folder = Path(run.config.run_dir, "drops")
            run.message(f"dropped samples: {dropped}; which and why: {folder}")
        if run.milestones.why:
            run.message(run.milestones.why)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()

    def _message(self, run: Run, text: str) -> None:
        """A line with the time of day if there is no bar, which tells how much time goes by."""
        run.message(text if self._bar is not None else f"{time.strftime('%H:%M:%S')} {text}")

    def _show(self, run: Run, text: str, is_logged: bool) -> None:
        steps = run.milestones.steps
        if self._bar is not None:
            self._bar.total = steps
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(run.step - self._bar.n)
            return
        if is_logged:
            per_step = (time.monotonic() - self._started) / (run.step - self._first_step + 1)
            time_left = tqdm.format_interval(per_step * (steps - run.step))
            self._message(run, f"step {run.step}/{steps} · {text} · {time_left} left")


def settings_line(config: RunConfig, steps: int, warmup_steps: int) -> str:
    """The settings that decide most about a run, for its first lines."""
    adam = config.optimizer
    schedule = f"{adam.lr_scheduler_type}, {plural(warmup_steps, 'warmup step')}"
    batch = f"batch {config.train.global_batch_size} in micro batches of {config.train.micro_batch_size}"
    length = f"rows of up to {config.data.seq_length:,} tokens"
    return f"{plural(steps, 'step')} · learning rate {adam.lr:g} ({schedule}) · {batch} · {length}"


def closing_lines(config: RunConfig, step: int) -> Iterator[str]:
    """Where a run that is trained to a step has it, and the commands that use it."""
    folder = config.run_dir
    yield f"saved in {checkpoints(folder)}/step_{step:08d}"
    if config.logging.report:
        yield f"report: {folder}/report.html"
    yield f"export it: megatron-vlm export {shlex.quote(folder)} {shlex.quote(f'{folder}-hf')}"
    yield f'ask it: megatron-vlm generate {shlex.quote(folder)} "<image>What is this?" --image FILE'


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
