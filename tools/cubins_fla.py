"""Compile the kernels of flash-linear-attention for a card that is not there: reports/cubins_fla.json.

python tools/cubins_fla.py [--heads 16:32 ...] [--configurations N]

The calls are those of `models.layers.delta_net`, forward and backward, in bf16, with the heads of the
published Qwen3.5 models. The package tunes each kernel, that is, it measures several configurations on the
card; here as many of them are compiled for sm_90, evenly chosen. Nothing runs, so this finds what does not
compile or has no room, and not what is wrong. Heads that are not named stay in the report.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

REPORT = Path(__file__).resolve().parent.parent / "reports" / "cubins_fla.json"
PUBLISHED = ("16:16", "16:32", "16:48", "16:64")  # heads of keys and of values, 128 channels each
CHANNELS, TAPS = 128, 4
LENGTHS = [5, 1, 70, 64, 20]
SHARED = 232_448  # bytes that a block of a Hopper card may have
compiled: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)  # by kernel, by hash
listed: dict[str, int] = defaultdict(int)  # configurations by kernel, for all kinds of its calls


class Hopper:
    """A card as Triton's driver describes it."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(configurations: int) -> None:
    """From now on a kernel's call compiles it in some of its configurations, and starts nothing."""
    driver.set_active(Hopper())
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_name = lambda *_: "NVIDIA H100"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    call = JITFunction.run

    def run(self, *given, grid, warmup, **named) -> None:
        kernel = call(self, *given, grid=(1, 1, 1), warmup=True, **named)
        if kernel.hash not in compiled[self.__name__]:
            found = {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
            found |= used(kernel.asm["cubin"])
            compiled[self.__name__][kernel.hash] = found
            print(self.__name__, found, flush=True)

    def tuned(self, *given, **named) -> None:
        self.nargs = dict(zip(self.arg_names, given, strict=False))
        known, name = self.prune_configs(named), self.fn.__name__
        before = len(compiled[name])
        for place in np.linspace(0, len(known) - 1, min(configurations, len(known))).round():
            self.fn.run(*given, **named, **known[int(place)].all_kwargs())
        listed[name] += len(known) if len(compiled[name]) > before else 0

    JITFunction.run, Autotuner.run = run, tuned


def used(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, where spilled registers lie."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", said))
    return {"registers": int(numbers["REG"]), "stack": int(numbers["STACK"])}


def call_all(keys: int, values: int) -> None:
    """The rule and the convolution with their gradients, as a layer calls them."""
    from megatron_vlm.models.layers.attention_sizes import DeltaHeads
    from megatron_vlm.models.layers.delta_net import installed_kernels
    from megatron_vlm.models.layers.delta_rule import Documents
    from megatron_vlm.models.layers.kernel_checks import delta_cases

    documents = Documents(np.array(LENGTHS), torch.device("cpu"))
    heads = DeltaHeads(keys, values, CHANNELS, CHANNELS, TAPS)
    for _, function, tensors in delta_cases(heads, documents, torch.bfloat16):
        *inputs, gradient = (x.requires_grad_() for x in tensors)
        result: Tensor = function(*inputs, documents, installed_kernels())
        torch.autograd.grad(result, inputs, gradient.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=PUBLISHED)
    parser.add_argument("--configurations", type=int, default=100, help="of each kernel, at most")
    arguments = parser.parse_args()
    pretend(arguments.configurations)
    for heads in arguments.heads:
        compiled.clear()
        listed.clear()
        call_all(*map(int, heads.split(":")))
        write(heads)


def write(heads: str) -> None:
    """Puts what was compiled for these heads into the report."""
    import fla

    packages = {each.__name__: each.__version__ for each in (torch, triton, fla)}
    kernels = {
        name: {"listed": max(listed[name], 1), "compiled": list(found.values())}
        for name, found in compiled.items()
    }
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    report[heads] = {"packages": packages, "kernels": kernels}
    REPORT.write_text(json.dumps({each: report[each] for each in sorted(report)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
