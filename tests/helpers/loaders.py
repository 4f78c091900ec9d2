"""Training loaders as a run opens them, over datasets of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor

from megatron_vlm.batch import Batch
from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.models.families import load

PROVIDERS = {"hf": HFProvider, "energon": EnergonProvider}


def encoder_of(processor: Any, seq_length: int, packing: str = "none") -> HFEncoderVLMTaskEncoder:
    """The encoder that a run with this packing has."""
    encoder = HFEncoderVLMTaskEncoder if packing == "none" else PackingVLMTaskEncoder
    return encoder(processor, DataConfig(seq_length=seq_length))


def open_loader(
    kind: str,
    path: Path | str | list[str],
    encoder: HFEncoderVLMTaskEncoder,
    *,
    seed: int,
    batch: int = 1,
    rank: int = 0,
    world_size: int = 1,
    **settings: Any,
) -> Any:
    """The training loader of a rank; `kind` is one of `PROVIDERS`, `settings` are fields of DataConfig."""
    data = DataConfig(train_data_path=path if isinstance(path, list) else str(path), **settings)
    return PROVIDERS[kind](data).train_loader(
        encoder, micro_batch_size=batch, rank=rank, world_size=world_size, seed=seed
    )


def content(batch: Batch) -> list:
    """The keys, tokens and pixels of a batch, to compare with those of another."""
    visual = batch["visual_inputs"]
    pixels = None if visual is None else visual.pixel_values.numpy().tobytes()
    tokens = [batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")]
    return [batch["__key__"], *tokens, pixels]


def take(loader: Any, count: int) -> list[list]:
    return [content(next(loader)) for _ in range(count)]


def arguments_of(name, path):
    return {
        "processor": AutoProcessor.from_pretrained(path),
        "needs": load(name)(AutoConfig.from_pretrained(path)).data_needs,
    }
