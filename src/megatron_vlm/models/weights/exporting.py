"""Exports Hugging Face weights: gathers one weight at a time; each pipeline stage writes its own files."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch import distributed as dist
from transformers import CONFIG_MAPPING

from megatron_vlm.config import ConfigError
from megatron_vlm.files import atomic_write, copy_file, read_text
from megatron_vlm.job import watchdog
from megatron_vlm.models.weights.files import HFCheckpoint, SafetensorsFile, name_shards, split
from megatron_vlm.models.weights.rules import (
    EXPERT,
    Rule,
    WeightMap,
    experts_per_rank,
    find_rule,
    is_transposed,
    named_global_weights,
)
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.setup import atomic_directory, on_first_rank
from megatron_vlm.supported import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
SHARD_BYTES = 2**30  # export starts a new file after this much
Named = tuple[str, Tensor]
ExportedWeight = tuple[list[str], Tensor, Rule]  # names, value, rule


@dataclass(frozen=True)
class TensorPiece:
    """A whole HF tensor, or one `row` of the `rows` fused in it."""

    key: str
    tensor: Tensor
    row: int | None
    rows: int | None


def hf_tensors(
    chunks: list[MegatronModule],
    rules: list[Rule],
    files: Collection[str] = (),
    value: Callable[[Tensor], Tensor | None] = torch.detach,
) -> Iterator[tuple[str, Tensor]]:
    """(hub key, whole tensor) of this pipeline stage on every rank, one weight gathered at a time.

    A collective over the tensor-parallel and the expert-parallel group: every rank of the stage iterates to
    the end. If there are several layouts, the one in `files` is made, else the rules' first. `value` chooses
    what is exported for a weight (the tests export gradients); None: nothing.
    """
    fused: dict[str, dict[int, Tensor]] = {}
    for piece in hf_pieces(_exported(chunks, rules, files, value)):
        if piece.row is None:
            yield piece.key, piece.tensor
            continue
        rows = fused.setdefault(piece.key, {})
        rows[piece.row] = piece.tensor
        if len(rows) == piece.rows:
            yield piece.key, torch.stack([rows[i] for i in range(piece.rows)])
            del fused[piece.key]


def hf_pieces(exported: Iterable[ExportedWeight], writer: int | None = None) -> Iterator[TensorPiece]:
    """Gives `hf_tensors` before rows are joined. With a `writer`, only this rank has what is cut."""
    for names, local, rule in exported:
        watchdog.beat()
        if EXPERT.search(names[0]):
            experts = gather(local, parallel_state.get_expert_model_parallel_group(), writer)
            shards_of_names = [[expert] for expert in experts]
        elif rule.operation.axis is None:
            shards_of_names = [[local]]
        else:
            shards_of_names = [gather(local, parallel_state.get_tensor_model_parallel_group(), writer)]
        for name, shards in zip(names, filter(None, shards_of_names), strict=False):
            for key, tensor in zip(rule.hf_names(name), rule.operation.join(shards), strict=True):
                yield TensorPiece(key, tensor, rule.row(name), rule.rows)


def _exported(
    chunks: list[MegatronModule],
    rules: list[Rule],
    files: Collection[str],
    value: Callable[[Tensor], Tensor | None],
) -> Iterator[ExportedWeight]:
    """The weights that this rank exports. An expert comes with the names of the experts that all
    expert-parallel ranks hold in its place, in their order."""
    for chunk in chunks:
        local_experts, ranks = experts_per_rank(chunk.config), range(chunk.config.expert_model_parallel_size)
        for name, local in named_global_weights(chunk, value):
            rule, _ = find_rule(rules, name, files)
            names = [name]
            if expert := EXPERT.search(name):
                names = [
                    EXPERT.sub(str(rank * local_experts + int(expert[0]) % local_experts), name)
                    for rank in ranks
                ]
            if rule.export:
                yield names, local, rule


def gather(local: Tensor, group: dist.ProcessGroup, writer: int | None = None) -> list[Tensor]:
    """The group's tensors on every rank of it; with a `writer`, on this rank alone: only its group sends."""
    if writer is not None and writer not in dist.get_process_group_ranks(group):
        return []
    if group.size() == 1:
        return [local]
    shards = []
    if writer in (None, dist.get_rank()):
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
    if writer is None:
        dist.all_gather(shards, local.contiguous(), group=group)
    else:
        dist.gather(local.contiguous(), shards or None, dst=writer, group=group)
    return shards


def export_hf(
    chunks: list[MegatronModule],
    output: str | Path,
    source: str | Path,
    weight_map: WeightMap,
    chat_template: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    card: str | None = None,
) -> None:
    """Write the model as an HF folder: weights named and typed as in `source`, its other files copied, with
    the `chat_template` in place of the source's, and the model `card` as README.md.

    From an FP8 source, weights are written in the config's dtype, without scales and quantization_config.

    Collective over all ranks, which must share the file system. One rank of each pipeline stage writes its
    files while it gathers, weight by weight; `output` appears when everything is written. Raises
    FileExistsError if it exists.
    """
    checkpoint = HFCheckpoint(source, weight_map.renames)
    with atomic_directory(output) as aside:
        # the small files first; then each stage writes its weights, and rank 0 names all files
        on_first_rank(copy_side_files, checkpoint.folder, aside)
        on_first_rank(write_texts, aside, chat_template, card)
        on_first_rank(adapt_config, aside / CONFIG_FILE, weight_map, checkpoint.is_fp8)
        stage_files = _write_stage(chunks, weight_map, checkpoint, aside, shard_bytes)
        stages = setup.from_all_ranks(stage_files)
        if dist.get_rank() == 0:
            files = {file: keys for stage in stages for file, keys in stage.items()}
            _check_complete(files, checkpoint)
            name_shards(aside, files)


def copy_side_files(source: Path, output: Path, leave_out: Collection[str] = ()) -> None:
    """Copies config, tokenizer, processor and chat template: everything small that is not a weight.

    Links are followed within the folder and to where config.json's own file lies, as in the hub's cache or in
    a folder of links to another. Raises ConfigError for one that leads elsewhere: exports are published.
    """
    homes = {source.resolve(), (source / CONFIG_FILE).resolve().parent}
    for file in source.iterdir():
        is_index = file.name.endswith(".safetensors.index.json")
        if (
            file.suffix in {".json", ".jinja", ".model", ".txt"}
            and file.name not in leave_out
            and not is_index
        ):
            if not homes & {*file.resolve().parents}:
                raise ConfigError(
                    f"{file} leads out of its folder, to {file.resolve()}; put a copy "
                    "of that file there, or remove the link."
                )
            copy_file(file, output / file.name)


def write_texts(folder: Path, chat_template: str | None, card: str | None) -> None:
    """Write the model card and the only chat template of a folder, unless they are None."""
    if card is not None:
        atomic_write(folder / "README.md", card)
    if chat_template is None:
        return
    atomic_write(folder / TEMPLATE_FILE, chat_template)
    # Transformers prefers these two to the file
    (folder / "chat_template.json").unlink(missing_ok=True)
    file = folder / "processor_config.json"
    if file.is_file() and "chat_template" in (config := json.loads(read_text(file))):
        del config["chat_template"]
        atomic_write(file, json.dumps(config, indent=2) + "\n")


def adapt_config(file: Path, weight_map: WeightMap, dequantised: bool) -> None:
    """Rewrite config.json if it would be wrong for what is written; otherwise it stays byte for byte.

    It then says whether the output layer is its own: other readers do not look at the weights to find out.
    """
    text = read_text(file)
    source = json.loads(text)
    config = dict(source)
    if dequantised:
        config.pop("quantization_config", None)
    read = CONFIG_MAPPING[source["model_type"]].from_dict(json.loads(text))
    if not weight_map.tied and read.tie_word_embeddings:
        config["tie_word_embeddings"] = False
    if config != source:
        atomic_write(file, json.dumps(config, indent=2) + "\n")


def _write_stage(
    chunks: list[MegatronModule],
    weight_map: WeightMap,
    checkpoint: HFCheckpoint,
    folder: Path,
    shard_bytes: int,
) -> dict[str, list[str]]:
    """File name -> names of the tensors that this rank wrote; only the writer of a stage writes any, and the
    first stage's what the source has besides the model."""
    # the stage's first rank: in Megatron's order, a stage's ranks follow one another
    ranks_of_stage = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    writer = dist.get_rank() // ranks_of_stage * ranks_of_stage
    weights = list(_exported(chunks, weight_map.rules, checkpoint.files, torch.detach))
    pieces = hf_pieces(weights, writer)
    if dist.get_rank() != writer:
        for _ in pieces:  # only to take part in the gathering
            pass
        return {}
    keys = dict.fromkeys(key for names, _, rule in weights for name in names for key in rule.hf_names(name))
    if missing := [key for key in keys if key not in checkpoint.files]:
        raise ValueError(
            f"{checkpoint.folder}: lacks {len(missing)} tensors of the model, such as {missing[0]!r}; the "
            "source is not what it was when the run began: set model.hf_path to the checkpoint that it was."
        )
    carried = [key for key in checkpoint.files if weight_map.carries(key)] if writer == 0 else []
    stored = {key: checkpoint.stored(key) for key in (*keys, *carried)}
    files = [
        SafetensorsFile(folder / f"rank{writer:05d}-{number:05d}.safetensors", tensors)
        for number, tensors in enumerate(split(stored.values(), shard_bytes))
    ]
    file_of = {name: file for file in files for name in file.names}
    for piece in pieces:
        name, shape = stored[piece.key].name, stored[piece.key].shape
        is_turned = is_transposed(shape[piece.row is not None :], piece.tensor.shape)
        file_of[name].write(name, piece.tensor.mT if is_turned else piece.tensor, piece.row)
    for key in carried:
        name, dtype = stored[key].name, stored[key].dtype
        file_of[name].write(name, checkpoint.slices(key)[...].to(dtype), None)
    for file in files:
        file.close()
        watchdog.beat()
    return {file.path.name: file.names for file in files}


def _check_complete(files: dict[str, list[str]], checkpoint: HFCheckpoint) -> None:
    exported = [key for keys in files.values() for key in keys]
    expected = {tensor.key for tensor in checkpoint.files.values()}
    assert len(exported) == len(set(exported)), "an HF key was exported twice"
    assert set(exported) == expected, (
        f"exported and source keys differ: {sorted(set(exported) ^ expected)[:5]}"
    )


# --- one weight after another, for an inference engine ----------------------------------------------------


def hf_weights(
    chunks: list[MegatronModule],
    source: str | Path,
    weight_map: WeightMap,
    value: Callable[[Tensor], Tensor | None] = torch.detach,
) -> Iterator[Named]:
    """(name, whole tensor) of every weight, stage after stage, on every rank: names, dtypes and layouts are
    as in the files in `source`, as an export has them. Fused experts come as one tensor.

    Collective over all ranks, which all iterate to the end. One weight is held at a time. `value` is as for
    `hf_tensors`.
    """
    checkpoint = HFCheckpoint(source, weight_map.renames)

    def as_stored(key: str, tensor: Tensor) -> Named:
        stored = checkpoint.stored(key)
        tensor = tensor.mT if is_transposed(stored.shape, tensor.shape) else tensor.reshape(stored.shape)
        return stored.name, tensor.to(stored.dtype)

    of_stage = hf_tensors(chunks, weight_map.rules, checkpoint.files, value)
    return from_every_stage(as_stored(key, tensor) for key, tensor in of_stage)


def from_every_stage(stage_weights: Iterable[Named]) -> Iterator[Named]:
    """Yields what each pipeline stage has, one after another, on every rank's device. `own` may be a
    collective of its stage."""
    group, rank = parallel_state.get_pipeline_model_parallel_group(), dist.get_rank()
    for sender in dist.get_process_group_ranks(group):
        weights = iter(stage_weights) if sender == rank else iter(())
        while weight := _sent(next(weights, None), sender, group):
            yield weight


def _sent(weight: Named | None, sender: int, group: dist.ProcessGroup) -> Named | None:
    """The sender's weight on every rank of the group; None after its last."""
    if group.size() == 1:
        return weight and (weight[0], weight[1].contiguous())
    header = [weight and (weight[0], weight[1].shape, weight[1].dtype)]
    dist.broadcast_object_list(header, src=sender, group=group)
    if header[0] is None:
        return None
    name, shape, dtype = header[0]
    tensor = weight[1].contiguous() if weight else torch.empty(shape, dtype=dtype, device=setup.device())
    dist.broadcast(tensor, src=sender, group=group)
    return name, tensor
