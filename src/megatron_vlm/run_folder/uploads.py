"""Copies of a run's checkpoints and exports in a store, `train.upload_to`, with the names of the run folder.

<upload_to>/checkpoints/step_00000100/  complete if it has a state.json, which is written last
<upload_to>/exports/step_00000100/      complete if it has a config.json, which is written last
<upload_to>/exports/step_00000100.json  size and checksum of each file of that export
<upload_to>/copied_by.txt               the token of the start that copies there
"""

import json
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm import stores
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import MOST_BYTES, MOST_TEXT, naming, read_file, sync, write_whole
from megatron_vlm.job import watchdog
from megatron_vlm.messages import printable
from megatron_vlm.run_folder import folder as run_folder
from megatron_vlm.run_folder import starts
from megatron_vlm.run_folder.callbacks import Callback
from megatron_vlm.run_folder.checkpoint_files import (
    STATE,
    checksum_problems,
    checksums,
    read_state,
    size_problems,
)

RUN_FILES = ("config.yaml", "metrics.jsonl", "starts.jsonl", "checkpoints/adapter_start/*")
RESTORED = re.compile(r"config\.yaml|(metrics|starts)\.jsonl|checkpoints/adapter_start/[\w.-]*\w")
OWNER = "copied_by.txt"
CONFIGS = ("config.json", "adapter_config.json")  # the file of an export that is written last


class OwnerChanged(Exception):
    """Another start copies to the address now."""


# ---- before a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restored:
    """The token that makes a store this start's, and a line for the log if a copy was damaged."""

    token: bytes = b""
    note: str = ""


def restore(config: RunConfig) -> Restored:
    """Fetch the newest undamaged checkpoint of the store into a run folder that has no checkpoint.

    The run holds the lock of its folder. A store without a complete checkpoint may be taken by any run.

    Raises:
        ConfigError: The store holds another run, is ahead of the folder, or has only damaged checkpoints.
        StoreError: The store fails, also if nothing can be written there.
    """
    if config.train.upload_to is None:
        return Restored()
    url, run_dir = stores.folder(config.train.upload_to), Path(config.run_dir).absolute()
    watchdog.beat(f"fetching the last checkpoint of {printable(url)}", files=True)
    _check_same_run(config, url, run_dir)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    token = f"{run_dir} on {socket.gethostname()} since {since}, start {secrets.token_hex(4)}".encode()
    stores.write(f"{url}/{OWNER}", token)
    # List again: the owner before may have completed one until now.
    problems: dict[str, str] = {}
    for name in reversed(() if run_folder.complete_checkpoints(run_dir) else _complete_in(url)):
        partial = _fetch(url, name, run_dir)
        if problem := _problem_of(partial):
            problems[name] = problem.replace(str(partial), f"{printable(url)}/checkpoints/{name}")
            run_folder.remove(partial)
            continue
        # Damaged ones stop to count in the store before the folder, which is behind them, has a checkpoint.
        for damaged in problems:
            stores.remove(f"{url}/checkpoints/{damaged}", [STATE])
        run_folder.make_latest(partial)
        notes = [f"train.upload_to: {problem}; going on from {name}" for problem in problems.values()]
        return Restored(token, "\n".join(notes))
    if problems:
        fact = f"no checkpoint of {printable(url)} can be used: {next(iter(problems.values()))}"
        raise ConfigError(
            f"train.upload_to: {fact}. Restore it, or give another upload_to to begin from step 1."
        )
    return Restored(token)


def _complete_in(url: str) -> list[str]:
    """The complete checkpoints of a store, oldest first."""
    pattern = re.compile(rf"(step_\d{{8}})/{re.escape(STATE)}", re.ASCII)
    return sorted(match[1] for match in map(pattern.fullmatch, stores.names(f"{url}/checkpoints")) if match)


def _check_same_run(config: RunConfig, url: str, run_dir: Path) -> None:
    if not (complete := _complete_in(url)):
        return
    remedy = "give a new run_dir to go on from the store, or another upload_to"
    if stores.is_file(f"{url}/config.yaml"):
        text = stores.read(f"{url}/config.yaml", MOST_TEXT)
        run_folder.check_model("train.upload_to", url, text, config.model.hf_path)
    if not (local := run_folder.complete_checkpoints(run_dir)):
        return
    if (run_dir / starts.FILE).is_file() and stores.is_file(f"{url}/{starts.FILE}"):
        copied_starts = stores.read(f"{url}/{starts.FILE}", MOST_BYTES)
        # A run's first start tells it from all others.
        if copied_starts.split(b"\n")[0] != read_file(run_dir / starts.FILE).split(b"\n")[0]:
            fact = f"{printable(url)} holds another run than {printable(run_dir)}"
            raise ConfigError(f"train.upload_to: {fact}; {remedy}.")
    if local[-1] < complete[-1]:
        fact = f"{printable(url)} has {complete[-1]}, and {printable(run_dir)} only {local[-1]}"
        raise ConfigError(f"train.upload_to: {fact}; {remedy}.")


def _fetch(url: str, name: str, run_dir: Path) -> Path:
    """Download a checkpoint into a temporary folder, and the files beside it to their places."""
    sizes = stores.names(url)
    prefix = f"checkpoints/{name}/"
    files = [file.removeprefix(prefix) for file in sizes if file.startswith(prefix)]
    needed = sum(sizes[prefix + file] for file in files)
    partial = run_folder.begin(run_dir, int(name.removeprefix("step_")), needed)
    for file in files:
        if not re.fullmatch(r"[\w.-]*\w", file):
            continue
        watchdog.beat(f"fetching {name} of {printable(url)}", files=True)
        with naming(partial / file), stores.at(f"{url}/{prefix}{file}") as (client, path):
            client.download_file(path, str(partial / file))
            sync(partial / file)
    for file in filter(RESTORED.fullmatch, sizes):
        (run_dir / file).parent.mkdir(parents=True, exist_ok=True)
        write_whole(run_dir / file, stores.read(f"{url}/{file}", MOST_BYTES))
    return partial


def _problem_of(checkpoint: Path) -> str | None:
    """The first difference of a checkpoint from its state.json."""
    try:
        files = read_state(checkpoint)["files"]
    except (ValueError, OSError) as error:
        return str(error)
    problems = size_problems(checkpoint, files) or checksum_problems(checkpoint, files)
    return problems[0] if problems else None


# ---- during a run -----------------------------------------------------------------------------------------


class Uploads(Callback):
    """Copy complete checkpoints, and the exports up to each, on a thread of the rank that logs.

    A failure is logged and does not end the run; the next save tries again. Each start writes its token into
    the store. A start that finds another token there, before it changes a file, stops to copy.
    """

    def __init__(self, config: RunConfig, token: bytes, is_writer: bool, log: Callable[[str], None]):
        self._run_dir = Path(config.run_dir)
        self._url = config.train.upload_to and stores.folder(config.train.upload_to)
        self._keep = config.train.keep_checkpoints
        self._token, self._log = token, log
        self._copied: dict[Path, int] = {}  # the last file of each folder, and its time
        self._logged: set[str] = set()
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        if is_writer and self._url:
            self._thread.start()

    def on_save(self, step: int, checkpoint: Path) -> None:
        """Copy what is complete up to `step`."""
        self._steps.put(step)

    def wait(self) -> None:
        """Wait until all is in the store, or the last try has failed. Not collective."""
        self._steps.put(None)
        while self._thread.is_alive():
            watchdog.beat(f"copying to {printable(self._url)}")
            self._thread.join(1)

    def _run(self) -> None:
        saved_step, is_last = -1, False
        while not is_last:
            step = self._steps.get()
            saved_step, is_last = saved_step if step is None else step, step is None
            try:
                self._copy_up_to(saved_step)
            except (OwnerChanged, OSError, ValueError) as error:
                self._log_once(f"train.upload_to: {error}")
                is_last = is_last or isinstance(error, OwnerChanged)

    def _copy_up_to(self, step: int) -> None:
        # Exports come first: they cannot be made again once the run goes on from a later checkpoint.
        configs = [file for name in CONFIGS for file in self._run_dir.glob(f"exports/step_*/{name}")]
        names = run_folder.complete_checkpoints(self._run_dir)
        states = [run_folder.checkpoints(self._run_dir) / name / STATE for name in reversed(names)]
        for last_file in (*sorted(configs), *states):
            if int(last_file.parent.name.removeprefix("step_")) <= step:
                self._copy(last_file)
        self._copy_run_files()
        # Remove checkpoints that the run has removed, but keep as many as it keeps: a folder that was
        # restored has only one.
        if names:
            there = stores.names(f"{self._url}/checkpoints")
            kept = {*names, *_complete_in(self._url)[-self._keep :]}
            stores.write(f"{self._url}/checkpoints/latest", f"{_complete_in(self._url)[-1]}\n".encode())
            gone = [name for name in there if name.startswith("step_") and name.split("/")[0] not in kept]
            stores.remove(f"{self._url}/checkpoints", sorted(gone, key=lambda name: not name.endswith(STATE)))

    def _copy(self, last_file: Path) -> None:
        """Copy a folder of which `last_file` is written last, unless the store has the same."""
        folder = last_file.parent
        url = f"{self._url}/{folder.relative_to(self._run_dir)}"
        try:
            version = last_file.stat().st_mtime_ns
            if self._copied.get(last_file) == version:
                return
            self._check_owner()
            sums = b""
            if last_file.name != STATE:
                sums = json.dumps(checksums(folder, sorted(os.listdir(folder)))).encode()
            if not (
                _is_same(f"{url}/{last_file.name}", read_file(last_file))
                and (not sums or _is_same(f"{url}.json", sums))
            ):
                self._copy_run_files()
                stores.upload(folder, url, last_file.name, self._check_owner, sums)
            self._copied[last_file] = version
        except FileNotFoundError:
            if last_file.exists():
                raise
            fact = f"{folder.relative_to(self._run_dir)} is not copied: it was removed meanwhile"
            self._log_once(f"train.upload_to: {fact}; raise train.keep_checkpoints")

    def _copy_run_files(self) -> None:
        self._check_owner()
        for file in (file for pattern in RUN_FILES for file in self._run_dir.glob(pattern)):
            stores.write(f"{self._url}/{file.relative_to(self._run_dir)}", read_file(file))

    def _check_owner(self) -> None:
        """Raise OwnerChanged if another start has written its token. Write ours again if there is none."""
        try:
            owner = stores.read(f"{self._url}/{OWNER}", MOST_TEXT)
        except stores.NotThere:  # somebody has emptied the address
            self._copied.clear()
            return stores.write(f"{self._url}/{OWNER}", self._token)
        if owner != self._token:
            raise OwnerChanged(
                f"{printable(self._url)} is now the copy of {printable(owner.decode(errors='replace'))}; "
                f"nothing of {printable(self._run_dir)} is copied there any more; give each its own address."
            )

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._log(text)
        self._logged.add(text)


def _is_same(url: str, content: bytes) -> bool:
    return stores.is_file(url) and stores.read(url, MOST_BYTES) == content
