"""The parts of the check in their order, with their time limits. It imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gpu_check.rows import Row


class Part(NamedTuple):
    """A function (Sizes, About) -> rows, in a file of this folder."""

    function: str  # file.function
    seconds: int  # after which its process is ended
    what: str
    hides_cuda: bool = False
    joins: bool = True  # is a process of one rank; others lay themselves out

    def load(self) -> Callable[[Any, Any], Iterator[Row]]:
        file, _, name = self.function.partition(".")
        return getattr(importlib.import_module(f"gpu_check.{file}"), name)


PARTS = {
    "environment": Part("environment.rows", 120, "versions; the kernels that a model is built with"),
    "attention": Part("attention.rows", 240, "attention against dense, and its speed"),
    "fused": Part("fused.rows", 240, "norms, rotary embeddings, gates, gradients of weights"),
    "delta_nets": Part("delta_nets.rows", 300, "gated delta nets by flash-linear-attention"),
    "grouped": Part("products.grouped", 90, "grouped products: no rows, dirty memory, very large ones"),
    "patches": Part("products.patches", 90, "a tower's patch embedding: Conv3d against a linear"),
    "step": Part("stack.ours", 240, "four layers of Qwen3-VL-8B: seconds, tokens/s, MFU, memory"),
    "transformers": Part("stack.theirs", 240, "the same of Transformers"),
    "memory": Part("stack.planned", 180, "what `plan` and its rehearsal say of the same", True, False),
    "profile": Part("profiled.rows", 180, "a trace, idle time, waits, compiled graphs"),
    "head": Part("layers.head", 90, "the output layer with 152k tokens"),
    "experts": Part("layers.experts", 120, "a layer of Qwen3-VL-30B-A3B's experts"),
    "parity": Part("exact.parity_rows", 420, "tiny models in fp32 against Transformers on a CPU"),
    "bf16": Part("exact.ratios", 300, "our error in bf16 over Transformers'"),
    "save": Part("cycle.save_rows", 180, "save, load, resume, export"),
    "generate": Part("cycle.generate_rows", 120, "greedy answers against Transformers'"),
    "offload": Part("cycle.offload_rows", 120, "a policy to the host and back"),
    "ranks": Part(
        "ranks.rows", 420, "every layout of parity by NCCL, where there are several GPUs", joins=False
    ),
}
