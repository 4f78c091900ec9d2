"""Training runs of the small GPT in real gloo processes, started once and looked at by several tests.

Starting a process costs more than all its training: one launch goes through many layouts.
"""

from __future__ import annotations

import functools
import hashlib
import random
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from megatron_vlm.config import ParallelConfig, RunConfig
from tiny.distributed import run_distributed

HALF, STEPS = 2, 4

# name: layout, and what differs in the model
CASES = {
    "dp": (ParallelConfig(), {}),
    "dp_plain": (ParallelConfig(distributed_optimizer=False), {}),
    "dp_bf16": (ParallelConfig(), {"dtype": "bf16"}),
    "dp_offload": (ParallelConfig(), {"offload": True}),
    "dp_bf16_offload": (ParallelConfig(), {"dtype": "bf16", "offload": True}),
    "tp": (ParallelConfig(tp=2), {}),
    "tp_plain": (ParallelConfig(tp=2, distributed_optimizer=False), {}),
    "tp_no_sp": (ParallelConfig(tp=2, sp=False), {}),
    "pp": (ParallelConfig(pp=2), {}),
    "pp_plain": (ParallelConfig(pp=2, distributed_optimizer=False), {}),
    "pp_bf16_plain": (ParallelConfig(pp=2, distributed_optimizer=False), {"dtype": "bf16"}),
    "vpp": (ParallelConfig(pp=2, vpp=2), {}),
    "tp_pp": (ParallelConfig(tp=2, pp=2), {}),
    "moe_dp": (ParallelConfig(), {"moe": True}),
    "moe_ep": (ParallelConfig(ep=2), {"moe": True}),
    "moe_tp_ep": (ParallelConfig(tp=2, ep=2), {"moe": True}),
    "pp_frozen_stage": (ParallelConfig(pp=2), {"only_embedding": True}),
}
# of two processes; those of OFTEN are in `make test`
OFTEN = ["dp", "tp", "vpp"]
CASES_OF_2 = [
    *OFTEN,
    "dp_bf16",
    "moe_ep",
    "pp",
    "pp_frozen_stage",
    "dp_plain",
    "dp_offload",
    "dp_bf16_offload",
]
CASES_OF_2 += ["tp_plain", "tp_no_sp", "pp_plain", "pp_bf16_plain"]
asked = CASES_OF_2  # by the tests of this session
CROSS = {  # saved by: loaded by
    "tp": ("pp", "dp", "vpp"),
    "tp_plain": ("pp_plain",),
    "dp": ("tp",),
    "vpp": ("tp",),
    "pp_bf16_plain": ("dp_bf16_plain",),
    "dp_bf16": ("dp_bf16_offload",),
    "dp_bf16_offload": ("dp_bf16",),
    "moe_ep": ("moe_dp",),
}
CASES["dp_bf16_plain"] = (ParallelConfig(distributed_optimizer=False), {"dtype": "bf16"})


def run_config(case: str) -> RunConfig:
    config = RunConfig(parallel=CASES[case][0])
    config.model.dtype = CASES[case][1].get("dtype", "fp32")
    config.optimizer.lr, config.optimizer.warmup_steps = 1e-2, 2
    config.optimizer.weight_decay = 0.1
    config.optimizer.offload = CASES[case][1].get("offload", False)
    config.train.steps = STEPS
    return config


@functools.cache
def folder() -> str:
    held = tempfile.TemporaryDirectory(prefix="launches_")
    folder.held = held  # lives as long as the test session
    return held.name


@functools.cache
def first(world_size: int) -> list[dict]:
    """Phase one by rank: every case trained STEPS steps, and HALF steps then saved, from equal weights."""
    if world_size > 1:
        first(1)
    return run_distributed(world_size, _first, folder(), _cases(world_size))


@functools.cache
def second(world_size: int) -> list[dict]:
    """Phase two by rank, in new processes: every saved run loaded and trained to STEPS."""
    first(world_size)
    return run_distributed(world_size, _second, folder(), _cases(world_size))


def _cases(world_size: int) -> list[str]:
    of_2 = [case for case in CASES_OF_2 if case in asked]
    return {1: ["dp", "dp_plain", "moe_dp"], 2: of_2, 4: ["tp_pp", "moe_tp_ep"]}[world_size]


def _run_dir(root: str, case: str) -> Path:
    return Path(root) / f"{case}_{torch.distributed.get_world_size()}"


def _start(case: str, seed: int, weights: Path | None = None):
    """A fresh run, whose weights are those of a checkpoint if one is given."""
    import tiny_gpt

    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint
    from megatron_vlm.training.optimizer import build_optimizer

    parallel, model = CASES[case]
    setup.reset_layout(parallel, seed)
    dtype = torch.bfloat16 if model.get("dtype") == "bf16" else torch.float32
    chunks = tiny_gpt.build(parallel, model.get("moe", False), dtype, model.get("only_embedding", False))
    if weights is not None:
        checkpoint.load_latest(weights, chunks)
    return chunks, *build_optimizer(chunks, run_config(case))


def _initialised(case: str, root: str):
    """A fresh run whose weights are those of the single process, whatever the layout."""
    from megatron_vlm.training import checkpoint

    initial = Path(root) / ("initial_moe" if CASES[case][1].get("moe") else "initial")
    if torch.distributed.get_world_size() == 1 and not initial.exists():
        chunks, _, scheduler = _start(case, seed=1)
        checkpoint.save(initial, 0, chunks, None, scheduler)
    return _start(case, seed=1, weights=initial)


def _train(run, steps) -> list[float]:
    import tiny_gpt

    return [tiny_gpt.run_step(run[0], step, run[1], run[2]) for step in steps]


def _first(root: str, cases: list[str]) -> dict:
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint

    setup.init_distributed(ParallelConfig(), 1)
    results = {}
    for case in cases:
        run = _initialised(case, root)
        losses = _train(run, range(STEPS))
        digest = _digest(run)
        run = _initialised(case, root)
        _train(run, range(HALF))
        rank = torch.distributed.get_rank()
        checkpoint.save(_run_dir(root, case), HALF, *run, loader_state={"rank": rank}, extra={"case": case})
        results[case] = {"losses": losses, "digest": digest, "draws": _draws(), "misnamed": _misnamed(run)}
    return results


def _second(root: str, cases: list[str]) -> dict:
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint

    setup.init_distributed(ParallelConfig(), 1)
    results = {"damaged": _refusal_of_damage(_run_dir(root, cases[0]), cases[0])}
    for saved in cases:
        crossed = CROSS.get(saved, ()) if torch.distributed.get_world_size() == 2 else ()
        for case in (saved, *crossed):
            run = _start(case, seed=99)  # other weights and draws than those that were saved
            state = checkpoint.load_latest(_run_dir(root, saved), *run)
            draws = _draws()
            losses = _train(run, range(HALF, STEPS))
            results[f"{saved} -> {case}"] = {
                "losses": losses,
                "digest": _digest(run),
                "draws": draws,
                "extra": checkpoint.saved(_run_dir(root, saved)).extra,
                "state": {name: value for name, value in asdict(state).items() if name != "path"},
            }
    return results


def _refusal_of_damage(run_dir: Path, case: str) -> str:
    """What this rank says of a copy of the run in whose last rank's file a bit has changed."""
    from megatron_vlm.training import checkpoint

    copy = run_dir.with_name("damaged")
    if torch.distributed.get_rank() == 0:
        shutil.copytree(run_dir, copy, dirs_exist_ok=True)
        last = sorted((copy / f"checkpoints/step_{HALF:08d}").glob("*.distcp"))[-1]
        content = bytearray(last.read_bytes())
        content[len(content) // 2] ^= 1
        last.write_bytes(content)
    torch.distributed.barrier()
    try:
        checkpoint.load_latest(copy, *_start(case, seed=1))
    except ValueError as error:
        return str(error)
    return ""


def _misnamed(run) -> list[torch.Size]:
    """The parameters for which this rank's distributed optimizer would save other numbers."""
    return [
        parameter.shape
        for part in run[1].chained_optimizers
        for parameter in getattr(part, "model_param_gbuf_map", ())
        for place in [part._get_model_param_range_map(parameter)["param"]]
        for saved in [part._get_main_param_and_optimizer_states(parameter)["param"].to(parameter.dtype)]
        if not torch.equal(saved, parameter.detach().flatten()[place.start : place.end])
    ]


def _draws() -> list[float]:
    """One number of every generator of this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(()).item()
    return [random.random(), float(np.random.rand()), torch.rand(()).item(), tracked]


def _digest(run) -> str:
    """A hash of the bytes of this rank's parameters, moments and Adam steps, and of the learning rates."""
    from megatron_vlm.training.optimizer import torch_adams

    chunks, optimizer, _ = run
    tensors = [p for chunk in chunks for p in chunk.parameters()]
    for adam in torch_adams(optimizer):
        for group in adam.param_groups:
            tensors += [value for p in group["params"] for _, value in sorted(adam.state[p].items())]
    digest = hashlib.sha256(str([group["lr"] for group in optimizer.param_groups]).encode())
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
