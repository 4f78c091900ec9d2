"""How many parameters the adapters of a run have on a rank."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from megatron_vlm.config import RunConfig
from megatron_vlm.models.adapters import find_targets, settled
from megatron_vlm.models.families.base import Family

ATTENTION, FEED_FORWARD = "self_attention", "mlp"
VISION = None, None
_PART = re.compile(rf"language_model\.decoder\.layers\.(\d+)\.({ATTENTION}|{FEED_FORWARD})\.")


def adapter_sizes(
    config: RunConfig, family: Family, hf_config: Any
) -> Counter[tuple[int | None, str | None]]:
    """Numbers of parameters on one tensor-parallel rank, by layer of the language model and part of it
    (ATTENTION, FEED_FORWARD); those of tower and projector as VISION."""
    sizes: Counter[tuple[int | None, str | None]] = Counter()
    adapter = settled(config.adapter)
    targets = find_targets(adapter, hf_config, family.weight_map(hf_config)) if adapter.r else []
    for target in targets:
        cut = [target.width, target.out]  # of A, of B
        axis = target.rule.operation.axis
        if axis is not None:
            cut[1 - axis] //= config.parallel.tp
        part = _PART.match(target.weight)
        sizes[(int(part[1]), part[2]) if part else VISION] += target.rank * sum(cut) + target.dora * cut[1]
    return sizes
