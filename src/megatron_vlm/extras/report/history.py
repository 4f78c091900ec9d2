"""A run as its folder tells it: settings, starts, metrics, drops, checkpoints; and its state."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_vlm.callbacks.run_log import STARTS, last_lines, read_rows
from megatron_vlm.callbacks.validation import Best
from megatron_vlm.config import ConfigError, TrainConfig
from megatron_vlm.files import read_text
from megatron_vlm.messages import printable
from megatron_vlm.overrides import flatten, load_yaml
from megatron_vlm.run_folder import checkpoints, complete_checkpoints, is_locked, read_state


@dataclass(frozen=True)
class History:
    """The files of a run, read once. A metric that was not finite is left out of its row."""

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
        return self.starts[-1]["total_steps"] if self.starts else self.settings.get("train.steps")

    @cached_property
    def state(self) -> str:
        """running, finished, stopped (with a checkpoint of its last step), died, or not begun."""
        if self.running:
            return "running"
        if self.total_steps is not None and self.step >= self.total_steps:
            return "finished"
        is_saved = f"step_{self.step:08d}" in complete_checkpoints(self.folder)
        if self.rows and is_saved and not self.ended_by and not last_words(self.folder):
            return "finished" if self._best.is_over else "stopped"
        return "died" if self.rows or self.starts else "not begun"

    @cached_property
    def last_line(self) -> str:
        """Why a run died, as the rank that failed first wrote it, or why it finished early; else empty."""
        if self.state == "died":
            killed = f"no last word: killed or interrupted after step {self.step}"
            return self.ended_by or last_words(self.folder) or killed
        return self._best.why_over() if self.state == "finished" and self._best.is_over else ""

    @cached_property
    def last(self) -> dict[str, float]:
        """The newest value of each metric."""
        return {name: value for row in self.rows for name, value in row.items()}

    @cached_property
    def _best(self) -> Best:
        """The best step and `train.patience`, as the newest complete checkpoint has them."""
        names = complete_checkpoints(self.folder)
        best_by = self.settings.get("train.best_by", "valid_loss")
        best = Best(TrainConfig(best_by=best_by, patience=self.settings.get("train.patience", 0)))
        if names:
            states = read_state(checkpoints(self.folder) / names[-1])["extra"].get("callbacks", {})
            if "Best" in states:
                best.load_state_dict(states["Best"])
        return best


def read_history(folder: Path, running: bool | None = None, ended_by: str = "") -> History:
    """The history of a run folder. A run itself tells whether it is `running`, or what it is `ended_by`: it
    must not ask its own lock.

    Raises ConfigError if the folder holds no run, or if a file of it is not what a run wrote.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{folder} holds no run, as it has no config.yaml; give a run folder.")
    settings = flatten(load_yaml(read_text(file), str(file)))
    metrics = _rows(folder / "metrics.jsonl")
    rows = [{name: value for name, value in row.items() if value is not None} for row in metrics]
    running = is_locked(folder) if running is None else running
    return History(folder, settings, _rows(folder / STARTS), rows, running, ended_by)


def _rows(file: Path) -> list[dict[str, Any]]:
    return list(read_rows(file)) if file.exists() else []


def last_words(folder: Path) -> str:
    """The last line that the first rank to fail left in errors/; empty if none did."""
    files = [file for file in (folder / "errors").glob("rank*.txt") if file.stat().st_size]
    first = min(files, key=lambda file: file.stat().st_mtime_ns, default=None)
    lines = last_lines(first) if first else []
    begins = [number for number, line in enumerate(lines) if line.strip() and not line[0].isspace()]
    message = " ".join(line.strip() for line in lines[begins[-1] :]) if begins else ""
    return printable(re.sub(r"^megatron_vlm(\.\w+)+: ", "", message))


def read_drops(folder: Path) -> dict[str, list[dict[str, str]]]:
    """The dropped samples by reason, the most frequent first, as far as the ends of the files tell."""
    drops: dict[str, list[dict[str, str]]] = {}
    for file in sorted((folder / "drops").glob("rank*.jsonl")):
        for line in last_lines(file):
            try:
                drop = json.loads(line)
            except ValueError:  # cut short, or being written
                continue
            drops.setdefault(drop["reason"], []).append(drop)
    return dict(sorted(drops.items(), key=lambda item: -len(item[1])))
