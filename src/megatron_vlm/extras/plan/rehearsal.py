"""A training step of any rank of any layout at real size, in one process without a GPU.

The step is the real one: model, optimizer, streams, schedule. Its device is `meta`, so tensors have shapes
and no numbers, and its collectives go to torch's fake process group. `planning.recorder` counts.
"""

import gc
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_vlm.batch import IGNORE_INDEX, Batch, GenericVisualInputs
from megatron_vlm.config import ConfigError, RunConfig, derived
from megatron_vlm.config_rules.settings import validate
from megatron_vlm.extras.plan.recorder import META, Collective, DeviceWork, Recorder, Seen
from megatron_vlm.extras.plan.shapes_only import shapes_only
from megatron_vlm.models.description import Description
from megatron_vlm.models.language_model import DTYPES
from megatron_vlm.models.opened import build_model
from megatron_vlm.models.work import costs
from megatron_vlm.objectives import objective_of
from megatron_vlm.parallel import cpu, setup
from megatron_vlm.training.gradients import data_parallel
from megatron_vlm.training.losses.tokens import Reports, StepLoss
from megatron_vlm.training.offloaded_adam import offloaded_bytes
from megatron_vlm.training.optimizer import build_optimizer
from megatron_vlm.training.step import train_step


@dataclass(frozen=True)
class Rehearsal:
    """The bytes that one rank holds in a training step, and the numbers of its calls.

    `micro_batch` counts what happens for each micro batch (a mean over those rehearsed), `once` what happens
    once in a step: the reduction of gradients and the optimizer.
    """

    config: RunConfig
    gpus: int
    rank: int
    stage: int
    weights: int
    gradients: int
    optimizer: int
    offloaded: int  # what Adam keeps in the host's memory, which the others do not count
    peak: int
    micro_batches: int  # of a step
    micro_batch: Seen
    once: Seen

    @property
    def activations(self) -> int:
        """The most bytes besides weights, gradients and optimizer state."""
        return self.peak - self.weights - self.gradients - self.optimizer

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[float, float]]:
        """(group, kind) -> (calls, bytes) of a step."""
        totals: dict[tuple[str, str], tuple[float, float]] = {}
        for what, count in self._of_step(Collective):
            calls, nbytes = totals.get((what.group, what.kind), (0, 0))
            totals[what.group, what.kind] = calls + count, nbytes + count * what.nbytes
        return totals

    @property
    def operations(self) -> float:
        return sum(count for _, count in self._of_step(DeviceWork))

    def flops(self, *kinds: str) -> float:
        """The operations of a step of these kinds ("matmul", "attention")."""
        return sum(what.flops * count for what, count in self._of_step(DeviceWork) if what.kind in kinds)

    def _of_step(self, kind: type) -> Iterator[tuple[Any, float]]:
        for seen, times in ((self.micro_batch, self.micro_batches), (self.once, 1)):
            yield from ((what, count * times) for what, count in seen.of(kind).items())


def rehearse(config: RunConfig, description: Description, gpus: int, rank: int = 0) -> Rehearsal:
    """A step of `rank` among `gpus` processes, after one in which the optimizer's state was made.

    Rows are full: one sample each, whose documents are of one length, with `data.visual_share` of the
    tokens in images of `data.max_pixels`, the others trained. Tokens go evenly to all experts. Attention is
    what `auto` means on a GPU. As many micro batches are run as it takes until a pipeline holds the most.

    Raises as `on_shapes` does.
    """
    config = as_on_a_gpu(config)
    with on_shapes(config, description, gpus, rank) as recorder:
        with META:
            chunks = build_model(config, description, META)
        model = data_parallel(chunks, config)
        optimizer, scheduler = build_optimizer(model, config)
        optimizer.step()  # makes its state
        weights = _nbytes(p for chunk in chunks for p in chunk.parameters())
        gradients = _gradients(model)
        gc.collect()
        offloaded = offloaded_bytes(optimizer)
        before_losses = recorder.alive
        step_loss = objective_of(config).step_loss(config, model)
        reference = recorder.alive - before_losses
        count = derived(config, gpus)["micro_batches_per_step"]
        stage = parallel_state.get_pipeline_model_parallel_rank()
        batches = [example_batch(config, description)] * _enough(config, count, stage)
        micro_batch = Seen()
        once = Seen()
        recorder.seen, recorder.peak = micro_batch, recorder.alive
        step_loss = _then_counting(step_loss, recorder, once)
        train_step(model, optimizer, scheduler, batches, step_loss=step_loss)
    for what in [call for call in micro_batch.of(Collective) if call.group == "dp"]:
        once[what] += micro_batch.pop(what)  # gradients of the last micro batch
    return Rehearsal(
        config=config,
        gpus=gpus,
        rank=rank,
        stage=stage,
        weights=weights + reference,
        gradients=gradients,
        optimizer=before_losses - weights - gradients - offloaded,
        offloaded=offloaded,
        peak=recorder.peak - offloaded,
        micro_batches=count,
        micro_batch=Seen({what: number / len(batches) for what, number in micro_batch.items()}),
        once=once,
    )


@contextmanager
def on_shapes(config: RunConfig, description: Description, gpus: int, rank: int) -> Iterator[Recorder]:
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
        setup.pretended(config.parallel, gpus, rank),
        cpu.standing_in(META),
        Recorder() as recorder,
        shapes_only(recorder),
    ):
        setup.seed_all(config.train.seed)
        yield recorder


def as_on_a_gpu(config: RunConfig) -> RunConfig:
    """A copy with what `auto` means on a GPU."""
    config = deepcopy(config)
    config.model.load_weights = True  # so that nothing is drawn at random
    if config.model.attention in ("auto", "cudnn"):  # both kernels hold the same
        config.model.attention = "flash" if config.model.dtype == "bf16" else "dense"
    return config


def _enough(config: RunConfig, count: int, stage: int) -> int:
    """Micro batches after which a stage has held the most that it ever holds, see `plan.forwards_kept`."""
    pp = config.parallel.pp
    vpp = config.parallel.vpp
    return min(count, 2 * pp if vpp > 1 else pp - stage + (pp > 1))


def _then_counting(step_loss: StepLoss, recorder: Recorder, once: Seen) -> StepLoss:
    """The same loss; what happens after its backward passes is counted in `once`."""

    def counted(chunks: list[torch.nn.Module], micro_batches: list[Batch]) -> tuple[Reports, float]:
        reports, weight = step_loss(chunks, micro_batches)
        recorder.seen = once
        return reports, weight

    return counted


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _gradients(model: list[torch.nn.Module]) -> int:
    buffers = itertools.chain.from_iterable(chunk.buffers + chunk.expert_parallel_buffers for chunk in model)
    return _nbytes(buffer.grad_data for buffer in buffers)


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
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
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


def example_row(
    config: RunConfig, description: Description
) -> tuple[torch.Tensor, list[GenericVisualInputs]]:
    """The tokens of a full row, and its images."""
    images, counts = _images(config, description)
    ids_T = torch.full((config.data.seq_length,), _text_token(description.hf_config), dtype=torch.int64)
    start = 1
    for count in counts:  # one after the other, a token of text between them
        ids_T[start : start + count] = description.hf_config.image_token_id
        start += count + 1
    return ids_T, images


def _text_token(hf_config: Any) -> int:
    """A token that stands for nothing else."""
    special = [value for name, value in hf_config.to_dict().items() if name.endswith(("_id", "_index"))]
    return next(token for token in itertools.count() if token not in special)


def _images(config: RunConfig, description: Description) -> tuple[list[GenericVisualInputs], list[int]]:
    """Images that fill `data.visual_share` of a row, as far as whole ones do, and their numbers of tokens.

    All have `data.max_pixels` but the last, which is as large as the rest allows.
    """
    pixels = config.data.max_pixels or costs.DEFAULT_IMAGE

    def image(pixels: float) -> tuple[GenericVisualInputs, int]:
        visual = GenericVisualInputs(**description.blank_image(int(pixels)))
        return visual, sum(description.visual_tokens(visual))

    largest, tokens = image(pixels)
    room = config.data.seq_length - 1  # of which each image takes one token more than it has
    number = min(int(config.data.visual_share * config.data.seq_length) // tokens, room // (tokens + 1))
    rest = int(config.data.visual_share * config.data.seq_length) - number * tokens
    images = [(largest, tokens)] * number
    last, tokens_of_last = image(pixels * rest / tokens)
    if tokens_of_last <= min(rest, room - number * (tokens + 1)):
        images.append((last, tokens_of_last))
    return [visual for visual, _ in images], [count for _, count in images]
