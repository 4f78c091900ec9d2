"""Sizes of the check: real ones on CUDA, small ones elsewhere."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_vlm.models.description import Description
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import as_hf_config
from megatron_vlm.parallel import cpu
from megatron_vlm.recipes.published import CONFIGS

cpu.install()
ON_CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_CUDA else torch.float32  # of kernels' inputs
CARD = "GPU_CHECK_CARD"  # names the card that is hidden from a process
NAME = {torch.bfloat16: "bf16", torch.float32: "fp32"}[DTYPE]


@dataclass(frozen=True)
class About:
    """How the check was started."""

    folder: Path  # of the table
    families: list[str]


@dataclass(frozen=True)
class Sizes:
    """By default for a card of 141 GB. One of 80 GB has no room for the longer row, which says so."""

    rounds: int = 10  # of a timing, after as many as a third of them
    attention_tokens: int = 4096  # compared with dense attention, which stores all scores
    long_tokens: int = 32_768  # only timed
    heads: tuple[int, int] = (32, 8)  # of queries and of keys
    widths: tuple[int, ...] = (64, 72, 80, 96, 112, 128, 192, 256, 512)
    timed_widths: tuple[int, ...] = (64, 72, 80, 128, 256)
    skewed: tuple[int, ...] = (16_384, *(256,) * 60)  # documents of a row that is only timed
    window: int = 1024
    fused_tokens: int = 8192
    fused_width: int = 4096
    patches: int = 16_384
    tower_width: int = 1152
    grouped: tuple[int, int] = (2048, 768)  # width of the model, of an expert
    numbers: int = 2**31  # of the operand of a very large grouped product
    rows: tuple[int, ...] = (8192, 32_768)  # tokens of a packed row
    head_tokens: int = 8192
    delta_documents: tuple[int, ...] = (8192, 4096, 2048, 1024, 700, 323, 1)
    delta_heads: tuple[tuple[int, int], ...] = ((16, 16), (16, 32), (16, 48), (16, 64))  # of Qwen3.5
    delta_channels: int = 128
    depths: tuple[int, int] = (2, 4)  # layers, whose difference shows one
    prompt_tokens: int = 1024
    decoded_tokens: int = 32
    dense: dict[str, Any] = field(default_factory=lambda: {"text": {"num_hidden_layers": 4}, "vision": {}})
    experts: dict[str, Any] = field(default_factory=lambda: {"text": {"num_hidden_layers": 1}, "vision": {}})

    def with_layers(self, layers: int) -> dict[str, Any]:
        """`dense` with so many layers."""
        return self.dense | {"text": self.dense["text"] | {"num_hidden_layers": layers}}


TINY_VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
TINY_VISION |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}
TINY_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
TINY_TEXT |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512}
TINY_TEXT["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
TINY_TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502}
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TINY = Sizes(
    rounds=1,
    attention_tokens=256,
    long_tokens=512,
    heads=(4, 2),
    widths=(64, 112),
    timed_widths=(64,),
    skewed=(128, *(2,) * 60),
    window=32,
    fused_tokens=64,
    fused_width=64,
    patches=64,
    tower_width=32,
    grouped=(64, 32),
    numbers=2**16,
    rows=(1024,),
    depths=(1, 2),
    prompt_tokens=64,
    decoded_tokens=4,
    head_tokens=32,
    delta_documents=(70, 1, 64, 5),
    delta_heads=((2, 6),),
    delta_channels=16,
    dense={"whole": TINY_TOKENS, "text": TINY_TEXT, "vision": TINY_VISION},
    experts={"whole": TINY_TOKENS, "text": TINY_TEXT | TINY_EXPERTS, "vision": TINY_VISION},
)


def sizes() -> Sizes:
    """Real ones on CUDA, and in a process from which the runner hides a card."""
    return Sizes() if ON_CUDA or CARD in os.environ else TINY


def described(name: str, changed: dict[str, Any]) -> Description:
    """A published model with these changes to its config.json."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    for part, values in changed.items():
        (config if part == "whole" else config[f"{part}_config"]).update(values)
    return describe(as_hf_config(config, CONFIGS / name))


def documents_of(tokens: int) -> list[int]:
    """Lengths of the documents of a packed row, from a half of it to a sixteenth."""
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens // 16]
    return [*lengths, tokens - sum(lengths)]
