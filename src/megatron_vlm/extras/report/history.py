"""A run as its folder tells it: settings, starts, figures, drops, checkpoints; and its state."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_vlm.config import ConfigError, RunConfig, TrainConfig
from megatron_vlm.files import last_lines, read_rows, read_text
from megatron_vlm.job.best import Best
from megatron_vlm.messages import printable
from megatron_vlm.overrides import flatten, load_yaml, to_yaml
from megatron_vlm.run_folder import batch_log, lock, starts
from megatron_vlm.run_folder.checkpoint_files import read_state
from megatron_vlm.run_folder.folder import checkpoints, complete_checkpoints

STATES = ("running", "finished", "stopped", "died", "not begun")
LEFT_BY_RUNS = ("metrics.jsonl", "checkpoints", starts.FILE)  # one of them is in every run's folder
EXAMPLES = 3  # drops of a reason that a page shows


@dataclass(frozen=True)
class History:
    """The files of a run, read once. Numbers are finite or left out, whatever a file holds."""

    folder: Path
    settings: dict[str, Any]  # by dotted key, as its config.yaml has them
    starts: list[dict[str, Any]]
    rows: list[dict[str, float]]
    running: bool
    ended_by: str = ""  # the error that ends it now

    @cached_property
    def name(self) -> str:
        return str(self.settings.get("name") or self.folder.name)

    @cached_property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return int(max((row["step"] for row in self.rows), default=0))

    @cached_property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None if only `train.epochs` says it and no start was noted."""
        told = self.starts[-1].get("total_steps") if self.starts else self.settings.get("train.steps")
        return told if isinstance(told, int) else None

    @cached_property
    def state(self) -> str:
        """One of STATES."""
        if self.running:
            return "running"
        if self.total_steps is not None and self.step >= self.total_steps:
            return "finished"
        if self.rows and not self.ended_by and self.step == self._saved and not last_words(self.folder):
            return "finished" if self._best.is_over else "stopped"
        return "died" if self.rows or self.starts else "not begun"

    @cached_property
    def _saved(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max(map(_step, complete_checkpoints(self.folder)), default=None)

    @cached_property
    def last_line(self) -> str:
        """Why a run died, as the rank that failed first wrote it, or why it finished early; else empty."""
        if self.state != "died":
            return self._best.why_over() if self.state == "finished" and self._best.is_over else ""
        return (
            self.ended_by
            or last_words(self.folder)
            or f"no last word: killed or interrupted after step {self.step}"
        )

    @cached_property
    def last(self) -> dict[str, float]:
        """The newest value of each figure."""
        found: dict[str, float] = {}
        for row in self.rows:
            found |= row
        return found

    @cached_property
    def best_by(self) -> str:
        """The figure by which the best step is chosen."""
        return self._train.best_figure[0]

    @cached_property
    def best(self) -> tuple[float, int] | None:
        """The best value of `best_by` and its step; None without one. The lowest loss is the best. Of other
        figures, the newest checkpoint tells the step."""
        rated = [(row[self.best_by], int(row["step"])) for row in self.rows if self.best_by in row]
        if self._train.best_by.partition("/")[0] != "valid_loss":
            rated = [(value, step) for value, step in rated if step == self._best.saved["step"]]
        return min(rated, default=None)

    @cached_property
    def _train(self) -> TrainConfig:
        """The settings that tell which step is the best."""
        patience = self.settings.get("train.patience")
        by = str(self.settings.get("train.best_by", "valid_loss"))
        return TrainConfig(best_by=by, patience=patience if isinstance(patience, int) else 0)

    @cached_property
    def _best(self) -> Best:
        """The best step, as the newest complete checkpoint has it."""
        if self._saved is None:
            return Best(self._train)
        with suppress(ValueError, OSError, KeyError, TypeError):  # a damaged one does not say it
            newest = checkpoints(self.folder) / f"step_{self._saved:08d}"
            return Best(self._train, read_state(newest)["extra"].get("best"))
        return Best(self._train)

    @cached_property
    def changed(self) -> float:
        """When a step was logged last, or the run begun, in seconds since 1970."""
        files = [self.folder / name for name in ("metrics.jsonl", starts.FILE, "config.yaml")]
        return next((file.stat().st_mtime for file in files if file.exists()), 0.0)

    def differing(self) -> list[tuple[str, Any, Any]]:
        """(setting, its value, its default) of each setting that is not at its default."""
        defaults = flatten(load_yaml(to_yaml(RunConfig())))
        keys = [*self.settings, *(key for key in defaults if key not in self.settings)]
        pairs = ((key, self.settings.get(key), defaults.get(key)) for key in keys)
        return [(key, value, default) for key, value, default in pairs if value != default]


def read_history(folder: Path, running: bool | None = None, ended_by: str = "") -> History:
    """The history of a run folder. A run itself tells whether it is `running`, or what it is `ended_by`: it
    must not ask its own lock.

    Raises ConfigError if the folder holds no run, or if a file of it is not what a run wrote.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{printable(folder)} holds no run, as it has no config.yaml; give a run folder.")
    settings = flatten(load_yaml(read_text(file), str(file)))
    metrics = folder / "metrics.jsonl"
    begun = folder / starts.FILE
    return History(
        folder,
        settings,
        [_start(row) for row in read_rows(begun)] if begun.exists() else [],
        [_numbers(row) for row in read_rows(metrics)] if metrics.exists() else [],
        lock.is_held(folder) if running is None else running,
        ended_by,
    )


def find_runs(folder: Path, depth: int = 4) -> Iterator[Path]:
    """The run folders in a folder, itself included, by name; nothing is sought inside of a run."""
    if (folder / "config.yaml").is_file() and any((folder / name).exists() for name in LEFT_BY_RUNS):
        yield folder
    elif depth:
        with os.scandir(folder) as entries:
            inside = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        for name in inside:
            yield from find_runs(folder / name, depth - 1)


def last_words(folder: Path) -> str:
    """The last line that the first rank to fail left in errors/; empty if none did."""
    files = [file for file in (folder / "errors").glob("rank*.txt") if file.stat().st_size]
    first = min(files, key=lambda file: file.stat().st_mtime_ns, default=None)
    lines = last_lines(first) if first else []
    begins = [number for number, line in enumerate(lines) if line.strip() and not line[0].isspace()]
    said = " ".join(line.strip() for line in lines[begins[-1] :]) if begins else ""
    return printable(re.sub(r"^megatron_vlm(\.\w+)+: ", "", said))


@dataclass
class Drops:
    """The samples of one reason that a run dropped, and some of them with `key` and `detail`."""

    count: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)


def read_drops(folder: Path) -> dict[str, Drops]:
    """The drops by reason, the most frequent first, as far as the ends of the files in drops/ tell."""
    found: dict[str, Drops] = {}
    for file in sorted((folder / "drops").glob("rank*.jsonl")):
        for row in _objects(file):
            drops = found.setdefault(str(row.get("reason")), Drops())
            drops.count += 1
            if len(drops.examples) < EXAMPLES:
                drops.examples.append({name: str(row.get(name, "")) for name in ("key", "detail")})
    return dict(sorted(found.items(), key=lambda item: -item[1].count))


def samples_in_rows(folder: Path) -> Counter[int]:
    """How many rows of batches held how many samples, in the steps at the ends of the files in batches/."""
    counted: Counter[int] = Counter()
    for file in sorted((folder / batch_log.FOLDER).glob("rank*.jsonl")):
        for row in _objects(file):
            keys = row.get("keys")
            if isinstance(keys, list):
                counted.update(len(of_row) for of_row in keys if isinstance(of_row, list))
    return counted


def kept_folders(folder: Path) -> tuple[list[str], list[str]]:
    """The names of complete checkpoints and of exports."""
    exports = folder / "exports"
    made = sorted(path.name for path in exports.iterdir() if path.is_dir()) if exports.is_dir() else []
    return complete_checkpoints(folder), [name for name in made if not name.startswith(".")]


def best_kept(folder: Path) -> str | None:
    """The checkpoint that `train.keep_best` keeps; None without it."""
    file = checkpoints(folder) / "best"
    return read_text(file).strip() if file.is_file() else None


def _step(checkpoint_name: str) -> int:
    return int(checkpoint_name.removeprefix("step_"))


def _start(row: dict[str, Any]) -> dict[str, Any]:
    """A row of starts.jsonl with all that a page shows, whatever is missing or of another type."""
    numbers = {"step": 0, "time": 0.0, "processes": 1, "total_steps": None} | _numbers(row)
    versions = row.get("versions")
    command = row.get("command")
    return {
        **{name: str(row.get(name, "")) for name in ("host", "device")},
        **numbers,
        "versions": versions if isinstance(versions, dict) else {},
        "command": [*map(str, command)] if isinstance(command, list) else [],
    }


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        str(name): value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and -1e99 < value < 1e99
    }


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    for line in last_lines(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # cut short, or being written
            continue
        if isinstance(row, dict):
            yield row
