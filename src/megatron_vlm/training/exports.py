"""Hugging Face folders that a run writes while it trains (`train.export_every`), in `<run_dir>/exports`.

<run_dir>/exports/step_00000100/          a whole folder, as `megatron-vlm export` writes it
<run_dir>/on_export/step_00000100.txt     what `train.on_export` printed about it
<run_dir>/exports/.step_00000200.*.partial/  being written, or removed as its step was trained again
"""

import os
import shlex
import subprocess
from pathlib import Path
from threading import Thread

from torch.nn import Module
from tqdm import tqdm

from megatron_vlm.config import RunConfig
from megatron_vlm.files import beside, naming, need_room, open_to_write
from megatron_vlm.job import watchdog
from megatron_vlm.messages import printable
from megatron_vlm.models.adapters.files import save_adapters
from megatron_vlm.models.hf import Source
from megatron_vlm.models.weights.exporting import export_hf
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.parallel import setup
from megatron_vlm.run_folder.folder import remove_leftovers

# what would make a program take itself for a rank of this job
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def export_step(
    config: RunConfig, source: Source, model: list[Module], step: int, replace: bool = True
) -> None:
    """Write the model of a step as a Hugging Face folder, which appears when it is whole. Collective. A run
    that trains adapters writes them alone, as peft does.

    A folder of the step that is there already is replaced, or left if not `replace`. Raises OSError as
    `need_room`.
    """
    from megatron.core.utils import unwrap_model  # here, as it is slow before `parallel.cpu` is imported

    folder = Path(config.run_dir, "exports", f"step_{step:08d}")
    if not replace and setup.on_first_rank(folder.exists):
        return
    watchdog.beat(f"exporting step {step} to {folder}", files=True)
    files = HFCheckpoint(source.folder, source.weight_map.renames)
    setup.on_first_rank(_make_room, folder, 0 if config.adapter.used else files.nbytes)  # adapters are small
    chunks = unwrap_model(model)
    if config.adapter.used:
        save_adapters(chunks, folder, config.adapter, config.model.hf_path)
    else:
        export_hf(chunks, folder, source.folder, source.weight_map)
    if config.train.on_export and setup.is_first_rank():
        log = Path(config.run_dir, "on_export", f"{folder.name}.txt")
        Thread(target=_tell, args=(config.train.on_export, folder, log), name="on_export").start()


def _tell(command: str, folder: Path, log: Path) -> None:
    """Runs the command for a folder, and says if it fails. The process of the run ends after it."""
    words = f"{command} {shlex.quote(str(folder.resolve()))}"
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    try:
        log.parent.mkdir(exist_ok=True)
        with open_to_write(log) as output:
            ended = subprocess.run(
                words, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        problem = f"exit code {ended.returncode}" if ended.returncode else ""
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        tqdm.write(f"train.on_export: {printable(words)}: {printable(problem)}; its output is in {log}")


def _make_room(folder: Path, needed: int) -> None:
    with naming(folder):
        folder.parent.mkdir(exist_ok=True)
        if folder.exists():
            folder.rename(beside(folder))
        remove_leftovers(folder.parent)
        need_room(folder, needed)
