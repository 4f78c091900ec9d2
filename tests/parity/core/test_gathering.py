"""Parameters that arrive while the next step begins: to the bit the same run as one that waits for them.

A fault is hidden where a gathering is fast. So it is also made as late as can be: until somebody waits for
them, the parameters that other ranks have changed are NaN, and whoever reads them too early has NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import parity
import pytest
import saved_cases
import torch
from adapter_runs import Run, digest

from megatron_vlm.config import AdapterConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models.hf import open_source
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

BUCKET = 5_000  # elements, so that a tiny model has many
STEPS = 3
ALL_LINEAR = AdapterConfig(r=4, target_modules="all-linear")
TRAINED: dict[int, dict[str, tuple[str, ParallelConfig, dict[str, Any]]]] = {  # by processes
    2: {
        "tied, tower frozen": ("gemma3", ParallelConfig(), {"freeze": ["tower"]}),
        "untied, experts, EP2, recomputed": ("qwen3_vl_moe", ParallelConfig(ep=2), {"recompute": "full"}),
        "adapters": ("gemma3", ParallelConfig(), {"adapter": ALL_LINEAR}),
    },
    4: {
        "tied, PP2, VPP2": ("gemma3", ParallelConfig(pp=2, vpp=2), {}),
        "deepstack, TP2": ("qwen3_vl", ParallelConfig(tp=2), {}),
    },
}


# ---- in the processes -------------------------------------------------------------------------------------


def every_case(folder: str, processes: int) -> dict[str, dict[str, Any]]:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    from megatron_vlm.parallel import setup
    from megatron_vlm.training import step

    setup.init_distributed(ParallelConfig(), seed=1)
    step.DistributedDataParallelConfig = partial(step.DistributedDataParallelConfig, bucket_size=BUCKET)
    start, found = step.Buckets.start_param_sync, {}
    found["ranks of exchanges"] = sizes = set()
    for function in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, function, partial(counted, sizes, getattr(buffers, function)))
    for name, (family, layout, settings) in TRAINED[processes].items():
        case = saved_cases.read(f"{folder}/{family}.pt")
        run = run_of(f"{folder}/{family}", layout, **settings)
        found[name] = {"waiting": trained(run, case, False), "in flight": trained(run, case, True)}
        found[name]["judged"] = trained(run, case, True, judged=True)
        step.Buckets.start_param_sync = partialmethod(late, start)
        found[name]["late"] = trained(run, case, True)
        step.Buckets.start_param_sync = start
    return found


def counted(sizes: set[int], exchange: Callable, *tensors: torch.Tensor, group, **how) -> Any:
    sizes.add(group.size())
    return exchange(*tensors, group=group, **how)


def run_of(path: str, layout: ParallelConfig, adapter: AdapterConfig | None = None, **model) -> RunConfig:
    run = RunConfig(run_dir="none", parallel=layout, adapter=adapter or AdapterConfig())
    run.model = ModelConfig(hf_path=path, dtype="fp32", **model)
    run.optimizer.lr, run.train.steps = 1e-2, STEPS
    return run


def trained(config: RunConfig, case: dict, goes_on: bool, judged: bool = False) -> dict[str, Any]:
    """Losses of the steps, before the last that of a forward pass alone, and a digest of what came out.
    `on their way` are buckets that had not arrived when the last layer of this rank began."""
    from megatron_vlm.callbacks.spikes import Spikes
    from megatron_vlm.training.figures import StepFigures
    from megatron_vlm.training.losses import token_losses
    from megatron_vlm.training.step import mean_loss, train_step

    run, found = Run(config), {"losses": [], "on their way": 0}
    groups = [each for chunk in run.model for each in chunk.bucket_groups]

    def count(*_) -> None:
        found["on their way"] += sum(each.param_gather_handle is not None for each in groups)

    run.chunks[-1].language_model.decoder.layers[-1].register_forward_pre_hook(count, prepend=True)
    spikes = Spikes("skip")
    judge = spikes.trains if judged else None
    figures = StepFigures(config, run.source.description, run.chunks)
    parts, mine = (run.model, run.optimizer, run.scheduler), run.micro_batches(case)
    for step in range(STEPS):
        is_followed = goes_on and step < STEPS - 1
        found["losses"].append(train_step(*parts, mine, figures, is_followed, judge=judge)[0])
        if step == STEPS - 2:
            found["losses"].append(mean_loss(token_losses(run.model, mine, forward_only=True)[0])[0])
    assert all(each.param_gather_handle is None for each in groups)
    return found | {"weights": digest([p for chunk in run.chunks for p in chunk.parameters()])}


def late(buckets, start: Callable, force_sync: bool = False) -> None:
    """`_ParamAndGradBucketGroup.start_param_sync`, whose gathering happens when it is waited for."""
    if force_sync or not buckets.ddp_config.overlap_param_gather:
        buckets.param_gather_handle = None
        return start(buckets, force_sync)
    rank = buckets.intra_distributed_optimizer_instance_rank
    for bucket in buckets.buckets:
        mine = bucket.param_data.chunk(buckets.intra_distributed_optimizer_instance_size)[rank]
        kept = mine.clone()
        bucket.param_data.fill_(torch.nan)
        mine.copy_(kept)
    buckets.param_gather_handle = "not begun"


# ---- the test ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_a_run_whose_parameters_arrive_late_is_the_same(tmp_path, processes):
    cases = TRAINED[processes]
    for family in {family for family, _, _ in cases.values()}:
        source = open_source(build_tiny_checkpoint(family, tmp_path / family))
        rows = ["it", "t", "ititit", "t"][:processes]
        parity.save_case(source, rows, tmp_path / f"{family}.pt")
    ranks = run_distributed(processes, every_case, str(tmp_path), processes, timeout=500)
    # a single rank, as experts have with EP2, exchanges nothing
    assert all(min(rank["ranks of exchanges"]) == 2 for rank in ranks)
    for name in cases:
        for found in (rank[name] for rank in ranks):
            for how in ("in flight", "judged", "late"):
                assert found[how]["losses"] == found["waiting"]["losses"], (name, how)
                assert found[how]["weights"] == found["waiting"]["weights"], (name, how)
            assert len(set(found["waiting"]["losses"])) == STEPS  # the forward pass is of the same rows
            assert found["late"]["on their way"] or name == "adapters", name  # which come before all layers
