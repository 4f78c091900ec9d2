"""Which samples each step was trained on: a line for every micro batch, in `<run_dir>/batches/rankR.jsonl`.

R is the data-parallel rank. A line holds `step`, `micro_batch`, `keys` (of each row's samples) and
`restore_key`, from which the loader makes the same micro batch again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.callbacks.run_log import keep_rows_before, read_rows
from megatron_vlm.files import open_to_write
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.job.errors import is_anothers_end, is_worker_death
from megatron_vlm.messages import listed

FOLDER = "batches"


class Samples(Callback):
    """Writes `<run_dir>/batches` on ranks that read, for `megatron-vlm replay`."""

    log: BatchLog | None = None
    _logged = 0  # the last step in the log

    def on_train_begin(self, run: Run) -> None:
        from megatron_vlm.parallel import setup  # readers of the log need no torch

        if run.feed.reads:
            rank, ranks = setup.data_parallel_place()
            self.log = BatchLog(run.config.run_dir, rank, ranks, run.step + 1)

    def on_step_begin(self, run: Run) -> None:
        if self.log is not None and self._logged < run.step:
            self.log.write(run.step, run.micro_batches)
            self._logged = run.step

    def on_exception(self, run: Run, error: BaseException) -> None:
        self.on_step_begin(run)  # another callback may have failed before this one was called
        note_samples(error, run.config.run_dir, run.step, run.micro_batches)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


class BatchLog:
    """The log that each reading rank writes, from `first_step` on.

    Lines of that and later steps from an interrupted run are dropped, also for ranks that no longer exist.
    """

    def __init__(self, run_dir: str | Path, rank: int, world_size: int, first_step: int):
        self.folder = Path(run_dir) / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in _files(self.folder):
            if _rank(path) % world_size == rank:
                keep_rows_before(path, first_step)
        self._file = open_to_write(self.folder / f"rank{rank}.jsonl", "ab")

    def write(self, step: int, micro_batches: list[dict[str, Any]]) -> None:
        """Log a step before it is trained, so that the file names its samples however it ends."""
        for number, batch in enumerate(micro_batches):
            row = {"step": step, "micro_batch": number, "keys": batch["__key__"]}
            row |= {"restore_key": batch["__restore_key__"]}
            self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@attribute_errors_to("run_dir")
def read_step(run_dir: str | Path, step: int) -> list[dict[str, Any]]:
    """The lines of one step, with their `rank`, in the order of ranks and micro batches.

    Raises ValueError that names the logged steps if this one is not among them.
    """
    rows = [{"rank": _rank(path), **row} for path in _files(Path(run_dir, FOLDER)) for row in read_rows(path)]
    of_step = [row for row in rows if row["step"] == step]
    for row in of_step:
        row["keys"] = [[*map(str, keys)] for keys in row["keys"]]
    if not of_step:
        steps = [row["step"] for row in rows]
        range_text = f"it holds steps {min(steps)} to {max(steps)}" if steps else "it holds no step"
        raise ValueError(f"{run_dir}: no batch of step {step} in {FOLDER}/; {range_text}.")
    return of_step


def note_samples(
    error: BaseException, run_dir: str | Path, step: int, micro_batches: list[dict[str, Any]]
) -> None:
    """Add to the error of a step its samples on this rank, and how to look at them.

    It adds nothing if no sample can be the cause, as of a full disk, another rank's end or a killed worker.
    `micro_batches` of the error are the indices of those whose samples are named.
    """
    if isinstance(error, OSError) or is_anothers_end(error) or is_worker_death(error):
        return
    numbers = getattr(error, "micro_batches", range(len(micro_batches)))
    keys = keys_of([micro_batches[number] for number in numbers])
    keys_text = f", on this rank with {named(keys)}" if keys else ""
    error.add_note(f"step {step}{keys_text}; {replay_command(run_dir, step)}")


def keys_of(micro_batches: list[dict[str, Any]]) -> list[str]:
    """The keys of all samples in these micro batches."""
    return [key for batch in micro_batches for row in batch["__key__"] for key in row]


def named(keys: Iterable[str]) -> str:
    """The keys of samples as messages have them."""
    return f"samples {listed([*keys])}"


def replay_command(run_dir: str | Path, step: int) -> str:
    """The command that shows a step's samples."""
    return f"look at all of them: megatron-vlm replay {run_dir} --step {step} --output page.html"


def _files(folder: Path) -> list[Path]:
    """The ranks' files in order; copies that a user made are left alone."""
    return sorted((path for path in folder.glob("rank*.jsonl") if path.stem[4:].isdecimal()), key=_rank)


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))
