"""How many parameters the adapters of a run have on a rank."""

import re
from collections import Counter
from math import prod

from megatron_vlm.config import RunConfig
from megatron_vlm.config_rules.peft_config import settled
from megatron_vlm.models.adapters.targets import find_targets, find_whole
from megatron_vlm.models.description import Description

ATTENTION, FEED_FORWARD, EXPERTS = "self_attention", "mlp", "experts"
_LAYER = re.compile(rf"language_model\.decoder\.layers\.(\d+)\.({ATTENTION}|{FEED_FORWARD})?")
FIRST, LAST = -1, -2  # what comes before the layers, and after them


def saved_sizes(config: RunConfig, description: Description) -> Counter[int | None]:
    """Numbers of parameters on one rank that are trained whole, by layer, or FIRST or LAST; None: the
    parameters of tower and projector."""
    sizes: Counter[int | None] = Counter()
    adapter = settled(config.adapter)
    for weight, saved in find_whole(adapter, description).items():
        layer = _LAYER.match(weight)
        place = LAST if weight.startswith("language_model.") else None
        place = FIRST if ".embedding." in weight and place == LAST else place
        parts = 1 if saved.rule.operation.axis is None else config.parallel.tp
        sizes[int(layer[1]) if layer else place] += sum(map(prod, saved.shapes)) // parts
    return sizes


def adapter_sizes(config: RunConfig, description: Description) -> Counter[tuple[int | None, str | None]]:
    """Numbers of parameters on one rank: by layer of the language model and part of it (ATTENTION,
    FEED_FORWARD, EXPERTS: the routed ones); (None, None): tower and projector."""
    sizes: Counter[tuple[int | None, str | None]] = Counter()
    adapter = settled(config.adapter)
    targets = find_targets(adapter, description) if adapter.r else []
    for target in targets:
        cut = [target.width, target.out]  # of A, of B
        axis = target.rule.operation.axis
        if axis is not None:
            cut[1 - axis] //= config.parallel.tp
        layer = _LAYER.match(target.weight)
        place = (int(layer[1]), EXPERTS if target.experts else layer[2]) if layer else (None, None)
        copies = target.experts // config.parallel.ep or 1
        sizes[place] += copies * target.rank * sum(cut) + target.dora * cut[1]
    return sizes
