"""Few graphs are compiled of the fused functions, whatever a run does with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import policy_in_ranks
import pytest
import torch

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models import head
from megatron_vlm.models.layers import fused
from megatron_vlm.models.layers.fused import Fused, compiled_on
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

FUNCTIONS = {
    "norm": fused.normed,
    "norm backward": fused._norm_backward,
    "heads": fused._turned_heads,
    "heads backward": fused._turned_heads_backward,
    "gate": fused._gate,
    "gate backward": fused._gate_backward,
    "head": head._reduced,
    "head backward": head._gradient,
}


def every_use(path: str, family: str) -> dict[str, Any]:
    """How many graphs there are of each function after each use, without a compiler for them."""
    from megatron_vlm.parallel import setup

    found = {}
    graphs = counted_graphs()
    setup.init_distributed(ParallelConfig(), seed=1)
    torch.compiler.set_stance("default")
    with compiled_on("cpu"), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for use in uses(path, family):
            found[use] = dict(graphs)
    return found


def counted_graphs() -> Counter[str]:
    """Graphs of each function, which are not compiled, from now on. Names of towers' functions begin so."""
    graphs = Counter()
    names = {function: name for name, function in FUNCTIONS.items()}

    def compiled(function: Fused) -> Callable[..., Any]:
        def counted(module, inputs):
            graphs[names.get(function, f"tower {function.__name__}")] += 1
            return module.forward

        return torch.compile(function.written, dynamic=True, backend=counted)

    Fused.compiled = cached_property(compiled)
    Fused.compiled.__set_name__(Fused, "compiled")
    return graphs


def checks_of(families: list[str]) -> Counter[str]:
    """Graphs of the checks before runs of all families, in one process, which torch's limit does not end."""
    from rehearsals import config_of, run_of

    from megatron_vlm.models.families import describe
    from megatron_vlm.models.language_model import language_model_config
    from megatron_vlm.models.layers.kernel_checks import fused_disagreement
    from megatron_vlm.parallel import setup

    graphs = counted_graphs()
    setup.init_distributed(ParallelConfig(), seed=1)
    torch.compiler.set_stance("default")
    with compiled_on("cpu"), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for family in families:
            run = run_of(ParallelConfig())
            architecture = describe(config_of(family)).architecture
            config = language_model_config(run, architecture, (architecture["num_layers"], 0.0, 0.0))
            assert fused_disagreement(config, torch.device("cpu")) is None
    return graphs


@pytest.mark.long
def test_ten_families_in_one_process_share_their_graphs():
    """Each brings packages that register pytree nodes."""
    [graphs] = run_distributed(1, checks_of, list(TINY_FAMILIES)[:10])
    assert graphs["gate backward"] <= 4  # of two activations, with and without weights


def uses(path: str, family: str):
    from megatron_vlm.extras.plan.rehearsal import example_batch
    from megatron_vlm.generation.generate import generate
    from megatron_vlm.models.hf import open_source
    from megatron_vlm.models.layers.kernel_checks import fused_disagreement, tower_disagreement
    from megatron_vlm.models.opened import open_model
    from megatron_vlm.models.vlm import in_evaluation
    from megatron_vlm.objectives import objective_of
    from megatron_vlm.training.optimizer import build_optimizer
    from megatron_vlm.training.step import data_parallel, train_step

    run = RunConfig(run_dir="none", model=ModelConfig(hf_path=path, dtype="bf16"))
    run.data.train_data_path, run.data.seq_length, run.data.max_pixels = "none", 256, 112**2
    source, device = open_source(path), torch.device("cpu")
    model = data_parallel(open_model(run, source), run)
    config = model[0].config
    assert fused_disagreement(config, device) is None
    assert tower_disagreement(model[0].module.vision, device, config.params_dtype) is None
    yield "check"
    optimizer, scheduler = build_optimizer(model, run)
    for objective, tokens in (("tokens", 256), ("tokens", 201), ("dpo", 256)):
        run.train.objective, run.data.seq_length = objective, tokens
        step_loss = objective_of(run).step_loss(run, model)
        batch = example_batch(run, source.description)
        train_step(model, optimizer, scheduler, [batch], step_loss=step_loss)
        yield f"train {objective} {tokens}"
    with torch.no_grad(), in_evaluation(model):
        step_loss(model, [batch], forward_only=True)
    yield "validate"
    ids = torch.arange(5, 15)
    prompt = {
        "input_ids": ids,
        "position_ids": source.description.position_ids(ids, None),
        "visual_inputs": None,
    }
    generate(model, [prompt] * 2, 3)
    yield "generate"
    samples = policy_in_ranks.samples_of(family, path)
    policy = policy_in_ranks.policy_of(path, ParallelConfig(), 300, dtype="bf16")
    policy.logprobs(samples)
    policy.forward_backward(samples, policy_in_ranks.loss, 5, entropy=True, fields=["advantage"])
    policy.step()
    yield "policy"


MOST = {"qwen3_5": 16}  # its norms are of two kinds: one multiplies by 1 + weight, one by a weight in fp32

# heads and their gradients lie in memory in two ways each
OF_TOWERS = {"tower apply_rotary_pos_emb_vision": 4, "tower gate_rows": 1, "tower gate_rows_backward": 1}
IN_LONG = ("qwen3_5",)
FAMILIES = [
    pytest.param(family, marks=pytest.mark.long if family in IN_LONG else pytest.mark.soak)
    for family in ("qwen3_vl_moe", "qwen3_5", "qwen3_vl", "gemma3", "glm4v")
]


@pytest.mark.parametrize("family", FAMILIES)
def test_twelve_graphs_are_enough(tmp_path, family):
    path = build_tiny_checkpoint(family, tmp_path)
    [found] = run_distributed(1, every_use, str(path), family)
    print(found)
    assert len(found) == 7
    last = found["policy"]
    assert last.keys() - OF_TOWERS.keys() == FUNCTIONS.keys()
    assert sum(last[name] for name in FUNCTIONS) <= MOST.get(family, 12), found
    assert all(last.get(name, 0) <= limit for name, limit in OF_TOWERS.items()), found
