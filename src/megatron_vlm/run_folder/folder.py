"""The checkpoints of a run folder, without torch: which is the newest, how one is completed and removed.

    <run_dir>/checkpoints/latest                 name of the newest complete checkpoint
    <run_dir>/checkpoints/latest.tmp             name of the one that is being made complete now
    <run_dir>/checkpoints/best                   with `train.keep_best`: that with the lowest validation loss
    <run_dir>/checkpoints/step_00000100/         a complete checkpoint: it has a state.json
    <run_dir>/checkpoints/step_00000200.tmp/     being written
    <run_dir>/checkpoints/.step_00000050.*.partial/  being removed
    <run_dir>/checkpoints/adapter_start/         what `adapter.start` held when the run began

A kill at any point leaves a complete checkpoint that `latest` or `latest.tmp` names, and leftovers that
`tidy` removes. So does a power cut: every file is on disk before the step that relies on it.
"""

import os
import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import (
    add_path_to_errors,
    atomic_directory,
    atomic_write,
    copy_file,
    need_room,
    open_file,
    read_file,
    refuse_odd,
    sync,
    temporary_name,
)
from megatron_vlm.overrides import load_yaml
from megatron_vlm.run_folder import lock as run_lock
from megatron_vlm.run_folder.checkpoint_files import STATE, read_state, state_text

FOLDERS = ("checkpoints", "batches", "drops", "tensorboard", "errors", "errors/export", "profile")
FOLDERS += ("scores", "on_export", "exports")
FILES = ("config.yaml", "recipe.yaml", "recipe.yaml.old", "lock", "metrics.jsonl", "starts.jsonl", "loss.png")
FILES += ("report.html", "held_out.jsonl", "metrics.csv", "mlflow_run")
OTHERS = {"config.json": "a checkpoint", ".nv-meta": "a dataset"}  # what a folder with such an entry holds
NOTES = ("log", ".out", ".err", ".txt", ".md", ".sh", ".yaml", ".yml")  # may lie there before a run begins
_STEP = re.compile(r"step_\d{8}", re.ASCII)
_OF_CHECKPOINTS = re.compile(r"step_\d{8}(\.tmp)?|latest(\.tmp|\.old)?|best|adapter_start|\..*", re.ASCII)
_LEFTOVER = re.compile(r"step_\d{8}\.tmp|\..+\.[0-9a-f]{8}\.partial", re.ASCII)


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
        run_lock.check_free(run_dir)


def check_folder(run_dir: str | Path) -> None:
    """Raise ConfigError unless the folder is missing, empty or a run's, and as `refuse_links`.

    A run's has a configuration, a complete checkpoint, or at least a run's lock. Where none of these is, a
    file with the name of a run's is the user's too. Only where a run has trained may other things lie beside.
    """
    refuse_links(run_dir)
    names = os.listdir(run_dir) if Path(run_dir).is_dir() else []
    is_runs = "config.yaml" in names or complete_checkpoints(run_dir) or run_lock.is_there(run_dir)
    run_files = {*FOLDERS, *FILES} if is_runs else set()
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


# ---- the adapter that a run began with ---------------------------------------------------------------------


def with_own_start(config: RunConfig) -> RunConfig:
    """Return the configuration with the run's copy as `adapter.start`, if it has a checkpoint and a copy.

    So the folder that a run began with may then be moved, changed or removed.
    """
    copy = adapter_copy(config.run_dir)
    if config.adapter.start is None or not copy.is_dir() or latest_checkpoint(config.run_dir) is None:
        return config
    return replace(config, adapter=replace(config.adapter, start=str(copy)))


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
