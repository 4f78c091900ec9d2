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


# What decides about a machine comes first. The limits add up to half an hour, and a part also has the seconds
# that parts before it left.
PARTS = {
    "environment": Part("environment.rows", 90, "versions; the kernels that a model is built with"),
    "attention": Part("attention.rows", 140, "attention against dense, and its speed"),
    "fused": Part("fused.rows", 150, "norms, rotary embeddings, gates, gradients of weights"),
    "run": Part(
        "command.rows", 150, "thirty steps by the command line, ended by SIGTERM and resumed", joins=False
    ),
    "step": Part("stack.ours", 150, "four layers of Qwen3-VL-8B: seconds, tokens/s, MFU, memory"),
    "profile": Part("profiled.rows", 90, "a trace, idle time, waits, compiled graphs"),
    "save": Part("cycle.save_rows", 90, "save, load, resume, export"),
    "ranks": Part("ranks.rows", 150, "layouts of parity by NCCL, where there are several GPUs", joins=False),
    "delta_nets": Part("delta_nets.rows", 120, "gated delta nets by flash-linear-attention"),
    "parity": Part("exact.parity_rows", 90, "tiny models in fp32 against Transformers on a CPU"),
    "bf16": Part("exact.ratios", 90, "our error in bf16 over Transformers'"),
    "transformers": Part("stack.theirs", 90, "the same steps of Transformers"),
    "memory": Part("stack.planned", 60, "what `plan` and its rehearsal say of the same", True, False),
    "grouped": Part("products.grouped", 50, "grouped products: no rows, dirty memory, very large ones"),
    "patches": Part("products.patches", 50, "a tower's patch embedding: Conv3d against a linear"),
    "head": Part("layers.head", 60, "the output layer with 152k tokens"),
    "experts": Part("layers.experts", 60, "a layer of Qwen3-VL-30B-A3B's experts"),
    "generate": Part("cycle.generate_rows", 60, "greedy answers against Transformers'"),
    "offload": Part("cycle.offload_rows", 60, "a policy to the host and back"),
}
MINUTES = sum(part.seconds for part in PARTS.values()) / 60
