"""Copies of a run folder in a store, `train.upload_to`, with the same names.

<upload_to>/checkpoints/step_00000100/  complete if it has a state.json, which is written last
<upload_to>/exports/step_00000100/      complete if it has a config.json, which is written last
"""

import queue
import re
import threading
import time
from pathlib import Path
from typing import Any

from megatron_vlm import run_folder, stores
from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import add_path_to_errors, atomic_write, read_file, sync
from megatron_vlm.job import watchdog
from megatron_vlm.messages import join_lines
from megatron_vlm.parallel import setup
from megatron_vlm.run_folder import STATE, checksum_problems, read_state, size_problems

STARTS = "starts.jsonl"
RUN_FILES = ("config.yaml", "metrics.jsonl", "completions.jsonl", STARTS, "checkpoints/adapter_start/*")
CONFIGS = ("config.json", "adapter_config.json")  # the file of an export that is written last
FILE_NAME = re.compile(r"[\w.-]*\w")


def restore(config: RunConfig) -> str:
    """Fetch the newest checkpoint of the store that is whole into a run folder that has none.

    The run holds the lock of its folder.

    Returns:
        Lines for the log; empty if nothing was fetched.

    Raises:
        ConfigError: The store holds another run, is ahead of the folder, or has only damaged checkpoints.
        StoreError: The store fails.
    """
    url, run_dir = str(stores.folder(config.train.upload_to)), Path(config.run_dir).absolute()
    watchdog.beat(f"looking for checkpoints in {url}")
    with add_path_to_errors(run_dir), stores.at(url) as (client, root):
        complete = complete_steps(client, root)
        local = run_folder.complete_checkpoints(run_dir)
        if complete:
            _check_same_run(client, root, config, local, complete[-1])
        if local or not complete:
            return ""
        for pattern in RUN_FILES:
            for file in client.glob(f"{root}/{pattern}"):
                target = run_dir / file.removeprefix(f"{root}/")
                if FILE_NAME.fullmatch(target.name):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(target, client.read(file))
        lines = []
        for name in reversed(complete):
            problem = _fetch_checkpoint(client, f"{root}/checkpoints/{name}", run_dir)
            if problem is None:
                return join_lines([*lines, f"train.upload_to: fetched {name} of {url}"])
            # It counts no longer, or the next start would take the run folder for one that is behind.
            client.delete(f"{root}/checkpoints/{name}/{STATE}")
            lines.append(f"train.upload_to: {name} of {url} is damaged, and is left out: {problem}")
    raise ConfigError(join_lines([*lines, "no checkpoint of the store is whole; give another upload_to."]))


def complete_steps(client: Any, root: str) -> list[str]:
    """Return the names of a store's complete checkpoints, oldest first."""
    names = (file.split("/")[-2] for file in client.glob(f"{root}/checkpoints/step_*/{STATE}"))
    return sorted(name for name in names if re.fullmatch(r"step_\d{8}", name, re.ASCII))


def _check_same_run(client: Any, root: str, config: RunConfig, local: list[str], newest: str) -> None:
    """Raise ConfigError if copies of this run would replace another run's, or later checkpoints."""
    url, run_dir = config.train.upload_to, Path(config.run_dir)
    if client.is_file(f"{root}/config.yaml"):
        content = client.read(f"{root}/config.yaml")
        run_folder.check_model("train.upload_to", url, content, config.model.hf_path)
    fact = ""
    if local and local[-1] < newest:
        fact = f"{url} has {newest}, and {run_dir} only {local[-1]}"
    if local and _holds_another_run(client, root, run_dir):
        fact = f"{url} holds another run than {run_dir}"
    if fact:
        remedy = "give a new run_dir to go on from the store, or another upload_to"
        raise ConfigError(f"train.upload_to: {fact}; {remedy}.")


def _holds_another_run(client: Any, root: str, run_dir: Path) -> bool:
    """Whether the store has another first start than this folder: it tells a run from all others."""
    local, copy = run_dir / STARTS, f"{root}/{STARTS}"
    if not (local.is_file() and client.is_file(copy)):
        return False
    return read_file(local).split(b"\n")[0] != client.read(copy).split(b"\n")[0]


def _fetch_checkpoint(client: Any, path: str, run_dir: Path) -> str | None:
    """Make a copy the newest checkpoint of the run folder; return what is wrong with a damaged one."""
    entries = list(client.list(path=path))
    step = int(path[-8:])
    partial = run_folder.begin(run_dir, step, sum(entry.content_length for entry in entries))
    for entry in entries:
        name = entry.key.removeprefix(f"{path}/")
        if FILE_NAME.fullmatch(name):
            watchdog.beat(f"fetching {path}")
            client.download_file(entry.key, str(partial / name))
            sync(partial / name)
    try:
        files = read_state(partial)["files"]
        problems = size_problems(partial, files) or checksum_problems(partial, files)
    except ValueError as error:
        problems = [str(error)]
    if problems:
        run_folder.remove(partial)
        return problems[0]
    run_folder.make_latest(partial)
    return None


class Uploads(Callback):
    """Copy what is complete after each save, on a thread of the rank that logs.

    A failure is logged and does not end the run; the next save tries again.
    """

    _note = ""  # what was fetched

    def before_resume(self, config: RunConfig) -> None:
        """Fetch the newest checkpoint of the store, if the run folder has none."""
        self._note = setup.on_first_rank(restore, config)

    def on_train_begin(self, run: Run) -> None:
        if self._note:
            run.message(self._note)
        self._run_dir = Path(run.config.run_dir)
        self._url = str(stores.folder(run.config.train.upload_to))
        self._keep = max(run.config.train.keep_checkpoints, 1)
        self._log = run.message
        self._began = time.time()
        self._copied_at: dict[Path, float] = {}
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy_saves, name="uploads", daemon=True)
        if run.is_first_rank:
            self._thread.start()
        if run.step:
            self._steps.put(run.step)

    def on_save(self, run: Run, checkpoint: Path) -> None:
        """Copy what is complete up to this checkpoint."""
        self._steps.put(int(checkpoint.name.removeprefix("step_")))

    def on_train_end(self, run: Run) -> None:
        """Wait until all is in the store, or the last try has failed."""
        self._steps.put(None)
        while self._thread.is_alive():
            watchdog.beat(f"copying to {self._url}")
            self._thread.join(1)

    def _copy_saves(self) -> None:
        saved_step = -1
        last_message = ""
        is_last = False
        while not is_last:
            step = self._steps.get()
            is_last = step is None
            saved_step = saved_step if is_last else step
            try:
                with stores.at(self._url) as (client, root):
                    self._copy_up_to(saved_step, client, root)
            except (OSError, ValueError) as error:
                if str(error) != last_message:
                    self._log(f"train.upload_to: {error}")
                last_message = str(error)

    def _copy_up_to(self, step: int, client: Any, root: str) -> None:
        if complete_steps(client, root) and _holds_another_run(client, root, self._run_dir):
            raise ValueError(f"{self._url} holds another run; give each run its own address.")
        # A run that goes on from a checkpoint needs the files of the run and the earlier exports.
        for file in (file for pattern in RUN_FILES for file in self._run_dir.glob(pattern)):
            client.write(f"{root}/{file.relative_to(self._run_dir)}", read_file(file))
        exports = sorted(file for name in CONFIGS for file in self._run_dir.glob(f"exports/step_*/{name}"))
        names = run_folder.complete_checkpoints(self._run_dir)
        states = [run_folder.checkpoints(self._run_dir) / name / STATE for name in reversed(names)]
        for last_file in (*exports, *states):
            if int(last_file.parent.name.removeprefix("step_")) <= step:
                self._copy_folder(last_file, client, root)
        # Remove what the run has removed, but keep as many as it keeps: a restored folder has only one.
        complete = complete_steps(client, root)
        for entry in list(client.list(path=f"{root}/checkpoints", include_directories=True)):
            name = entry.key.rpartition("/")[2]
            if name.startswith("step_") and name not in (*names, *complete[-self._keep :]):
                _remove(client, entry.key, STATE)
        if complete:
            client.write(f"{root}/checkpoints/latest", f"{complete[-1]}\n".encode())

    def _copy_folder(self, last_file: Path, client: Any, root: str) -> None:
        """Copy a folder whose `last_file` is written last, unless the store has the same one."""
        folder = f"{root}/{last_file.parent.relative_to(self._run_dir)}"
        last = f"{folder}/{last_file.name}"
        # Two exports of a step may differ only in their weights: one that is new is copied.
        is_old = last_file.stat().st_mtime < self._copied_at.get(last_file, self._began)
        if is_old and client.is_file(last) and client.read(last) == read_file(last_file):
            return
        self._copied_at[last_file] = time.time()
        _remove(client, folder, last_file.name)
        for file in sorted(last_file.parent.iterdir(), key=lambda file: file == last_file):
            client.upload_file(f"{folder}/{file.name}", str(file))


def _remove(client: Any, folder: str, last_file: str) -> None:
    """Remove a folder of a store, first the file that makes it complete."""
    paths = [entry.key for entry in client.list(path=f"{folder}/")]
    for path in sorted(paths, key=lambda path: path != f"{folder}/{last_file}"):
        client.delete(path)
