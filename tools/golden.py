"""Hash what a refactoring must not change: batches, loader states, gradients, checkpoints, exports, adapters.

    python tools/golden.py            write tests/golden.json again, after a change that is meant
    python tools/golden.py --check    print what differs from it; `--only gemma3,llava` for some families

A hash is `NAMES-VALUES`. NAMES covers names, shapes, dtypes and all values that are not floats: it is the
same on every machine. VALUES covers the floats. They come from random weights, sums and scaled images, whose
last bits depend on the processor and the versions in `made_with`: they are compared only where those are the
same. Elsewhere loss and gradient norm are compared to a rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402

from megatron_vlm.config import ParallelConfig, RunConfig  # noqa: E402
from tiny.distributed import run_distributed  # noqa: E402

FILE = ROOT / "tests" / "golden.json"
FAMILIES = {
    "llava": "dense language model",
    "gemma3": "sliding windows",
    "qwen2_5_vl": "M-RoPE",
    "qwen3_vl_moe": "experts",
    "qwen3_5": "gated delta nets",
    "kimi_k25": "latent attention",
    "minicpmv4_6": "slices of images",
    "lfm2_vl": "convolutions",
}
# name -> (processes, layout, packing)
LAYOUTS: dict[str, tuple[int, dict[str, int], str]] = {
    "1 rank": (1, {}, "none"),
    "packed": (1, {}, "stream"),
    "TP2": (2, {"tp": 2}, "none"),
    "PP2": (2, {"pp": 2}, "none"),
    "CP2": (2, {"cp": 2}, "none"),
    "EP2 or DP2": (2, {}, "none"),
}
BATCHES, TRAINED = 7, 2  # micro batches of a rank that are hashed, and that give loss and gradients
ROUNDING = 1e-5  # of loss and, in proportion, gradient norm on another machine
UNSTABLE = ("pipeline", "transformers")  # fields of a fingerprint with module paths and versions


def made_with() -> dict[str, str]:
    packages = ("torch", "transformers", "megatron-core", "megatron-energon")
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = f"{model[1] if model else 'unknown'}, {torch.backends.cpu.get_cpu_capability()}"
    return {name: version(name) for name in packages} | {"cpu": cpu}


def digest(named: Iterable[tuple[str, Any]]) -> str:
    """Return the hash `NAMES-VALUES` of named tensors and plain values, in the order of the names."""
    names, values = hashlib.sha256(), hashlib.sha256()
    for name, value in sorted(named, key=lambda pair: pair[0]):
        if not torch.is_tensor(value):
            names.update(f"{name} {json.dumps(value, sort_keys=True)}".encode())
            continue
        value = value.detach().cpu().contiguous()
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        names.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        (values if value.is_floating_point() else names).update(content)
    return f"{names.hexdigest()[:12]}-{values.hexdigest()[:12]}"


def batch_content(number: int, batch: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield (name, value) of a batch by its keys; restore keys, which may hold paths, are left out."""
    for name, value in batch.items():
        if name == "visual_inputs":
            tensors = value.as_model_kwargs() if value is not None else {}
            yield from ((f"{number} {name} {key}", tensor) for key, tensor in tensors.items())
        elif name == "__key__" or torch.is_tensor(value):
            yield f"{number} {name}", value


def stable_state(state: dict) -> dict:
    """Return a loader state without what changes when code is moved or a package is updated."""
    fingerprint = {name: value for name, value in state["fingerprint"].items() if name not in UNSTABLE}
    return state | {"fingerprint": fingerprint}


def measure(jobs: list[tuple[str, str, str, str]]) -> dict[str, dict[str, Any]]:
    """Return hashes by `FAMILY/LAYOUT`; every rank of a launch calls it, and rank 0 has all."""
    from megatron_vlm.parallel import setup

    torch.set_num_threads(1)
    setup.init_distributed(ParallelConfig(), seed=1)
    return {f"{family}/{layout}": measure_cell(family, layout, *paths) for family, layout, *paths in jobs}


def measure_cell(family: str, layout: str, checkpoint: str, data: str) -> dict[str, Any]:
    from megatron_vlm.models.hf import open_source
    from megatron_vlm.parallel import setup

    processes, parallel, packing = LAYOUTS[layout]
    source = open_source(checkpoint)
    if layout == "EP2 or DP2" and "num_moe_experts" in source.description.architecture:
        parallel = {"ep": 2}
    with tempfile.TemporaryDirectory(prefix="golden_") as folder:
        run_dir = setup.from_all_ranks(folder)[0]
        config = RunConfig(run_dir=f"{run_dir}/run", parallel=ParallelConfig(**parallel))
        config.model.hf_path, config.model.dtype = checkpoint, "fp32"
        config.data.dataset_type, config.data.train_data_path = "hf", f"{data}/data.jsonl"
        config.data.packing, config.data.packing_buffer_size = packing, 8
        config.data.seq_length, config.data.num_workers = 1024, 0
        setup.reset_layout(config.parallel, seed=1)
        torch.set_num_threads(1)
        cell, batches = data_hashes(config, source)
        if layout == "1 rank":
            config.data.dataset_type, config.data.train_data_path = "energon", f"{data}/energon"
            energon, _ = data_hashes(config, source)
            cell |= {f"energon {name}": value for name, value in energon.items()}
        cell |= model_hashes(config, source, batches, Path(run_dir))
        torch.distributed.barrier()  # no rank removes the folder before all have read it
    return cell


def data_hashes(config: RunConfig, source: Any) -> tuple[dict[str, str], list]:
    """Return hashes of the batches and of the loader states of all readers, and this rank's batches."""
    from megatron_vlm.data.run_data import RunData
    from megatron_vlm.parallel import setup
    from megatron_vlm.parallel.broadcast import BatchBroadcaster

    broadcaster, content, state, iterator, data = BatchBroadcaster(), [], None, None, None
    if broadcaster.reads:
        data = RunData(config, source.processor, source.needs, *setup.data_parallel_place())
        iterator = iter(data.train_loader)
    batches = []
    for number in range(BATCHES):
        read = next(iterator) if data else None
        if data:
            content += batch_content(number, read)
        batches += broadcaster.take(iter([read]) if data else None, 1)
    if data:
        state = stable_state(data.train_loader.state_dict())
        data.close()
    hashes = setup.from_all_ranks(digest(content) if data else None)
    states = setup.from_all_ranks(state)
    readers = {
        "batch": " ".join(filter(None, hashes)),
        "loader": digest([("states", list(filter(None, states)))]),
    }
    return readers, batches


def checkpoint_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by Megatron's names, read by torch alone."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata.items()
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in stored
        if isinstance(about, TensorStorageMetadata)
    }
    checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def model_hashes(config: RunConfig, source: Any, batches: list, folder: Path) -> dict[str, Any]:
    """Return loss, and hashes of gradients, the checkpoint and export after a step, and an adapter."""
    import parity
    from safetensors.torch import load_file

    from megatron_vlm.models.adapters.files import save_adapters
    from megatron_vlm.models.weights.exporting import export_hf
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint, step
    from megatron_vlm.training.loop import starting_model
    from megatron_vlm.training.optimizer import build_optimizer

    def saved(output: Path) -> str:
        return digest([pair for file in output.glob("*.safetensors") for pair in load_file(file).items()])

    model = starting_model(config, source)
    chunks = [chunk.module for chunk in model]
    optimizer, scheduler = build_optimizer(model, config)
    for chunk in model:
        chunk.zero_grad_buffer()
    trained = [parity.on_device(batch) for batch in batches[:TRAINED]]
    loss, _ = step.mean_loss(parity.backward(model, trained))
    parity.gather_sharded_grads(model)
    mine = {key: grad.clone() for key, grad in parity.gradients_of(chunks, source.description.rules)}
    grads = {key: grad for rank in setup.from_all_ranks(mine) for key, grad in rank.items()}
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
    optimizer.step()
    path = checkpoint.save(folder / "saved", 1, model, optimizer, scheduler)
    export_hf(chunks, folder / "export", source.folder, source.weight_map)

    config.adapter.r, config.adapter.target_modules = 4, "all-linear"
    adapted = [chunk.module for chunk in starting_model(config, source)]
    for parameter in (p for chunk in adapted for p in chunk.parameters() if p.requires_grad):
        parameter.data += torch.linspace(-1, 1, parameter.numel()).view_as(parameter)  # B starts at zero
    save_adapters(adapted, folder / "adapter", config.adapter, "base")
    return {
        "loss": loss,
        "gradient norm": norm,
        "gradients": digest(grads.items()),
        "checkpoint": digest(checkpoint_tensors(path).items()),
        "export": saved(folder / "export"),
        "adapter": saved(folder / "adapter"),
    }


def measured(families: Iterable[str], layouts: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the hashes of families in layouts; one launch serves all layouts of as many processes."""
    from prepared_shards import prepare
    from sources import write_sharegpt

    from tiny.checkpoints import build_tiny_checkpoint

    torch.set_num_threads(1)
    families, layouts = list(families), list(layouts)
    data = folder / "data"
    prepare(write_sharegpt(data, 20), data / "energon", splits={"train": 20}, samples_per_shard=5)
    paths = {family: str(build_tiny_checkpoint(family, folder / family)) for family in families}
    cells: dict[str, dict[str, Any]] = {}
    for processes in (1, 2):
        names = [name for name in layouts if LAYOUTS[name][0] == processes]
        jobs = [(family, name, paths[family], str(data)) for family in families for name in names]
        if jobs:
            cells |= run_distributed(processes, measure, jobs, timeout=900)[0]
    return {cell: cells[cell] for family in families for name in layouts for cell in [f"{family}/{name}"]}


def differences(cells: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a line for each value that differs from the recorded one."""
    recorded = json.loads(FILE.read_text())
    is_same_machine = recorded["made_with"] == made_with()

    def differs(before: Any, now: Any) -> bool:
        if is_same_machine or None in (before, now):
            return before != now
        if isinstance(now, float):
            return abs(now - before) > ROUNDING * max(1.0, abs(before))
        return [part.split("-")[0] for part in before.split()] != [part.split("-")[0] for part in now.split()]

    return [
        f"{cell}: {name} was {before.get(name)} and is {values.get(name)}"
        for cell, values in cells.items()
        for before in [recorded["cells"].get(cell, {})]
        for name in sorted({*values, *before})
        if differs(before.get(name), values.get(name))
    ]


def write(cells: Mapping[str, dict[str, Any]]) -> None:
    rows = ",\n".join(f"  {json.dumps(cell)}: {json.dumps(values)}" for cell, values in cells.items())
    FILE.write_text(f'{{\n "made_with": {json.dumps(made_with())},\n "cells": {{\n{rows}\n }}\n}}\n')


def main() -> None:
    import golden  # ranks find `measure` by the name of this module

    only = sys.argv[sys.argv.index("--only") + 1].split(",") if "--only" in sys.argv else FAMILIES
    with tempfile.TemporaryDirectory(prefix="golden_") as folder:
        cells = golden.measured(only, LAYOUTS, Path(folder))
    if "--check" not in sys.argv:
        write(cells)
    elif lines := differences(cells):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
