"""A run's data: encoder and loaders of whichever source the configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import ProcessorMixin

from megatron_vlm.config import DataConfig, RunConfig
from megatron_vlm.data.drops import DropReport
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PositionIds
from megatron_vlm.data.encode.packed import PackingVLMTaskEncoder

# dataset_type -> provider with `from_config(DataConfig)`, `train_loader(...)` and `valid_loader(...)`
PROVIDERS = {
    "energon": "megatron_vlm.data.load.energon:EnergonProvider",
    "hf": "megatron_vlm.data.load.hf:HFProvider",
}


def plain_encoder(data: DataConfig, processor: ProcessorMixin, **parts: Any) -> HFEncoderVLMTaskEncoder:
    """Of one document a row; `parts` are further arguments of the encoder."""
    return HFEncoderVLMTaskEncoder(processor, **_encoder_settings(data), **parts)


def train_encoder(data: DataConfig, processor: ProcessorMixin, **parts: Any) -> HFEncoderVLMTaskEncoder:
    """As `plain_encoder`, for packed rows if the configuration asks for them."""
    if data.packing == "none":
        return plain_encoder(data, processor, **parts)
    settings = _encoder_settings(data) | {"max_patches": data.max_patches}
    return PackingVLMTaskEncoder(processor, **settings, **parts)


def _encoder_settings(data: DataConfig) -> dict[str, Any]:
    names = ("seq_length", "min_pixels", "max_pixels", "over_length")
    names += ("video_fps", "video_max_frames", "video_max_pixels", "decode_seconds")
    return {name: getattr(data, name) for name in names}


class RunData:
    """Both loaders of a run on one data-parallel rank, and what they dropped. Validation is never packed.

    The drops of rank R are written to `<run_dir>/drops/rankR.jsonl`.
    """

    def __init__(
        self,
        config: RunConfig,
        processor: ProcessorMixin,
        visual_keys: tuple[str, ...],
        position_ids: PositionIds | None,
        rank: int,
        world_size: int,
        *,
        images_or_videos: bool = False,
    ):
        data = config.data
        self.drops = DropReport(Path(config.run_dir) / "drops" / f"rank{rank}.jsonl", ranks=world_size)
        parts = {"visual_keys": visual_keys, "position_ids": position_ids, "drops": self.drops}
        parts |= {"images_or_videos": images_or_videos}
        module, name = PROVIDERS[data.dataset_type].split(":")
        provider = getattr(import_module(module), name).from_config(data)
        place = {"micro_batch_size": config.train.micro_batch_size, "rank": rank, "world_size": world_size}
        train, valid = train_encoder(data, processor, **parts), plain_encoder(data, processor, **parts)
        self.patches_of = train.patches_of
        # why samples are encoded by the HF processor; None: they are not
        self.why_hf_processor = train.why_hf_processor
        self.train_loader = provider.train_loader(train, seed=config.train.seed, **place)
        self.valid_loader = provider.valid_loader(valid, **place)

    @property
    def dropped(self) -> dict[str, int]:
        """Counts of this rank by reason, training and validation together."""
        return self.drops.summary()["reasons"]

    @property
    def dropped_everywhere(self) -> int:
        """Of all ranks, as of the last step."""
        return self.drops.on_all_ranks()[1]

    def train_batches(self) -> Iterator[dict]:
        return iter(self.train_loader)

    def valid_batches(self) -> Iterator[dict]:
        """One pass over the validation split; empty when there is none."""
        return iter(self.valid_loader or ())

    def close(self) -> None:
        """End the loaders' workers at once."""
        for loader in (self.train_loader, self.valid_loader):
            if loader is not None:
                loader.close()
