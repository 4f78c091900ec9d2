"""The run folder, without torch: who may start, which checkpoint is the newest, how one becomes complete.

    <run_dir>/checkpoints/latest                 name of the newest complete checkpoint
    <run_dir>/checkpoints/latest.tmp             name of the one that is being made complete now
    <run_dir>/checkpoints/best                   with `train.keep_best`: that with the lowest validation loss
    <run_dir>/checkpoints/step_00000100/         a complete checkpoint: it has a state.json
    <run_dir>/checkpoints/step_00000200.tmp/     being written
    <run_dir>/checkpoints/.step_00000050.*.partial/  being removed
    <run_dir>/checkpoints/adapter_start/         what `adapter.start` held when the run began

A kill at any point leaves a complete checkpoint that `latest` or `latest.tmp` names, and leftovers that
`tidy` removes. So does a power cut: every file is on disk before the step that relies on it.

One run at a time: each process of it holds `<run_dir>/lock` while it is alive. It is a POSIX record lock,
which rank 0 takes alone and then shares with the other ranks. The kernel frees it when a process ends,
however it ends, and processes forked from it (DataLoader workers) do not hold it. Other hosts see it if the
file system shares locks (NFS, GPFS, Lustre mounted with `flock`), not if that is mounted with `nolock` or
`localflock`.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import (
    add_path_to_errors,
    atomic_directory,
    atomic_write,
    copy_file,
    need_room,
    open_file,
    open_to_write,
    read_file,
    read_text,
    refuse_odd,
    sync,
    temporary_name,
)
from megatron_vlm.overrides import load_yaml

STATE = "state.json"
FOLDERS = ("checkpoints", "batches", "drops", "tensorboard", "errors", "profile")
FOLDERS += ("scores", "on_export", "exports")
FILES = ("config.yaml", "recipe.yaml", "recipe.yaml.old", "lock", "metrics.jsonl", "starts.jsonl", "loss.png")
FILES += ("report.html", "held_out.jsonl", "completions.jsonl", "metrics.csv", "mlflow_run")
OTHERS = {"config.json": "a checkpoint", ".nv-meta": "a dataset"}  # what a folder with such an entry holds
NOTES = ("log", ".out", ".err", ".txt", ".md", ".sh", ".yaml", ".yml")  # may lie there before a run begins
_STEP = re.compile(r"step_\d{8}", re.ASCII)
_OF_CHECKPOINTS = re.compile(r"step_\d{8}(\.tmp)?|latest(\.tmp|\.old)?|best|adapter_start|\..*", re.ASCII)
_LEFTOVER = re.compile(r"step_\d{8}\.tmp|\..+\.[0-9a-f]{8}\.partial", re.ASCII)
LOCK = "lock"
OF_A_RUN = "run_dir: a run"  # a setting, and whose folder it names
OF_AN_EVALUATION = "--output: an evaluation"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_FLOCK = "hhqqi4x"  # Linux's struct flock: type, whence, start, length, process


def checkpoints(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


# ---- which checkpoint -------------------------------------------------------------------------------------


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """The folder of the newest complete checkpoint, from which a run goes on; None if there is none.

    It lies in the run's own folder: `latest` holds the name of a step and nothing else, and links do not
    count. Raises ConfigError, with the command that repairs it, if there are complete checkpoints and
    `latest` is missing or damaged, or if it names one that is not complete.
    """
    folder = checkpoints(run_dir)
    complete = complete_checkpoints(run_dir)
    for pointer in (folder / "latest.tmp", folder / "latest"):  # the first only after a kill
        if _named(pointer) in complete:
            return folder / _named(pointer)
    if not complete and not os.path.lexists(folder / "latest"):
        return None
    raise ConfigError(_no_latest(folder, complete))


def is_latest(path: Path) -> bool:
    """Whether `latest` names this checkpoint, and it is complete."""
    return _named(path.parent / "latest") == path.name and _is_complete(path)


def complete_checkpoints(run_dir: str | Path) -> list[str]:
    """The names of all complete checkpoints, oldest first. Raises ConfigError if there is no folder."""
    folder = checkpoints(run_dir)
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise ConfigError(f"run_dir: {folder} is not a folder; give another run_dir.")
        return []
    return sorted(name for name in os.listdir(folder) if _is_complete(folder / name))


def _is_complete(path: Path) -> bool:
    """Whether this is a complete checkpoint; a link is none."""
    return bool(_STEP.fullmatch(path.name)) and not path.is_symlink() and (path / STATE).is_file()


def _named(pointer: Path) -> str | None:
    """The name of a step that a file holds; None if it holds anything else."""
    if not pointer.is_file():
        return None
    with open_file(pointer) as file:
        text = file.read(100).decode(errors="replace").strip()
    return text if _STEP.fullmatch(text) else None


def _no_latest(folder: Path, complete: list[str]) -> str:
    latest = folder / "latest"
    fact = f"checkpoint: {latest} is missing or names no complete checkpoint"
    if not complete:
        return f"{fact}. Restore it, or delete {latest} to begin from step 1."
    command = _choose(folder, complete, _named(latest))
    remedy = f"Begin from step 1 in another run_dir, or go on from one: {command}"
    return f"{fact}; complete are {', '.join(complete[-3:])}. {remedy}"


def _choose(folder: Path, complete: list[str], before: str | None) -> str:
    """The command that makes `latest` name the newest, if possible of those before `before`."""
    earlier = [name for name in complete if before is None or name < before]
    latest = folder / "latest"
    quoted = shlex.quote(str(latest))
    aside = "" if latest.is_file() or not os.path.lexists(latest) else f"mv {quoted} {quoted}.old && "
    return f"{aside}echo {(earlier or complete)[-1]} > {quoted}"


# ---- who may start ----------------------------------------------------------------------------------------


def check_start(run_dir: str | Path, hf_path: str) -> None:
    """Raise ConfigError unless a run of the model `hf_path` may begin or continue in this folder now.

    It refuses a folder of another model's run, checkpoints without a valid `latest`, and a second run while
    the first is active. It changes nothing and imports nothing heavy.
    """
    check_folder(run_dir)
    config = Path(run_dir, "config.yaml")
    if config.exists():
        check_model("run_dir", run_dir, read_file(config), hf_path, is_used(Path(run_dir)))
    latest_checkpoint(run_dir)
    with add_path_to_errors(Path(run_dir)):
        check_unlocked(run_dir)


def check_folder(run_dir: str | Path) -> None:
    """Raise ConfigError unless the folder is missing, empty or a run's, and as `refuse_links`.

    A run's has a configuration, a complete checkpoint, or at least a run's lock. Where none of these is, a
    file with the name of a run's is the user's too. Only where a run has trained may other things lie beside.
    """
    refuse_links(run_dir)
    names = os.listdir(run_dir) if Path(run_dir).is_dir() else []
    is_runs = "config.yaml" in names or complete_checkpoints(run_dir) or has_lock(run_dir)
    run_files = {*FOLDERS, *FILES} if is_runs else {"errors"}  # which also a start that failed leaves
    foreign = sorted(
        name for name in {*names} - run_files if not name.startswith(".") and not name.endswith(NOTES)
    )
    inside = os.listdir(checkpoints(run_dir)) if checkpoints(run_dir).is_dir() else []
    foreign += [f"checkpoints/{name}" for name in inside if not _OF_CHECKPOINTS.fullmatch(name)]
    contents = [f"{OTHERS[name]} ({name})" for name in names if name in OTHERS]
    if foreign and not ("config.yaml" in names and is_used(Path(run_dir))):
        contents.append(f"other things, such as {foreign[0]}")
    if contents:
        raise ConfigError(
            f"run_dir: {run_dir} holds {contents[0]} and no run; give a folder that is new or empty."
        )


def refuse_links(run_dir: str | Path) -> None:
    """Raise NotAFile for a link or a pipe in a run's folder, where commands write; it may be a link itself.

    Checkpoints and exports are written under a temporary name, so links among them do no harm. Raises
    ConfigError for a file in place of a folder, and a folder in place of a file.
    """
    for name in ("", *FOLDERS):
        place = Path(run_dir) / name
        if os.path.lexists(place) and not place.is_dir():
            raise ConfigError(f"run_dir: {place} is not a folder; give another run_dir.")
        if place.is_dir() and name not in ("checkpoints", "exports"):
            refuse_odd(place, links=False)
    for place in (*(Path(run_dir, name) for name in FILES), *Path(run_dir).glob("*/rank*")):
        if place.is_dir():
            raise ConfigError(f"run_dir: {place} is a folder, where a run has a file; move it away.")


def check_model(setting: str, place: str | Path, content: bytes, hf_path: str, is_used: bool = True) -> None:
    """Raise ConfigError if a run's config.yaml, which has this content, names another model, or is none."""
    file = f"{place}/config.yaml"
    text = content.decode(errors="replace")
    if not text.strip():
        return
    try:
        saved_path = str(load_yaml(text)["model"]["hf_path"])
    except (ConfigError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{setting}: {file} is not the configuration of a run; give another {setting}, or "
            "move that file away."
        ) from error
    if is_used and saved_path != hf_path and _absolute(saved_path) != _absolute(hf_path):
        raise ConfigError(
            f"{setting}: {place} holds a run of {saved_path}, and model.hf_path is "
            f"{hf_path}. Give another {setting}; or, where the same model only moved, write its "
            f"new path into {file}."
        )


def is_used(run_dir: Path) -> bool:
    """Whether something was trained or imported there."""
    metrics = run_dir / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(complete_checkpoints(run_dir))


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


# ---- one run at a time -------------------------------------------------------------------------------------


def take_lock(run_dir: str | Path, patience: float = 5.0, whose: str = OF_A_RUN) -> BinaryIO:
    """Take the lock for rank 0, until it is closed or this process ends; the other ranks then `join_lock`.

    Do not open the lock elsewhere in this process: closing any descriptor of the file frees it.

    Args:
        run_dir: An existing folder.
        patience: Seconds; the kernel needs time to end a killed process.
        whose: The setting and whose folder it is, for the error.

    Raises:
        ConfigError: Another run is still alive; its text names a process of it.
    """
    file = open_to_write(Path(run_dir) / LOCK, "r+b")
    _lock(file, fcntl.LOCK_EX, run_dir, patience, whose)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.truncate(0)
    text = f"rank 0 is process {os.getpid()} on {socket.gethostname()} since {since}"
    os.pwrite(file.fileno(), text.encode(), 0)
    _lock(file, fcntl.LOCK_SH, run_dir)
    return file


def join_lock(run_dir: str | Path) -> BinaryIO:
    """Share the lock that rank 0 has taken. A run is alive as long as any of its ranks."""
    file = open_to_write(Path(run_dir) / LOCK, "r+b")
    _lock(file, fcntl.LOCK_SH, run_dir)
    return file


def has_lock(run_dir: str | Path) -> bool:
    """Return whether a run has made this folder's lock, even if it failed before it wrote anything else."""
    file = Path(run_dir) / LOCK
    if not file.is_file():
        return False
    with open_file(file) as content:
        return content.read(5) in (b"", b"rank ")


def check_unlocked(run_dir: str | Path) -> None:
    """Raise ConfigError as `take_lock` does, but take no lock."""
    if (Path(run_dir) / LOCK).exists():
        with open_to_write(Path(run_dir) / LOCK, "r+b") as file:
            _lock(file, fcntl.LOCK_EX, run_dir, patience=1.0)


def is_locked(run_dir: str | Path) -> bool:
    """Return whether a process of a run holds the lock; take none, write nothing, and need no right to.

    Not for a process that holds it itself: closing the file would free it.
    """
    if not (Path(run_dir) / LOCK).exists():
        return False
    with open_file(Path(run_dir) / LOCK) as file:
        return _holder(file) is not None


def _lock(
    file: BinaryIO, kind: int, run_dir: str | Path, patience: float = 0.0, whose: str = OF_A_RUN
) -> None:
    """Lock a file, or change the kind of its lock, within `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return fcntl.lockf(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                if kind == fcntl.LOCK_EX:
                    fact = f"run_dir: no locks on this file system ({error.strerror})"
                    print(f"{fact}; a second run in this folder would not be noticed.", file=sys.stderr)
                return None
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # which say that another has it
                raise
        if time.monotonic() >= deadline:
            setting, owner = whose.split(": ")
            text = os.pread(file.fileno(), 1000, 0).decode(errors="replace").strip("\0 \n")
            raise ConfigError(
                f"{setting}: {run_dir} belongs to {owner} that lives: process {_holder(file)} holds its lock "
                f"({text}). Wait until it ends, end it with `kill` on its host, or give another {setting}."
            )
        time.sleep(0.05)


def _holder(file: BinaryIO) -> int | None:
    """The id of a process that holds the lock, on its own host; None if none does, or none can be asked."""
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, question))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return None if kind == fcntl.F_UNLCK else process


# ---- a checkpoint becomes complete, old ones go -----------------------------------------------------------


def begin(run_dir: str | Path, step: int, needed: int = 0) -> Path:
    """A new folder for the files of the checkpoint of `step`; `complete` then makes it a checkpoint.

    Raises OSError if it cannot be created, or if fewer than `needed` bytes are free.
    """
    partial = checkpoints(run_dir) / f"step_{step:08d}.tmp"
    with add_path_to_errors(partial):
        tidy(run_dir)
        need_room(partial, needed)
        partial.mkdir(parents=True)
    return partial


def complete(partial: Path, state: dict[str, Any]) -> Path:
    """Add state.json to a folder whose other files are on disk already, and let `latest` name it.

    `state["files"]` is what `checksums` returned for them. An older checkpoint of the same step is removed.
    """
    with add_path_to_errors(partial):
        atomic_write(partial / STATE, state_text(state))
    return make_latest(partial)


def make_latest(partial: Path) -> Path:
    """Lets a folder that has all files, on disk, be a checkpoint, which `latest` names."""
    folder = partial.parent
    final = partial.with_suffix("")
    with add_path_to_errors(partial):
        sync(partial)
        if os.path.lexists(final):
            os.rename(final, temporary_name(final))
        # The rename makes it complete. If a kill comes before `latest`, latest.tmp tells the next run so.
        atomic_write(folder / "latest.tmp", final.name + "\n")
        sync(folder)
        os.rename(partial, final)
        sync(folder)
        os.replace(folder / "latest.tmp", folder / "latest")
        sync(folder)
    return final


def prune(run_dir: str | Path, newest: str, keep: int, keep_best: bool = False) -> None:
    """Remove all but the `keep` newest checkpoints up to `newest` and, if asked for, the best one.

    Later steps stay: they exist if somebody set `latest` back, and go when their step is saved again.
    """
    folder = checkpoints(run_dir)
    best = best_checkpoint(run_dir) if keep_best else None
    with add_path_to_errors(folder):
        if best:
            atomic_write(folder / "best", best + "\n")
        for name in [name for name in complete_checkpoints(run_dir) if name <= newest][: -max(keep, 1)]:
            if name != best:
                os.rename(folder / name, temporary_name(folder / name))
        remove_leftovers(folder)


def best_checkpoint(run_dir: str | Path) -> str | None:
    """The complete checkpoint that was saved with the lowest rating, of equal ones the first. Those that were
    rated by another figure than the newest do not count."""
    ratings: dict[str, tuple[Any, Any]] = {}  # name: by which figure, and the value
    for name in complete_checkpoints(run_dir):
        with suppress(ValueError, OSError):  # a damaged one is not the best
            state = read_state(checkpoints(run_dir) / name)
            best = state["extra"].get("callbacks", {}).get("Best", {})
            is_rated = best.get("last_step") == state["step"]
            ratings[name] = best.get("by"), best["last"] if is_rated else None
    newest = ratings[max(ratings)][0] if ratings else None
    alike = {name: rated for name, (by, rated) in ratings.items() if by == newest and rated is not None}
    finite = {name: rated for name, rated in alike.items() if isfinite(rated)}
    return min(finite, key=finite.__getitem__, default=None)


def tidy(run_dir: str | Path) -> None:
    """Finish or remove what a kill left behind. Only the run that holds the lock may call it."""
    folder = checkpoints(run_dir)
    if not folder.is_dir():
        return
    with add_path_to_errors(folder):
        if _named(folder / "latest.tmp") in complete_checkpoints(run_dir):
            os.replace(folder / "latest.tmp", folder / "latest")
            sync(folder)
        (folder / "latest.tmp").unlink(missing_ok=True)
        remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Removes leftovers. One that a file system still keeps open is tried again at the next save."""
    for name in os.listdir(folder):
        if _LEFTOVER.fullmatch(name):
            remove(folder / name)


def remove(path: Path) -> None:
    """Remove a file, or a folder as far as possible; for a link, only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


# ---- are its files as they were saved? ---------------------------------------------------------------------


def checksums(folder: Path, names: Iterable[str]) -> dict[str, list]:
    """{name: [bytes, XXH3 as hexadecimal]} of files that were just written; they are on disk afterwards."""
    return {name: _size_and_checksum(folder / name, sync=True) for name in names}


def state_text(state: dict[str, Any]) -> str:
    """The text that `read_state` reads, with its own checksum. `state["files"]` comes from `checksums`."""
    return json.dumps({**state, "checksum": _checksum_of(json.dumps(state))})


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint. Raises ValueError that names the file and what is wrong with it."""
    try:
        state = json.loads(read_text(path / STATE))
        if not isinstance(state, dict) or state.pop("checksum", None) != _checksum_of(json.dumps(state)):
            raise ValueError("its checksum differs")
        if state["step"] != int(path.stem.removeprefix("step_")):
            raise ValueError(f"it is of step {state['step']}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / STATE} is not what was saved: {error}") from error
    return state


def size_problems(path: Path, files: dict[str, list]) -> list[str]:
    """Which files are missing, extra, or of another size than state.json says; they are not read.

    Names that begin with a dot only count if they were saved: file systems and editors create such files.
    """
    there = {entry.name: entry for entry in os.scandir(path)}
    problems = []
    for name, (size, _) in sorted(files.items()):
        place = path / name
        if name not in there or not there[name].is_file():
            problems.append(f"{place} is missing")
        elif (now := there[name].stat().st_size) != size:
            problems.append(f"{place} has {now} bytes and had {size} when it was saved")
    extra = {name for name in there if not name.startswith(".")} - {*files, STATE}
    return problems + [f"{path / name} was not saved with it" for name in sorted(extra)]


def checksum_problems(path: Path, files: dict[str, list]) -> list[str]:
    """Which of the files do not hold what was saved; they are read whole."""
    problems = []
    for name in sorted(files):
        try:
            same = _size_and_checksum(path / name) == files[name]
        except OSError as error:
            problems.append(f"{path / name} cannot be read ({error.strerror})")
        else:
            if not same:
                problems.append(f"{path / name} is not what was saved: its checksum differs")
    return problems


def _size_and_checksum(path: Path, sync: bool = False) -> list:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        if sync:
            os.fsync(file.fileno())
        return [file.tell(), digest.hexdigest()]


def _checksum_of(text: str) -> str:
    return xxhash.xxh3_64(text.encode()).hexdigest()


# ---- the adapter that a run began with ---------------------------------------------------------------------


def with_own_start(config: RunConfig) -> RunConfig:
    """Return the configuration with the adapter that the run began with, if it has a checkpoint.

    The run's copy becomes `adapter.start`, so the folder that it began with may be moved, changed or removed.
    A `lora_alpha` that is not set stays as it was when the run began.
    """
    adapter = config.adapter
    if not adapter.used or latest_checkpoint(config.run_dir) is None:
        return config
    if adapter.start is not None:
        copy = adapter_copy(config.run_dir)
        return replace(config, adapter=replace(adapter, start=str(copy))) if copy.is_dir() else config
    saved = Path(config.run_dir, "config.yaml")
    if adapter.lora_alpha is None and saved.exists():
        began_with = load_yaml(read_text(saved), str(saved)).get("adapter") or {}
        return replace(config, adapter=replace(adapter, lora_alpha=began_with.get("lora_alpha")))
    return config


def adapter_copy(run_dir: str | Path) -> Path:
    """Return where the run's copy of `adapter.start` lies, with its settings."""
    return checkpoints(run_dir) / "adapter_start"


def keep_adapter(run_dir: str | Path, files: list[Path]) -> None:
    """Copy the files of the adapter that a run begins with; a copy of an earlier beginning is replaced."""
    copy = adapter_copy(run_dir)
    if files[0].parent == copy:
        return
    remove(copy)
    with atomic_directory(copy) as aside:
        for file in files:
            copy_file(file, aside / file.name)


# ---- what to do about a damaged one -----------------------------------------------------------------------


def damaged(path: Path, problems: list[str]) -> str:
    """The message about a checkpoint with these problems, and what to do."""
    if not path.exists():
        return f"checkpoint: {path} was removed while it was read; start again, to read a newer one."
    more = f", and {len(problems) - 1} more of its files are not as saved" if len(problems) > 1 else ""
    other_names = [name for name in complete_checkpoints(path.parent.parent) if name != path.name]
    fact = f"checkpoint: {problems[0]}{more}. Restore it from a copy, or"
    if not other_names:
        return f"{fact} begin in another run_dir: no other checkpoint here is complete."
    return f"{fact} go on from another complete one: {_choose(path.parent, other_names, path.name)}"
