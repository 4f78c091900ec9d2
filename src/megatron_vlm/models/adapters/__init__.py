"""Low-rank adapters beside frozen linears, in exactly peft's parameterisation (LoRA, arXiv 2106.09685).

A linear y = W x becomes y + scale · B (A x). Every linear of the HF model has its own A and B, also where
several are one parameter here. Tensor-parallel ranks exchange A x and its gradient, `r` numbers a token, and
nothing else.
"""

from megatron_vlm.models.adapters.files import load_adapters, save_adapters, settled, words_of_start
from megatron_vlm.models.adapters.model import (
    Adapters,
    adapter_tensors,
    add_adapters,
    load_state,
    merge,
    sharded_state,
    with_adapters,
)
from megatron_vlm.models.adapters.targets import Target, find_targets, find_whole

__all__ = [
    "Adapters",
    "Target",
    "adapter_tensors",
    "add_adapters",
    "find_targets",
    "find_whole",
    "load_adapters",
    "load_state",
    "merge",
    "save_adapters",
    "settled",
    "sharded_state",
    "with_adapters",
    "words_of_start",
]
