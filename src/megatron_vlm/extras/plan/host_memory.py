"""The memory of its host that a rank of a run needs."""

from collections import Counter

from megatron_vlm.config import ParallelConfig, RunConfig
from megatron_vlm.models.language_model import DTYPES
from megatron_vlm.models.work import costs

# Numbers of one rank: "dense" and "experts", apart as other ranks hold the experts' optimizer state, and
# "trained_dense" and "trained_experts" of them
Parameters = Counter[str]


def share(parameters: Parameters, which: str, parallel: ParallelConfig, gpus: int) -> float:
    """The parameters, all ("") or those that are "trained_", divided by the ranks that hold them."""
    dense = parameters[f"{which}dense"] / (gpus // (parallel.tp * parallel.pp))
    return dense + parameters[f"{which}experts"] / (gpus // (parallel.pp * parallel.ep))


def host_memory(
    config: RunConfig, parameters: Parameters, image: costs.ImageCost, gpus: int, has_tower: bool
) -> dict[str, float]:
    """Bytes besides programs and data workers, by what they are for: the part of a checkpoint that the rank
    writes, and uint8 pixels of the step that is trained and of the next."""
    value = DTYPES[config.model.dtype].itemsize
    weights = share(parameters, "trained_" if config.adapter.used else "", config.parallel, gpus)
    rows = has_tower * config.train.global_batch_size * config.parallel.model_size / gpus
    return {
        "its part of a checkpoint": value * weights
        + 12 * share(parameters, "trained_", config.parallel, gpus),
        "pixels": 2 * rows * costs.images_per_row(config, image) * image.pixel_bytes / value,
    }
