"""The parts of the check in their order, with their time limits. It imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gpu_check.rows import Row

# What a part shows: the rows of the README's box, each with what its parts are
LEVELS = {
    "imports": "versions agree, and a model is built with its kernels",
    "kernels": "attention, norms, gates, experts and gated delta nets against plain PyTorch",
    "step": "a training step: seconds, memory, waits",
    "run": "the command line, saves, resume, export, generation; numbers against Transformers'",
    "ranks": "layouts over several cards by NCCL",
}


class Part(NamedTuple):
    """A function (Sizes, About) -> rows, in a file of this folder."""

    function: str  # file.function
    level: str | None  # of LEVELS; None: it needs no card
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
    "environment": Part(
        "environment.rows", "imports", 90, "versions; the kernels that a model is built with"
    ),
    "attention": Part("attention.rows", "kernels", 140, "attention against dense, and its speed"),
    "fused": Part("fused.rows", "kernels", 150, "norms, rotary embeddings, gates, gradients of weights"),
    "run": Part(
        "command.rows",
        "run",
        150,
        "thirty steps by the command line, ended by SIGTERM and resumed",
        joins=False,
    ),
    "expected": Part("expected.rows", None, 60, "what models of time and memory say of `step`", True, False),
    "step": Part("depths.rows", "step", 180, "a layer of Qwen3-VL-8B, and what is around layers"),
    "profile": Part("profiled.rows", "step", 90, "a trace, idle time, waits, compiled graphs"),
    "save": Part("cycle.save_rows", "run", 90, "save, load, resume, export"),
    "ranks": Part(
        "ranks.rows", "ranks", 150, "layouts of parity by NCCL, where there are several GPUs", joins=False
    ),
    "delta_nets": Part("delta_nets.rows", "kernels", 120, "gated delta nets by flash-linear-attention"),
    "parity": Part("exact.parity_rows", "run", 90, "tiny models in fp32 against Transformers on a CPU"),
    "bf16": Part("exact.ratios", "run", 90, "our error in bf16 over Transformers'"),
    "transformers": Part("stack.theirs", "step", 90, "the same steps of Transformers"),
    "grouped": Part("products.grouped", "kernels", 50, "grouped products: no rows, dirty memory, large ones"),
    "patches": Part("products.patches", "kernels", 50, "a tower's patch embedding: Conv3d against a linear"),
    "head": Part("layers.head", "kernels", 50, "the output layer with 152k tokens"),
    "experts": Part("layers.experts", "kernels", 50, "a layer of Qwen3-VL-30B-A3B's experts"),
    "generate": Part("cycle.generate_rows", "run", 50, "greedy answers against Transformers'"),
    "offload": Part("cycle.offload_rows", "run", 60, "a policy to the host and back"),
}
MINUTES = sum(part.seconds for part in PARTS.values()) / 60
