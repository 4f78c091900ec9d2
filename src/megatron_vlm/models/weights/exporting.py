"""Hugging Face weights out: one weight gathered at a time, each pipeline stage writing its own files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.models.weights.files import CONFIG_FILE, INDEX_FILE, WEIGHT_FILE, HFCheckpoint
from megatron_vlm.models.weights.rules import (
    EXPERT,
    Operation,
    Rule,
    Whole,
    experts_per_rank,
    find_rule,
    matches,
    named_global_weights,
    turned,
)

if TYPE_CHECKING:
    from megatron_vlm.models.families.base import Family
    from megatron_vlm.models.vlm import VLMModel

SHARD_BYTES = 2**30  # export starts a new file after this much


def hf_tensors(
    chunks: list[VLMModel],
    rules: list[Rule],
    files: Container[str] | None = None,
    value: Callable[[Tensor], Tensor | None] = lambda weight: weight.detach(),
) -> Iterator[tuple[str, Tensor]]:
    """(hub key, whole tensor) of this pipeline stage, one weight gathered at a time.

    A collective over the tensor-parallel group and the expert-parallel one: every rank of the stage iterates
    to the end. Of several layouts, the one in `files` is made, or else the rules' first. `value` picks what
    is exported of a weight (the tests export gradients), None for nothing.
    """
    fused: dict[str, dict[int, Tensor]] = {}
    for chunk in chunks:
        for name, weight in named_global_weights(chunk):
            rule, _ = find_rule(rules, name, files)
            local = value(weight) if rule.export else None
            if local is None:
                continue
            for global_name, shards in _gather(name, local.contiguous(), rule.operation, chunk.config):
                rule, keys = find_rule(rules, global_name, files)
                tensors = rule.operation.write(shards)
                if rule.rows is None:
                    yield from zip(keys, tensors, strict=True)
                    continue
                rows = fused.setdefault(keys[0], {})
                rows[rule.row(global_name)] = tensors[0]
                if len(rows) == rule.rows:
                    yield keys[0], torch.stack([rows[i] for i in range(rule.rows)])
                    del fused[keys[0]]


def _gather(
    name: str, local: Tensor, operation: Operation, config: TransformerConfig
) -> Iterator[tuple[str, list[Tensor]]]:
    """(name, all ranks' shards) of this weight, and of the experts that the other ranks hold in its place."""
    if expert := EXPERT.search(name):
        step = experts_per_rank(config)
        experts = _all_gather(local, parallel_state.get_expert_model_parallel_group())
        for rank, shard in enumerate(experts):
            yield EXPERT.sub(str(rank * step + int(expert[0]) % step), name), [shard]
    elif isinstance(operation, Whole):
        yield name, [local]
    else:
        yield name, _all_gather(local, parallel_state.get_tensor_model_parallel_group())


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local, group=group)
    return shards


def export_hf(
    chunks: list[VLMModel], output: str | Path, source: str | Path, family: Family, hf_config: Any
) -> None:
    """Write the model as an HF folder: weights named and typed as in `source`, its other files copied.

    Of an FP8 source the weights are written in the config's dtype, without scales and quantization_config.

    Collective over all ranks, which must share the file system. Each pipeline stage writes its own files
    while it gathers; `output` appears when everything is written. Raises FileExistsError when it exists.
    """
    output, checkpoint = Path(output), HFCheckpoint(source, family.renames)
    partial = output.with_name(output.name + ".partial")
    if dist.get_rank() == 0:
        if output.exists():
            raise FileExistsError(f"{output} exists; export to a new folder or remove it")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        copy_side_files(checkpoint.folder, partial)
        adapt_config(partial / CONFIG_FILE, family, checkpoint.is_fp8)
    dist.barrier()
    # Expert-parallel groups reach over data-parallel ranks, so all take part; one rank of a stage writes.
    tensors = hf_tensors(chunks, family.weights(hf_config), checkpoint.files)
    written = _write_shards(tensors, checkpoint, partial, _is_first_of_stage())
    stages: list[dict[str, list[str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(stages, written)
    if dist.get_rank() == 0:
        files = {file: keys for stage in stages for file, keys in stage.items()}
        _check_complete(files, checkpoint, family)
        _name_shards(partial, files)
        partial.rename(output)
    dist.barrier()


def _is_first_of_stage() -> bool:
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def copy_side_files(source: Path, output: Path) -> None:
    """Config, tokenizer, processor and chat template: everything small that is not a weight."""
    for file in source.iterdir():
        is_index = file.name.endswith(".safetensors.index.json")
        if file.suffix in {".json", ".jinja", ".model", ".txt"} and not is_index:
            shutil.copyfile(file, output / file.name)


def adapt_config(file: Path, family: Family, dequantised: bool) -> None:
    """Rewrite config.json where it would be wrong for what is written; otherwise it stays byte for byte."""
    source = json.loads(file.read_text())
    config = family.portable_config(source)
    if dequantised:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    if config != source:
        file.write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]], checkpoint: HFCheckpoint, folder: Path, is_writer: bool
) -> dict[str, list[str]]:
    """File name -> keys of what this rank wrote; ranks that only take part in the gathering write nothing."""
    written: dict[str, list[str]] = {}
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        if pending:
            file = f"rank{dist.get_rank():05d}-{len(written):05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            written[file] = list(pending)
            pending.clear()

    for key, tensor in tensors:
        if is_writer:
            name, dtype, shape = checkpoint.stored(key)
            tensor = tensor.mT if turned(shape, tensor.shape) else tensor
            pending[name] = tensor.to("cpu", dtype).contiguous()
            if sum(t.nbytes for t in pending.values()) >= SHARD_BYTES:
                flush()
    flush()
    return written


def _check_complete(files: dict[str, list[str]], checkpoint: HFCheckpoint, family: Family) -> None:
    exported = [key for keys in files.values() for key in keys]
    expected = {
        stored
        for key, (_, stored) in checkpoint.files.items()
        if not any(matches(ignored, key) for ignored in family.ignored_keys)
    }
    assert len(exported) == len(set(exported)), "an HF key was exported twice"
    assert set(exported) == expected, (
        f"exported and source keys differ: {sorted(set(exported) ^ expected)[:5]}"
    )


def _name_shards(folder: Path, files: dict[str, list[str]]) -> None:
    """Rename to HF's scheme and write the index; a single file needs none."""
    if len(files) == 1:
        (folder / next(iter(files))).rename(folder / WEIGHT_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (file, keys) in enumerate(sorted(files.items()), start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / file).rename(folder / name)
        weight_map |= dict.fromkeys(keys, name)
    size = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
