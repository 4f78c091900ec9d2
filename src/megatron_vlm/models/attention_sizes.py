"""The heads of each layer's attention: most models have the same in all layers."""

from __future__ import annotations

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """The heads of one layer. Without `values`, it takes its keys, before their norm, for values."""

    channels: int  # of a head
    groups: int  # key/value heads
    values: bool = True


def heads_of(sizes: Any, layer: int) -> Heads:
    """The heads of `layer`, counted from 0 in the whole model. `sizes`: a LanguageModelConfig or a family's
    fields of it."""
    sizes = sizes if isinstance(sizes, dict) else vars(sizes)
    if each := sizes.get("layer_heads"):
        return each[layer]
    return Heads(sizes["kv_channels"], sizes["num_query_groups"])
