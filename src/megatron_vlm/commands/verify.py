"""Compares the logits of two checkpoints for a picture, position by position."""

import gc
import io
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin, logging

from megatron_vlm.commands.runs import open_run
from megatron_vlm.config import MISSING, RunConfig
from megatron_vlm.generation.prompt import encode_prompt, processor_outputs
from megatron_vlm.generation.rows import batch_of
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config, load_model, load_processor
from megatron_vlm.models.vlm import in_evaluation
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.parallel import setup
from megatron_vlm.supported import resolve
from megatron_vlm.training.evaluate import logits_of


@dataclass(frozen=True)
class LogitsDifference:
    max_abs: float
    mean_abs: float
    argmax_agreement: float  # fraction of positions at which both have the same most likely token
    positions: int

    def __str__(self) -> str:
        return (
            f"logits at {self.positions} positions: max abs difference {self.max_abs:.3g}, mean "
            f"{self.mean_abs:.3g}; the likeliest token agrees at {self.argmax_agreement:.1%}"
        )


def verify(checked: RunConfig, source: RunConfig, question: str, image: bytes | None) -> LogitsDifference:
    """How far the logits of two models are apart, each a run or an HF checkpoint.

    Both see the same prompt, which the processor and chat template of `source` make from the question and the
    image (None: a generated picture). Both compute in fp32 in this process, one after the other, so that only
    one of them is in memory at a time.
    """
    logging.set_verbosity_error()  # Transformers reports names of tensors as the files have them
    folder = resolve(source.model.hf_path)
    processor = load_processor(folder)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    image = image or picture()
    logits_SV = _logits(checked, processor, turn, image)
    gc.collect()
    return difference(logits_SV, _logits(source, processor, turn, image))


def difference(mine_SV: Tensor, theirs_SV: Tensor) -> LogitsDifference:
    if mine_SV.shape != theirs_SV.shape:
        raise ValueError(
            f"logits {tuple(mine_SV.shape)} and {tuple(theirs_SV.shape)}: not checkpoints of one model"
        )
    gap_SV = (mine_SV - theirs_SV).abs()
    agreement = (mine_SV.argmax(-1) == theirs_SV.argmax(-1)).float().mean()
    return LogitsDifference(gap_SV.max().item(), gap_SV.mean().item(), agreement.item(), len(gap_SV))


def worst_tensors(checked: RunConfig, source: RunConfig, count: int = 3) -> list[str]:
    """The weights that differ most between two HF checkpoints, one a line, the worst first; none of runs."""
    if {checked.run_dir, source.run_dir} != {MISSING}:
        return []
    folders = [resolve(config.model.hf_path) for config in (checked, source)]
    renames = describe(load_config(folders[1])).renames
    checked_weights, source_weights = (HFCheckpoint(folder, renames) for folder in folders)
    gaps = []
    for key in source_weights.files.keys() & checked_weights.files.keys():
        ours = checked_weights.slices(key)[...]
        other = source_weights.slices(key)[...]
        if ours.shape != other.shape:
            shapes = f"{tuple(ours.shape)} and {tuple(other.shape)}"
            gaps.append((float("inf"), f"{key}: {shapes}"))
        elif gap := _largest_gap(ours, other):
            gaps.append((gap, f"{key}: {gap:.3g}"))
    only = [
        f"{key}: only in one of them"
        for key in sorted(source_weights.files.keys() ^ checked_weights.files.keys())
    ]
    return (only + [line for _, line in sorted(gaps, reverse=True)])[:count]


def _largest_gap(logits: Tensor, expected: Tensor) -> float:
    """The largest difference, taken in parts, so that no whole tensor is held in fp32."""
    rows = zip(logits.flatten().split(2**22), expected.flatten().split(2**22), strict=True)
    return max(((a.float() - b.float()).abs().max().item() for a, b in rows), default=0.0)


def picture() -> bytes:
    """A PNG with something in it: rings in one channel, ramps in the others."""
    rings = Image.radial_gradient("L")
    ramp = Image.linear_gradient("L")
    file = io.BytesIO()
    Image.merge("RGB", (rings, ramp, ramp.rotate(90))).resize((320, 240)).save(file, "PNG")
    return file.getvalue()


@torch.no_grad()
def _logits(config: RunConfig, processor: ProcessorMixin, turn: dict, image: bytes) -> Tensor:
    """Logits (S, V): a run's by Megatron, from its latest checkpoint; an HF checkpoint's by Transformers."""
    if config.run_dir == MISSING:
        model = load_model(resolve(config.model.hf_path), torch.float32)
        inputs = processor_outputs(processor, [turn], [image])
        return model(**inputs, use_cache=False).logits[0]
    config.model.dtype = "fp32"
    chunks, source = open_run(config)
    encoded = encode_prompt(processor, [turn], [image], source.needs)
    with in_evaluation(chunks):
        [logits] = logits_of(chunks, [batch_of([encoded])])
    setup.shutdown()
    return logits.cpu()
