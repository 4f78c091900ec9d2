"""examples/rl/ has the methods that SkyRL and verl call, and they give what Policy gives."""

from __future__ import annotations

import importlib.util
import inspect
from types import SimpleNamespace
from typing import Any

import policy_in_ranks
import pytest
import saved_cases
import torch
from places import ROOT

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.rl import losses
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- what runs in the ranks


# of skyrl 0.4.0 and verl 0.9.1 on PyPI; the same in SkyRL a956457, and in verl b178a3c
PUBLISHED = {
    "skyrl_worker.PolicyWorker": {
        "init_model": ["model_path", "num_training_steps"],
        "forward": ["data", "loss_fn", "loss_fn_config", "return_per_token_outputs"],
        "forward_backward": ["data", "loss_fn", "loss_fn_config", "return_per_token_outputs"],
        "optim_step": [],
    },
    "verl_engine.PolicyEngine": {
        "initialize": [],
        "is_param_offload_enabled": [],
        "is_optimizer_offload_enabled": [],
        "train_mode": ["kwargs"],
        "eval_mode": ["kwargs"],
        "optimizer_zero_grad": [],
        "optimizer_step": [],
        "lr_scheduler_step": [],
        "forward_backward_batch": ["data", "loss_function", "forward_only"],
        "get_per_tensor_param": [],
        "get_data_parallel_size": [],
        "get_data_parallel_rank": [],
        "get_data_parallel_group": [],
        "is_mp_src_rank_with_outputs": [],
    },
}


def example(name: str) -> Any:
    """The class of an example."""
    file, cls = name.split(".")
    spec = importlib.util.spec_from_file_location(file, ROOT / "examples" / "rl" / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, cls)


class SkyRLBatch(dict):
    """As SkyRL's TrainingInputBatch: rows padded on the left."""

    def __init__(self, samples: list[dict], scores: list[torch.Tensor]):
        width = max(len(sample["input_ids"]) for sample in samples)
        count = max(len(score) for score in scores) - 8

        def rows(values: list[torch.Tensor], size: int) -> torch.Tensor:
            return torch.stack([torch.nn.functional.pad(x, (size, 0))[-size:] for x in values])

        every = [torch.ones_like(sample["input_ids"]) for sample in samples]
        super().__init__(
            sequences=rows([sample["input_ids"] for sample in samples], width),
            attention_mask=rows(every, width),
            loss_mask=rows([sample["loss_mask"].float() for sample in samples], count),
            advantages=rows([sample["advantage"] for sample in samples], count),
            action_log_probs=rows(scores, count),
            base_action_log_probs=rows([score - 0.1 for score in scores], count),
        )
        pixels = [sample.get("pixel_values") for sample in samples]
        none = torch.zeros(0, *next(x for x in pixels if x is not None).shape[1:])
        self["pixel_values"] = [none if x is None else x for x in pixels]
        self.metadata = {"response_length": count}


RULES = SimpleNamespace(
    **{"temperature": 1.0, "policy_loss_type": "dual_clip", "eps_clip_low": 0.2, "eps_clip_high": 0.3},
    **{"clip_ratio_c": 3.0, "use_kl_loss": True, "kl_loss_coef": 0.05, "kl_estimator_type": "k3"},
)


def meet(path: str, held: str) -> dict[str, Any]:
    """On two data-parallel processes: what both examples give, and what Policy gives by itself."""
    samples, _ = saved_cases.read(held)
    run = RunConfig(parallel=ParallelConfig(), model=ModelConfig(hf_path=path, dtype="fp32"))
    policy = policy_in_ranks.policy_of(path, run.parallel, 300)
    rank = torch.distributed.get_rank()
    mine = [samples[0], samples[1]] if rank else [samples[2]]
    every = [sample | {"loss_mask": torch.ones(len(sample["input_ids"]))} for sample in mine]
    scores = [torch.nn.functional.pad(x, (1, 0)) for x in policy.logprobs(every).log_probs]
    return _meet_skyrl(path, run, policy, mine, scores) | _meet_verl(path, run, policy, mine)


def _meet_skyrl(path: str, run: RunConfig, policy: Any, mine: list[dict], scores: list) -> dict[str, Any]:
    worker = example("skyrl_worker.PolicyWorker")(
        SimpleNamespace(algorithm=RULES, max_tokens_per_microbatch=300)
    )
    worker.run = run
    worker.init_model(path)
    batch = SkyRLBatch(mine, scores)
    output = worker.forward(batch)
    off = [
        (torch.tensor(row["logprobs"]) - expected).abs().max().item()
        for row, expected in zip(output.loss_fn_outputs, batch["action_log_probs"], strict=True)
    ]
    moved = dict(batch) | {"action_log_probs": batch["action_log_probs"] - 0.05}
    batch.update(moved)
    learned = worker.forward_backward(batch)

    def loss(log_probs, _, fields):
        clipped = losses.ppo_clip(log_probs, fields["old"], fields["advantage"], None, 0.2, 0.3, 3.0)
        return clipped + losses.kl_penalty(log_probs, fields["base"], 0.05 / 3, fields["share"])

    given = []
    for sample, score in zip(mine, scores, strict=True):
        mask = sample["loss_mask"].clone()
        mask[: max(0, len(mask) - batch.metadata["response_length"])] = False
        share = 1 / mask.sum()
        given.append(sample | {"loss_mask": mask, "old": score - 0.05, "base": score - 0.1, "share": share})
    logs = policy.forward_backward(given, loss, 1, fields=["old", "advantage", "base", "share"])
    found = {"skyrl scores": max(off), "skyrl loss": (learned.metrics["policy_loss"], logs["loss"])}
    found["skyrl outputs"] = [len(each["logprobs"]) for each in learned.loss_fn_outputs]
    found["skyrl wanted"] = [int(each["loss_mask"][1:].sum()) for each in given]
    found["skyrl norm"] = worker.optim_step(), policy.step()
    return found


class Rows(dict):
    """What the engine asks of verl's TensorDict, where tensordict is not installed."""

    @staticmethod
    def assign_non_tensor(data: Rows, **values: Any) -> None:
        data.update(values)

    @staticmethod
    def index_select_tensor_dict(data: Rows, numbers: list[int]) -> Rows:
        def chosen(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_nested:
                rows = value.unbind()
                return torch.nested.as_nested_tensor([rows[n] for n in numbers], layout=torch.jagged)
            return [value[n] for n in numbers] if isinstance(value, list) else value

        return Rows({key: chosen(value) for key, value in data.items()})


def verl_sft_loss(model_output: dict, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
    """As verl.workers.utils.losses.sft_loss without padding."""
    log_probs, mask = model_output["log_probs"].values(), data["loss_mask"].values().roll(-1)
    loss = -(log_probs * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    return loss, {"tokens": int(mask.sum())}


def verl_data(mine: list[dict]) -> Rows:
    def nested(key: str) -> torch.Tensor:
        return torch.nested.as_nested_tensor([sample[key].long() for sample in mine], layout=torch.jagged)

    images = [{k: sample[k] for k in ("pixel_values",) if k in sample} for sample in mine]
    return Rows(
        input_ids=nested("input_ids"),
        loss_mask=nested("loss_mask"),
        multi_modal_inputs=images,
        temperature=1.0,
    )


def _meet_verl(path: str, run: RunConfig, policy: Any, mine: list[dict]) -> dict[str, Any]:
    engine = example("verl_engine.PolicyEngine")(SimpleNamespace(local_path=path), None, None, None)
    engine.run, engine.max_tokens, engine.tools = run, 300, Rows
    engine.initialize()
    mine = [
        sample | {"loss_mask": sample["loss_mask"].index_fill(0, torch.tensor([0]), 0)} for sample in mine
    ]
    data = verl_data(mine)
    scored = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]["log_probs"]
    fresh = policy_in_ranks.policy_of(path, run.parallel, 300)
    whole = [sample | {"loss_mask": torch.ones(len(sample["input_ids"]))} for sample in mine]
    ours = fresh.logprobs(whole).log_probs
    off = [(a[:-1] - b).abs().max().item() for a, b in zip(scored.unbind(), ours, strict=True)]
    learned = engine.forward_backward_batch(data, verl_sft_loss)
    sums = torch.tensor(sum(float(sample["loss_mask"].sum()) for sample in mine))
    torch.distributed.all_reduce(sums)

    def loss(log_probs, _, fields):
        return losses.policy_gradient(log_probs, torch.ones_like(log_probs))

    logs = fresh.forward_backward(mine, loss, sums.item())
    found = {"verl scores": max(off), "verl loss": (learned["loss"][0], logs["loss"])}
    found["verl tokens"] = sum(learned["metrics"]["tokens"]), int(sum(s["loss_mask"].sum() for s in mine))
    return found | {"verl norm": (engine.optimizer_step(), fresh.step())}


# ---- the tests


@pytest.mark.parametrize("name", PUBLISHED)
def test_methods_take_what_is_published(name):
    """With these names, and nothing else that has to be given."""
    ours = example(name)
    for method, wanted in PUBLISHED[name].items():
        found = getattr(ours, method)
        if not callable(found):
            assert wanted == []  # a property
            continue
        parameters = [each for each in inspect.signature(found).parameters.values() if each.name != "self"]
        optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        assert [each.name for each in parameters][: len(wanted)] == wanted, method
        needed = [p for p in parameters[len(wanted) :] if p.default is p.empty and p.kind not in optional]
        assert needed == [] or method.startswith("get_data_parallel")


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interfaces")
    path = build_tiny_checkpoint("gemma3", folder / "checkpoint")
    torch.save((policy_in_ranks.samples_of("gemma3", path), None), folder / "held.pt")
    return run_distributed(2, meet, str(path), str(folder / "held.pt"), timeout=600)


@pytest.mark.soak
def test_skyrl_gets_scores_and_the_step_of_its_loss(met):
    for found in met:
        assert found["skyrl scores"] == 0
        assert found["skyrl loss"][0] == pytest.approx(found["skyrl loss"][1], abs=1e-5)
        assert found["skyrl norm"][0] == pytest.approx(found["skyrl norm"][1], rel=1e-5)
        assert found["skyrl outputs"] == found["skyrl wanted"]


@pytest.mark.soak
def test_verl_gets_scores_and_the_step_of_its_loss(met):
    for found in met:
        assert found["verl scores"] <= 1e-6
        assert found["verl loss"][0] == pytest.approx(found["verl loss"][1], abs=1e-5)
        assert found["verl norm"][0] == pytest.approx(found["verl norm"][1], rel=1e-5)
        assert found["verl tokens"][0] == found["verl tokens"][1] > 0
