"""A training step of any rank of any layout at real size, in one process without a GPU.

The step is the real one: model, optimizer, streams, schedule. Its device is `meta`, so tensors have shapes
and no numbers, and its collectives go to torch's fake process group. `recorder` counts.
"""

import gc
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import adam

from megatron_vlm.batch import IGNORE_INDEX, Batch, GenericVisualInputs
from megatron_vlm.config import ConfigError, RunConfig, derived
from megatron_vlm.extras.plan.recorder import META, Collective, Recorder
from megatron_vlm.models import costs
from megatron_vlm.models.description import Description
from megatron_vlm.models.language_model import DTYPES
from megatron_vlm.models.layers.fused import Fused
from megatron_vlm.models.opened import build_model
from megatron_vlm.models.vlm import VLMModel
from megatron_vlm.objectives import objective_of
from megatron_vlm.parallel import cpu, setup
from megatron_vlm.training.losses import Reports
from megatron_vlm.training.optimizer import build_optimizer, offloaded_bytes
from megatron_vlm.training.step import data_parallel, train_step
from megatron_vlm.validate import validate

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Rehearsal:
    """The bytes that one rank holds in a training step, and what it exchanges."""

    rank: int
    stage: int
    weights: int
    gradients: int
    optimizer: int
    offloaded: int  # what Adam keeps in the host's memory, which the others do not count
    peak: int
    collectives: Counter[Collective]  # of a step

    @property
    def activations(self) -> int:
        """The most bytes besides weights, gradients and optimizer state."""
        return self.peak - self.weights - self.gradients - self.optimizer

    def exchanged(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Return (calls, bytes) of a step by (group, kind)."""
        totals: dict[tuple[str, str], tuple[float, float]] = {}
        for call, number in self.collectives.items():
            calls, nbytes = totals.get((call.group, call.kind), (0, 0))
            totals[call.group, call.kind] = calls + number, nbytes + number * call.nbytes
        return totals


def rehearse(config: RunConfig, description: Description, gpus: int, rank: int = 0) -> Rehearsal:
    """A step of `rank` among `gpus` processes, after one in which the optimizer's state was made.

    Rows are full: one sample each, whose documents are of one length, with `data.visual_share` of the
    tokens in images of `data.max_pixels`, the others trained. Tokens go evenly to all experts. Attention is
    what `auto` means on a GPU. As many micro batches are run as it takes until a pipeline holds the most.

    Raises as `on_shapes` does.
    """
    config = as_on_a_gpu(config)
    with on_shapes(config, description, gpus, rank) as recorder:
        chunks = model_on_shapes(config, description)
        model = data_parallel(chunks, config)
        optimizer, scheduler = build_optimizer(model, config)
        optimizer.step()  # makes its state
        weights = _nbytes(p for chunk in chunks for p in chunk.parameters())
        buffers = [b for chunk in model for b in chunk.buffers + chunk.expert_parallel_buffers]
        gradients = _nbytes(buffer.grad_data for buffer in buffers)
        gc.collect()
        offloaded = offloaded_bytes(optimizer)
        before_losses = recorder.alive
        step_loss = objective_of(config).step_loss(config, model)
        reference = recorder.alive - before_losses
        count = derived(config, gpus)["micro_batches_per_step"]
        stage = setup.parallel_state.get_pipeline_model_parallel_rank()
        # so many that the stage has held the most that it ever holds, see `plan.forwards_kept`
        pp = config.parallel.pp
        enough = min(count, 2 * pp if config.parallel.vpp > 1 else pp - stage + (pp > 1))
        batches = [example_batch(config, description)] * enough
        micro_batch: Counter[Collective] = Counter()
        once: Counter[Collective] = Counter()
        recorder.seen, recorder.peak = micro_batch, recorder.alive

        def loss_then_once(*arguments: Any) -> tuple[Reports, float]:
            reports_and_weight = step_loss(*arguments)
            recorder.seen = once  # what comes after the backward passes comes once a step
            return reports_and_weight

        train_step(model, optimizer, scheduler, batches, step_loss=loss_then_once)
    for call, number in micro_batch.items():
        # gradients are reduced in the last micro batch alone
        once[call] += number if call.group == "dp" else number / len(batches) * count
    return Rehearsal(
        rank=rank,
        stage=stage,
        weights=weights + reference,
        gradients=gradients,
        optimizer=before_losses - weights - gradients - offloaded,
        offloaded=offloaded,
        peak=recorder.peak - offloaded,
        collectives=once,
    )


@contextmanager
def on_shapes(
    config: RunConfig, description: Description, gpus: int, rank: int, kind: type[Recorder] = Recorder
) -> Iterator[Recorder]:
    """Inside, this process is `rank` among `gpus` processes, whose device is `meta`.

    Raises ConfigError or ValueError if the layout does not divide GPUs or model. Not for a process that sees
    CUDA: there Megatron would use it.
    """
    validate(config, gpus)
    if not 0 <= rank < gpus:
        raise ConfigError(f"rehearsal: rank {rank} is not one of {gpus} GPUs; give one from 0 to {gpus - 1}.")
    if torch.cuda.is_available():
        raise ValueError("rehearsal: this process sees a GPU; start it with CUDA_VISIBLE_DEVICES= (empty).")
    with (
        setup.pretend_rank(config.parallel, gpus, rank),
        cpu.stand_in(META),
        kind() as recorder,
        shapes_only(),
    ):
        setup.seed_all(config.train.seed)
        yield recorder


def model_on_shapes(config: RunConfig, description: Description) -> list[VLMModel]:
    """Return this rank's model chunks."""
    with META:
        return build_model(config, description, META)


def as_on_a_gpu(config: RunConfig) -> RunConfig:
    """A copy with what `auto` means on a GPU."""
    config = deepcopy(config)
    config.model.load_weights = True  # so that nothing is drawn at random
    if config.model.attention in ("auto", "cudnn", "flash4"):  # all kernels hold the same
        config.model.attention = "flash" if config.model.dtype == "bf16" else "dense"
    return config


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


# --- what torch does on shapes -----------------------------------------------------------------------------


@contextmanager
def shapes_only() -> Iterator[None]:
    """Let functions of torch that know nothing of `meta` do there as on a GPU.

    Attention is one kernel and does not store all scores; dropout is one and stores a byte for each number;
    fused functions are called as where they are compiled; a tensor is made on the host and copied, also from
    numbers of the device; Adam may be fused; memory can be pinned. Objects that ranks exchange are all this
    rank's own.
    """
    changed = (
        *((functional, name) for name in ("scaled_dot_product_attention", "dropout")),
        *((torch, "tensor"), (torch.Tensor, "pin_memory"), (adam, "_device_dtype_check_for_fused")),
        *((dist, name) for name in ("all_gather_object", "broadcast_object_list")),
        *((Fused, name) for name in ("compiles_on", "compiled")),
    )
    # all of these are put back at the end, whatever happens
    before = [getattr_static(owner, name) for owner, name in changed]
    on_host = torch.tensor

    def copied(data: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None:
            return on_host(_numbers(data), **options)
        return on_host(_numbers(data), device="cpu", **options).to(META if device == "cuda" else device)

    functional.scaled_dot_product_attention = _one_kernel
    functional.dropout = _dropped
    torch.tensor = copied
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    adam._device_dtype_check_for_fused = lambda *_, **__: None
    Fused.compiles_on = "meta"
    Fused.compiled = property(lambda function: function.written)
    dist.all_gather_object = _gathered
    dist.broadcast_object_list = lambda *_, **__: None
    try:
        yield
    finally:
        for (owner, name), value in zip(changed, before, strict=True):
            setattr(owner, name, value)


def _one_kernel(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_) -> Tensor:
    return KERNEL(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, training)[0] if training and p else x


def _numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers(item) for item in data]
    return data.item() if isinstance(data, Tensor) and data.is_meta else data


def _gathered(values: list, value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)


# --- a micro batch ---------------------------------------------------------------------------------------


def example_batch(config: RunConfig, description: Description) -> Batch:
    """Full rows of one document each, with images, as `rehearse` says; pixels in pinned memory, and ready."""
    rows = config.train.micro_batch_size
    length = config.data.seq_length
    ids_T, images = example_row(config, description)
    positions = description.position_ids(ids_T, GenericVisualInputs.cat(images))
    labels_T = torch.where(ids_T == description.hf_config.image_token_id, IGNORE_INDEX, ids_T)
    documents = objective_of(config).documents
    documents_T = (torch.arange(length) // (length // documents)).clamp(max=documents - 1).int() + 1
    labels_T[:-1][documents_T.diff() > 0] = IGNORE_INDEX  # no document is trained to predict the next
    first = setup.parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    visual = GenericVisualInputs.cat(images * rows) if first else None
    if visual is not None:
        dtype = DTYPES[config.model.dtype]
        visual = visual.map_pixels(lambda pixels: pixels.to(dtype).pin_memory())
    return {
        "input_ids": ids_T.repeat(rows, 1),
        "labels": labels_T.repeat(rows, 1),
        "loss_mask": (labels_T != IGNORE_INDEX).float().repeat(rows, 1),
        "position_ids": positions[..., None, :].expand(*positions.shape[:-1], rows, length),
        "attention_mask": documents_T.repeat(rows, 1),
        "visual_inputs": visual,
        "__key__": [[] for _ in range(rows)],
        "__restore_key__": None,
    }


def example_row(config: RunConfig, description: Description) -> tuple[Tensor, list[GenericVisualInputs]]:
    """The tokens of a full row, and its images, which fill `data.visual_share` of it as far as whole ones do.

    All have `data.max_pixels` but the last, which is as large as the rest allows.
    """
    length = config.data.seq_length
    pixels = config.data.max_pixels or costs.DEFAULT_IMAGE

    def image(pixels: float) -> tuple[GenericVisualInputs, int]:
        visual = GenericVisualInputs(**description.blank_image(int(pixels)))
        return visual, sum(description.visual_tokens(visual))

    # each image takes one token more than it has: they follow each other, a token of text between them
    largest, tokens = image(pixels)
    room = length - 1
    visual_tokens = int(config.data.visual_share * length)
    number = min(visual_tokens // tokens, room // (tokens + 1))
    images = [(largest, tokens)] * number
    remaining_tokens = visual_tokens - number * tokens
    last, tokens_of_last = image(pixels * remaining_tokens / tokens)
    if tokens_of_last <= min(remaining_tokens, room - number * (tokens + 1)):
        images.append((last, tokens_of_last))
    # all other tokens are text that stands for nothing else
    settings = description.hf_config.to_dict()
    special = [value for name, value in settings.items() if name.endswith(("_id", "_index"))]
    text_token = next(token for token in itertools.count() if token not in special)
    ids_T = torch.full((length,), text_token, dtype=torch.int64)
    start = 1
    for _, count in images:
        ids_T[start : start + count] = description.hf_config.image_token_id
        start += count + 1
    return ids_T, [visual for visual, _ in images]
