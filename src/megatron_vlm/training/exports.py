"""Hugging Face folders that a run writes while it trains (`train.export_every`), in `<run_dir>/exports`.

<run_dir>/exports/step_00000100/          a whole folder, as `megatron-vlm export` writes it
<run_dir>/exports/.step_00000200.*.partial/  being written, or removed as its step was trained again
"""

from pathlib import Path

from torch.nn import Module

from megatron_vlm.config import RunConfig
from megatron_vlm.files import beside, naming, need_room
from megatron_vlm.job import watchdog
from megatron_vlm.models.adapters.files import save_adapters
from megatron_vlm.models.hf import Source
from megatron_vlm.models.weights.exporting import export_hf
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.parallel import setup
from megatron_vlm.run_folder.folder import remove_leftovers


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


def _make_room(folder: Path, needed: int) -> None:
    with naming(folder):
        folder.parent.mkdir(exist_ok=True)
        if folder.exists():
            folder.rename(beside(folder))
        remove_leftovers(folder.parent)
        need_room(folder, needed)
