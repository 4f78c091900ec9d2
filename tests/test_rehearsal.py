"""A rehearsed step is the real one: its memory, its exchanges, its operations, and no read by the host."""

from __future__ import annotations

import os

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus
from tiny.distributed import run_distributed

WORST_MEMORY = 0.1  # between the rehearsed and the measured peak; measured below 0.01
LAYOUTS = {
    "dp 2": ParallelConfig(),
    "tp 2": ParallelConfig(tp=2),
    "pp 2": ParallelConfig(pp=2, distributed_optimizer=False),
    "cp 2": ParallelConfig(cp=2),
}
OFTEN = ("gemma3",)  # the other families belong to `make test-long`
FAMILIES = [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.long]) for name in TINY_FAMILIES]


def run_of(parallel: ParallelConfig) -> RunConfig:
    """Two rows of 256 tokens in each of four micro batches, with images."""
    run = RunConfig(parallel=parallel, run_dir="none")
    run.model = ModelConfig(hf_path="none", dtype="fp32", attention="documents", load_weights=False)
    run.data.train_data_path, run.data.seq_length, run.data.max_pixels = "none", 256, 112**2
    run.train.micro_batch_size, run.train.global_batch_size = 2, 8
    return run


def config_of(family: str):
    parts = TINY_FAMILIES[family]
    return parts.config(parts.processor(default_corpus(), parts.template), {}, {})


def both(family: str) -> dict[str, tuple[dict, dict]]:
    """Of every layout what is measured in a real step of this rank, and what its rehearsal says."""
    from megatron_vlm.parallel import setup

    hf_config, measured, rank = config_of(family), {}, int(os.environ["RANK"])
    setup.init_distributed(LAYOUTS["dp 2"], seed=1)
    for name, parallel in LAYOUTS.items():
        setup.reset_layout(parallel, seed=1)
        measured[name] = real_step(run_of(parallel), hf_config)
    setup.shutdown()
    return {name: (measured[name], rehearsed(run_of(LAYOUTS[name]), hf_config, rank)) for name in LAYOUTS}


def real_step(run: RunConfig, hf_config) -> dict:
    from megatron_vlm.config import derived
    from megatron_vlm.models.families import family_for
    from megatron_vlm.models.vlm import build_model
    from megatron_vlm.parallel import setup
    from megatron_vlm.planning.rehearsal import example_batch
    from megatron_vlm.planning.tensor_memory import TensorMemory
    from megatron_vlm.training.optimizer import build_optimizer
    from megatron_vlm.training.step import data_parallel, train_step

    family, device = family_for(hf_config), setup.device()
    with TensorMemory() as memory:
        model = data_parallel(build_model(run, family, hf_config, device), run)
        optimizer, scheduler = build_optimizer(model, run)
        optimizer.step()
        held = memory.peak = memory.alive
        batches = [example_batch(run, family, hf_config, device)] * derived(run, 2)["micro_batches_per_step"]
        with FlopCounterMode(display=False) as counter:
            train_step(model, optimizer, scheduler, batches)
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counts.items() if "attention" not in str(operation))
    return {"peak": memory.peak, "held": held, "products": float(products)}


def rehearsed(run: RunConfig, hf_config, rank: int) -> dict:
    from megatron_vlm.planning.rehearsal import rehearse

    one = rehearse(run, hf_config, 2, rank)
    return {
        "peak": one.peak,
        "held": one.weights + one.gradients + one.optimizer,
        "products": one.flops("matmul"),
        "collectives": one.collectives,
        "host_reads": one.host_reads,
    }


@pytest.fixture(scope="module", params=FAMILIES)
def ranks(request) -> list[dict[str, tuple[dict, dict]]]:
    return run_distributed(2, both, request.param)


def test_rehearsed_memory_is_the_measured_one(ranks):
    for name in LAYOUTS:
        for rank in ranks:
            real, ours = rank[name]
            assert ours["held"] == pytest.approx(real["held"], rel=WORST_MEMORY), name
            assert ours["peak"] == pytest.approx(real["peak"], rel=WORST_MEMORY), name


def test_rehearsed_operations_are_those_of_a_step(ranks):
    assert [rank[name][1]["products"] for rank in ranks for name in LAYOUTS] == [
        rank[name][0]["products"] for rank in ranks for name in LAYOUTS
    ]


def test_the_host_reads_nothing_in_forward_and_backward(ranks):
    assert [rank[name][1]["host_reads"] for rank in ranks for name in LAYOUTS] == [{}] * 2 * len(LAYOUTS)
