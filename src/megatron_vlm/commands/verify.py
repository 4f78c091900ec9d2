"""Compares the logits of two checkpoints for a picture, position by position."""

from __future__ import annotations

import gc
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.commands.runs import open_run
from megatron_vlm.config import RunConfig
from megatron_vlm.data.generation_prompt import encode_prompt, processor_outputs
from megatron_vlm.generation.rows import batch_of
from megatron_vlm.models.families import family_for
from megatron_vlm.models.hf import load_config, load_model, load_processor
from megatron_vlm.models.weights import HFCheckpoint
from megatron_vlm.parallel import setup
from megatron_vlm.supported import CONFIG_FILE, refuse, resolve
from megatron_vlm.training.logits import logits_of


@dataclass(frozen=True)
class Difference:
    max_abs: float
    mean_abs: float
    argmax_agreement: float  # fraction of positions at which both have the same most likely token
    positions: int

    def __str__(self) -> str:
        return (
            f"logits at {self.positions} positions: max abs difference {self.max_abs:.3g}, mean "
            f"{self.mean_abs:.3g}; the likeliest token agrees at {self.argmax_agreement:.1%}"
        )


@dataclass(frozen=True)
class Question:
    processor: ProcessorMixin
    messages: list[dict]
    images: list[bytes]


def verify(checked: RunConfig | str, source: str, question: str, image: bytes | None) -> Difference:
    """How far the logits of `checked`, a run or an HF checkpoint, are from those of the checkpoint `source`.

    Both see the same prompt, which the processor and chat template of `source` make from the question and the
    image (None: a generated picture). Both compute in fp32 in this process, one after the other, so that only
    one of them is in memory at a time.
    """
    folder = _folder(source)
    processor = _processor(folder)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    prompt = Question(processor, [turn], [image or picture()])
    if isinstance(checked, RunConfig):
        logits_SV = _logits_of_run(checked, prompt)
    else:
        logits_SV = _logits_of_folder(_folder(checked), prompt)
    gc.collect()
    return difference(logits_SV, _logits_of_folder(folder, prompt))


def difference(mine_SV: Tensor, theirs_SV: Tensor) -> Difference:
    if mine_SV.shape != theirs_SV.shape:
        raise ValueError(
            f"logits {tuple(mine_SV.shape)} and {tuple(theirs_SV.shape)}: not checkpoints of one model"
        )
    gap_SV = (mine_SV - theirs_SV).abs()
    agreement = (mine_SV.argmax(-1) == theirs_SV.argmax(-1)).float().mean()
    return Difference(gap_SV.max().item(), gap_SV.mean().item(), agreement.item(), len(gap_SV))


def worst_tensors(checked: str, source: str, count: int = 3) -> list[str]:
    """The weights that differ most between two HF checkpoints, one line each, the worst first."""
    folders = [resolve(path) for path in (checked, source)]
    renames = family_for(load_config(folders[1])).renames
    mine, theirs = (HFCheckpoint(folder, renames) for folder in folders)
    gaps = []
    for key in theirs.files.keys() & mine.files.keys():
        values = [checkpoint.slices(key)[...] for checkpoint in (mine, theirs)]
        if values[0].shape != values[1].shape:
            gaps.append((float("inf"), f"{key}: {tuple(values[0].shape)} and {tuple(values[1].shape)}"))
        elif gap := _largest_gap(*values):
            gaps.append((gap, f"{key}: {gap:.3g}"))
    only = [f"{key}: only in one of them" for key in sorted(theirs.files.keys() ^ mine.files.keys())]
    return (only + [line for _, line in sorted(gaps, reverse=True)])[:count]


def _largest_gap(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, taken in parts, so that no whole tensor is held in fp32."""
    rows = zip(mine.flatten().split(2**22), theirs.flatten().split(2**22), strict=True)
    return max(((a.float() - b.float()).abs().max().item() for a, b in rows), default=0.0)


def _folder(path: str) -> Path:
    folder = resolve(path)
    if not (folder / CONFIG_FILE).exists():
        raise FileNotFoundError(
            f"{folder}: neither {CONFIG_FILE} of a checkpoint nor config.yaml of a run; give one of these"
        )
    refuse(folder)
    return folder


def _processor(folder: Path) -> ProcessorMixin:
    processor = load_processor(folder)
    if not getattr(processor, "chat_template", None):
        raise FileNotFoundError(f"{folder}: no chat template; put chat_template.jinja there")
    return processor


def picture() -> bytes:
    """A PNG with something in it: rings in one channel, ramps in the others."""
    rings, ramp = Image.radial_gradient("L"), Image.linear_gradient("L")
    file = io.BytesIO()
    Image.merge("RGB", (rings, ramp, ramp.rotate(90))).resize((320, 240)).save(file, "PNG")
    return file.getvalue()


@torch.no_grad()
def _logits_of_folder(folder: Path, prompt: Question) -> Tensor:
    """Logits (S, V) by Transformers."""
    model = load_model(folder, torch.float32)
    inputs = processor_outputs(prompt.processor, prompt.messages, prompt.images)
    return model(**inputs, use_cache=False).logits[0]


@torch.no_grad()
def _logits_of_run(config: RunConfig, prompt: Question) -> Tensor:
    """Logits (S, V) by Megatron, from the run's latest checkpoint."""
    config.model.dtype = "fp32"
    run = open_run(config)
    for chunk in run.chunks:
        chunk.eval()
    encoded = encode_prompt(prompt.processor, prompt.messages, prompt.images, run.source.needs)
    [logits] = logits_of(run.chunks, [batch_of([encoded])])
    setup.shutdown()
    return logits.cpu()
