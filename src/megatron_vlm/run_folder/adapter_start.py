"""The adapter that a run began with: the run keeps a copy of `adapter.start` and goes on from that.

<run_dir>/checkpoints/adapter_start/   what it was when the run began, with its settings; see `with_own_start`
"""

from dataclasses import replace
from pathlib import Path

from megatron_vlm.config import RunConfig
from megatron_vlm.files import copy_file, folder_aside
from megatron_vlm.run_folder.folder import checkpoints, latest_checkpoint, remove

NAME = "adapter_start"


def with_own_start(config: RunConfig) -> RunConfig:
    """The configuration with the run's own copy as `adapter.start`, if it has a checkpoint and a copy.

    So the folder that a run began with may then be moved, changed or removed.
    """
    copy = of_run(config.run_dir)
    if config.adapter.start is None or not copy.is_dir() or latest_checkpoint(config.run_dir) is None:
        return config
    return replace(config, adapter=replace(config.adapter, start=str(copy)))


def of_run(run_dir: str | Path) -> Path:
    """Where the copy of a run lies."""
    return checkpoints(run_dir) / NAME


def keep(run_dir: str | Path, files: list[Path]) -> None:
    """Copies the files of the adapter that a run begins with. A copy of an earlier beginning is replaced."""
    copy = of_run(run_dir)
    if files[0].parent == copy:
        return
    remove(copy)
    with folder_aside(copy) as aside:
        for file in files:
            copy_file(file, aside / file.name)
