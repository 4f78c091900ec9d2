"""A run's data: encoder and loaders of whichever source the configuration names."""

from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

from transformers import ProcessorMixin

from megatron_vlm.batch import DataNeeds
from megatron_vlm.config import DataConfig, RunConfig
from megatron_vlm.data.accounts.drops import DropReport
from megatron_vlm.data.encode.encoder import (
    DocumentEncoder,
    HFEncoderVLMTaskEncoder,
    PackingVLMTaskEncoder,
    VLMTaskEncoder,
)
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.objectives import objective_of

# dataset_type -> class that takes a DataConfig and has `train_loader(...)` and `valid_loader(...)`
PROVIDERS = {
    "energon": "megatron_vlm.data.load.energon:EnergonProvider",
    "hf": "megatron_vlm.data.load.hf:HFProvider",
}


def train_encoder(
    data: DataConfig, processor: ProcessorMixin, needs: DataNeeds, drops: DropReport | None = None
) -> VLMTaskEncoder:
    """The training encoder: of packed rows if the configuration asks for them."""
    encoder = HFEncoderVLMTaskEncoder if data.packing == "none" else PackingVLMTaskEncoder
    return encoder(processor, data, needs, drops)


class RunData:
    """Both loaders of a run on one data-parallel rank, and what they dropped. Validation is never packed.

    The drops of rank R are written to `<run_dir>/drops/rankR.jsonl`.
    """

    @attribute_errors_to("config.data.train_data_path")
    def __init__(
        self, config: RunConfig, processor: ProcessorMixin, needs: DataNeeds, rank: int, world_size: int
    ):
        data = config.data
        self.drops = DropReport(Path(config.run_dir) / "drops" / f"rank{rank}.jsonl", ranks=world_size)
        provider = resolve_name(PROVIDERS[data.dataset_type])(data)
        train = train_encoder(data, processor, needs, self.drops)
        valid = HFEncoderVLMTaskEncoder(processor, data, needs, self.drops)
        for encoder in (train, valid):
            encoder.documents = objective_of(config).sample_encoder(encoder.documents, config)
        reader = {"micro_batch_size": config.train.micro_batch_size, "rank": rank, "world_size": world_size}
        self.patches_of = train.patches_of
        self.documents = train.documents
        # what a user should know before the first step about how samples are encoded
        self.notes = list(_notes(data, train.documents))
        self.train_loader = provider.train_loader(train, seed=config.train.seed, **reader)
        self.valid_loader = provider.valid_loader(valid, **reader)
        # of each loader, what the keys of its samples begin with; none unless it reads several sources
        self.sources = [getattr(loader, "sources", ()) for loader in (self.train_loader, self.valid_loader)]

    def close(self) -> None:
        """End the loaders' workers at once."""
        for loader in (self.train_loader, self.valid_loader):
            if loader is not None:
                loader.close()


def _notes(data: DataConfig, documents: DocumentEncoder) -> Iterator[str]:
    """Yield lines about how samples are encoded that a user should know before the first step."""
    if reason := documents.why_hf_processor:
        yield f"data: the Hugging Face processor encodes every sample, slower: {reason}"
    spec = documents.processing.image_spec
    limits = [f"data.{name}" for name in ("min_pixels", "max_pixels") if getattr(data, name)]
    if limits and spec.makes_one_size:
        name = type(spec.processor).__name__
        yield f"{' and '.join(limits)}: no effect, as {name} makes all images one size; remove it."
