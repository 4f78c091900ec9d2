"""A run's data: encoder and loaders of whichever source the configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from transformers import ProcessorMixin

from megatron_vlm.config import RunConfig
from megatron_vlm.data.drops import DropReport
from megatron_vlm.data.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder, PositionIds

# dataset_type -> provider with `from_config(DataConfig)`, `train_loader(...)` and `valid_loader(...)`
PROVIDERS = {
    "energon": "megatron_vlm.data.energon:EnergonProvider",
    "hf": "megatron_vlm.data.hf:HFProvider",
}


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
    ):
        data = config.data
        self.drops = DropReport(Path(config.run_dir) / "drops" / f"rank{rank}.jsonl")
        options = {
            "min_pixels": data.min_pixels,
            "max_pixels": data.max_pixels,
            "over_length": data.over_length,
            "position_ids": position_ids,
            "drops": self.drops,
        }
        encoder = HFEncoderVLMTaskEncoder(processor, data.seq_length, visual_keys, **options)
        packing = None
        if data.packing != "none":
            options["max_patches"] = data.max_patches
            packing = PackingVLMTaskEncoder(processor, data.seq_length, visual_keys, **options)
        module, name = PROVIDERS[data.dataset_type].split(":")
        provider = getattr(import_module(module), name).from_config(data)
        place = {"micro_batch_size": config.train.micro_batch_size, "rank": rank, "world_size": world_size}
        self.train_loader = provider.train_loader(packing or encoder, seed=config.train.seed, **place)
        self.valid_loader = provider.valid_loader(encoder, **place)

    @property
    def dropped(self) -> dict[str, int]:
        """Counts by reason, training and validation together."""
        return self.drops.summary()["reasons"]

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
