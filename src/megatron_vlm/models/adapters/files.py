"""Adapters as peft stores them: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Read and written for peft from 0.20 on. A folder may come from anyone: everything in it is checked before it
is used, and nothing in it can run code.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_vlm import weight_files
from megatron_vlm.adapter_settings import CONFIG, LAYERS, MOST_BYTES, READ, with_peft_settings
from megatron_vlm.config import AdapterConfig, ConfigError, RunConfig
from megatron_vlm.files import atomic_directory, atomic_write, open_file, read_file
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.models.adapters.model import PREFIX, adapter_tensors, peft_key, saved_weights
from megatron_vlm.models.weights.exporting import copy_side_files, from_every_stage, write_texts
from megatron_vlm.parallel.setup import on_first_rank
from megatron_vlm.run_folder import adapter_copy, keep_adapter
from megatron_vlm.weight_files import Renames, hub_name

WEIGHTS = "adapter_model.safetensors"
OF_THE_MODEL = ("config.json", "generation_config.json")  # files of a checkpoint that are not its processor's
SAMPLE = 4096  # bytes that are looked at in the middle of each tensor of a checkpoint


def notes_of_start(config: RunConfig) -> Iterator[str]:
    """Lines about the adapter in `adapter.start`: whether it is the run's own copy, and whether it is of a
    base of another name."""
    start, base = config.adapter.start, config.model.hf_path
    if start is None:
        return
    if Path(start) == adapter_copy(config.run_dir):
        yield f"adapter.start: the run has its own copy, {start}, and reads no other folder"
    base_name = json.loads(read_file(Path(start) / CONFIG, MOST_BYTES)).get("base_model_name_or_path")
    if base_name and Path(str(base_name)).name != Path(base).name:
        yield f"adapter.start: {start} says that it was trained on {base_name}; here it adapts {base}"


@attribute_errors_to("start")
def load_adapters(
    chunks: list[MegatronModule],
    base: Path,
    renames: Renames,
    start: str | None,
    run_dir: str | None = None,
) -> None:
    """Notes which checkpoint the adapters adapt, and fills them from the folder `start`, if there is one.
    The run of `run_dir` keeps a copy of that. `renames`, of the base model's family, lets an older
    Transformers have named the modules.

    Collective. Raises ConfigError, with keys and shapes, if the folder holds anything but these adapters.
    """
    base_fingerprint = on_first_rank(fingerprint, base)
    for chunk in chunks:
        chunk.adapters.base = base_fingerprint
        for adapted in chunk.adapters.linears:
            adapted.begin()
    if start is None:
        return
    file = Path(start) / WEIGHTS
    if not file.is_file():
        raise ConfigError(
            f"adapter.start: {start} has no {WEIGHTS}; save the adapter as safetensors, as "
            "pickles are not read."
        )
    weight_files.header(file)  # refuses what is cut short
    with safe_open(file, framework="pt") as stored:
        names = _names_in_file(file, list(stored.keys()), chunks[0], renames)
        for chunk in chunks:
            try:
                _fill(chunk, stored, names)
            except ValueError as error:
                raise ConfigError(f"adapter.start: {file}: {error}") from error
    if run_dir is not None:
        on_first_rank(keep_adapter, run_dir, [file.with_name(CONFIG), file])


def fingerprint(folder: Path) -> str:
    """XXH3 of the names, types and shapes of a checkpoint's tensors, and of some bytes of each.

    It is the same however the tensors are spread over files. A tensor whose other bytes alone differ is not
    noticed; training changes all.
    """
    seen = []
    for name in weight_files.weight_files(folder):
        tensors, first = weight_files.header(folder / name)
        with open_file(folder / name) as file:
            for key, entry in tensors.items():
                start, end = entry["data_offsets"]
                file.seek(first + max(start, (start + end - SAMPLE) // 2))
                sample = xxhash.xxh3_64_hexdigest(file.read(min(SAMPLE, end - start)))
                seen.append([key, entry["dtype"], entry["shape"], sample])
    return xxhash.xxh3_64_hexdigest(json.dumps(sorted(seen)).encode())


def _names_in_file(file: Path, stored: list[str], chunk: MegatronModule, renames: Renames) -> dict[str, str]:
    """Return what the file calls each tensor, by peft's key of today.

    An old name and today's name have one spelling on the hub. Raises ConfigError unless the file
    has exactly the tensors that the model's adapters need.
    """
    targets = chunk.adapters.targets
    needed_keys = {peft_key(target, name) for target in targets for name in ("lora_A", "lora_B")}
    needed_keys |= {peft_key(target, "lora_magnitude_vector") for target in targets if target.dora}
    needed_keys |= {PREFIX + key for saved in chunk.adapters.saved.values() for key in saved.keys}
    by_hub_name = {hub_name(key.removeprefix(PREFIX), renames): key for key in needed_keys}
    names = {by_hub_name.get(hub_name(key.removeprefix(PREFIX), renames), key): key for key in stored}
    # of a tensor under two names, one is unexpected
    unexpected = set(stored) - {names[key] for key in needed_keys & names.keys()}
    for keys, fault in ((needed_keys - names.keys(), "lacks"), (unexpected, "has, and the model does not,")):
        if keys:
            raise ConfigError(
                f"adapter.start: {file} {fault} {len(keys)} tensors, such as "
                f"{min(keys)}; do its {CONFIG} and the model belong together, and does "
                f"{min(stored, default='')} begin as peft's names do, with {PREFIX}?"
            )
    return names


@torch.no_grad()
def _fill(chunk: MegatronModule, stored: Any, names: dict[str, str]) -> None:
    """Reads this rank's part of a file, which calls the tensors `names`. Raises ValueError for a tensor of
    another shape, or with values that are not finite."""
    for lora in chunk.adapters.children():
        for name, shape in lora.whole.items():
            key = names[peft_key(lora.target, name)]
            local = getattr(lora, name)
            local.copy_(lora.part(name, _sliced(stored, key, shape)))
            _check_finite(key, local)
    group = parallel_state.get_tensor_model_parallel_group()
    for module, weight in saved_weights(chunk):
        pairs = zip(module.keys, module.shapes, strict=True)
        sources = [_sliced(stored, names[PREFIX + key], shape) for key, shape in pairs]
        module.rule.operation.load(weight, sources, group.rank(), group.size())
        _check_finite(PREFIX + module.keys[0], weight)


def _sliced(stored: Any, key: str, shape: list[int]) -> Any:
    """A tensor of a file, to be read in parts. Raises ValueError unless it is floats of this shape."""
    values = stored.get_slice(key)
    if list(values.get_shape()) != shape or values.get_dtype() not in weight_files.FLOATS:
        kind = f"{values.get_shape()} of {values.get_dtype()}"
        raise ValueError(f"{key} is {kind} and must be floats of shape {shape}; is it of another base model?")
    return values


def _check_finite(key: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"{key} holds values that are not finite.")


def save_adapters(
    chunks: list[MegatronModule],
    output: str | Path,
    adapter: AdapterConfig,
    base: str,
    chat_template: str | None = None,
    source: Path | None = None,
    card: str | None = None,
) -> None:
    """Write the folder that `peft.PeftModel.from_pretrained` loads onto the checkpoint `base`. Collective.

    It has the processor's files of the checkpoint in `source`, the `chat_template` unless it is the
    checkpoint's, and the model `card` as README.md.

    Raises FileExistsError if it exists, and OSError if it cannot be written.
    """
    # all ranks gather, rank 0 alone keeps what it got and writes
    every = from_every_stage(adapter_tensors(chunks))
    tensors = {key: tensor.cpu() for key, tensor in every if dist.get_rank() == 0}

    def write() -> None:
        modules = [target.module for target in chunks[0].adapters.targets if not target.experts]
        text = json.dumps(_config_for_peft(with_peft_settings(adapter), modules, base), indent=2)
        with atomic_directory(output) as aside:
            save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
            atomic_write(aside / CONFIG, text + "\n")
            if source is not None:
                copy_side_files(source, aside, leave_out=OF_THE_MODEL)
            write_texts(aside, chat_template, card)

    on_first_rank(write)


def _config_for_peft(adapter: AdapterConfig, modules: list[str], base: str) -> dict[str, Any]:
    """A list or regex stays as it was given; what it leaves to us is written out, module by module."""
    settings = {key: getattr(adapter, key) for key in READ} | {"lora_alpha": adapter.alpha}
    if settings["target_modules"] is None or str(settings["target_modules"]).lower() == "all-linear":
        settings |= {"target_modules": modules, "exclude_modules": None}
    settings |= {key: settings[key] or None for key in ("target_parameters", "modules_to_save", *LAYERS)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        **settings,
    }
