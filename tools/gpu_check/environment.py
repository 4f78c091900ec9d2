"""Minute one: what is there, and with which kernels a model is built."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import megatron_vlm
from gpu_check.rows import Row
from gpu_check.sizes import ON_CUDA, About, Sizes
from gpu_check.stack import built, run_config
from megatron_vlm.config import ConfigError
from megatron_vlm.models.layers.fused import Fused
from megatron_vlm.supported import SUPPORTED, too_old

PACKAGES = ("triton", "transformers", "megatron-core", "megatron-vlm", "numpy")
SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
)


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    for name, value in versions().items():
        yield Row("environment", name, value)
    for reason in filter(None, map(too_old, SUPPORTED)):
        yield Row("environment", "a family is left out", reason)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield from kernels(sizes)
        except ConfigError as error:  # a kernel is wrong here, and the message says which
            yield Row("environment", "a model is not built", f"{error}", wrong=True)
    (package,) = megatron_vlm.__path__
    ours = [each for each in caught if Path(each.filename).is_relative_to(package)]
    for text in dict.fromkeys(str(each.message) for each in ours):
        yield Row("environment", "fell back", text, wrong=True)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found |= {name: os.environ.get(name, "not set") for name in SETTINGS}
    if not ON_CUDA:
        return found | {"card": f"none: CPU, {platform.processor() or platform.machine()}"}
    card = torch.cuda.get_device_properties(0)
    found |= {
        "card": f"{torch.cuda.device_count()} x {card.name}",
        "memory": f"{card.total_memory / 2**30:.1f} GiB",
        "compute capability": f"{card.major}.{card.minor}",
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "allocator": torch.cuda.get_allocator_backend(),
    }
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=20).stdout
        found["driver"] = said.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        found["driver"] = f"nvidia-smi does not answer: {error}"
    return found


def kernels(sizes: Sizes) -> Iterator[Row]:
    """What a model of a single layer with the heads of the stack ends with."""
    config = run_config(sizes.rows[0])
    chunks, _ = built(config, "qwen3_vl_8b", sizes.with_layers(1))
    model = chunks[0]
    for channels, backend in model.config.attention_backends.items():
        yield Row("environment", f"attention of heads of {channels}", backend)
    towers = {part.config._attn_implementation for part in model.vision.modules() if hasattr(part, "config")}
    yield Row("environment", "attention of the tower", ", ".join(sorted(filter(None, towers))))
    yield Row("environment", "norms, rotary embeddings, gates", f"compiled on {Fused.compiles_on}")
    fusion = model.config.gradient_accumulation_fusion
    yield Row("environment", "gradients of weights added by their product", str(fusion))
