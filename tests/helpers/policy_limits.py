"""What `test_policy_limits.py` runs: a policy that is given what it cannot take, and what else it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import policy_in_ranks
import saved_cases
import torch
from torch import distributed as dist

from megatron_vlm.config import AdapterConfig, ParallelConfig, RunConfig

FIELDS = ["advantage"]


def loss(log_probs, _, fields):
    from megatron_vlm.rl import losses

    return losses.policy_gradient(log_probs, fields["advantage"])


def said(call: Callable[[], Any]) -> str:
    """The kind and text of what a call raises; empty if it returns."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any kind is looked at
        return f"{type(error).__name__}: {error}"
    return ""


def gradients(policy) -> torch.Tensor:
    """Of all calls since the last step, as this rank has them before they are reduced."""
    found = torch.cat([buffer.grad_data for buffer in policy.chunks[0].buffers]).clone()
    policy._empty()
    return found


def measure(path: str, held: str, run_dir: str) -> dict[str, Any]:
    samples, _ = saved_cases.read(held)
    found = {"errors": errors(path, samples), "kinds": kinds(path, samples)}
    return found | {"run": from_run(path, samples, run_dir), "shared": shared(path, samples)}


def errors(path: str, samples: list[dict]) -> dict[str, Any]:
    """On two data-parallel ranks: what calls raise if the second brings something wrong, and leave."""
    from megatron_vlm.rl.losses import Loss

    policy, second = policy_in_ranks.policy_of(path, ParallelConfig(), 300), dist.get_rank() == 1

    def learn(given: list = samples, function=loss, normalizer: float = 5, **more) -> dict[str, float]:
        return policy.forward_backward(given, function, normalizer, fields=FIELDS, **more)

    first, weights = learn(), [param.clone() for param in policy.chunks[0].parameters()]
    expected, found = gradients(policy), {}

    def raised(*_) -> None:
        raise KeyError("critic")

    def turned(total: Callable, logs: Callable = lambda x: {}) -> Callable:
        """A loss function that is right on the first rank."""
        return lambda x, *rest: Loss(total(x), logs(x)) if second else loss(x, *rest)

    short = samples[1] | {"loss_mask": samples[1]["loss_mask"][:-1]}
    lacking = {key: value for key, value in samples[1].items() if key != "advantage"}
    unknown = samples[1] | {"advantage": samples[1]["advantage"] * math.nan}
    calls = {
        "sample": lambda: learn([samples[0], short] if second else samples),
        "logprobs": lambda: policy.logprobs([samples[0], short] if second else samples),
        "field": lambda: learn([samples[0], lacking] if second else samples),
        "function": lambda: learn(function=raised if second else loss),
        "loss": lambda: learn([unknown, samples[0]] if second else samples),
        "normalizers": lambda: learn(normalizer=5 + second),
        "normalizer": lambda: learn(normalizer=0),
        "no number": lambda: learn(normalizer=math.nan),
        "none": lambda: learn(normalizer=None),
        "fields": lambda: policy.forward_backward(samples, loss, 5, fields="advantage" if second else FIELDS),
        "tensor": lambda: learn(function=(lambda x, *_: x.sum()) if second else loss),
        "axis": lambda: learn(function=turned(lambda x: x.sum()[None])),
        "no gradient": lambda: learn(function=turned(lambda x: x.detach().sum())),
        "log": lambda: learn(function=turned(torch.sum, lambda x: {"mean": x.mean()})),
    }
    for name, call in calls.items():
        text = said(call)
        learn()  # what failed has left nothing
        found[name] = text, torch.equal(gradients(policy), expected), policy.chunks[0].training
    found["nothing"] = learn([])
    learn(function=turned(lambda x: (x.sum() * 0).sqrt()))  # 0, and its gradient is infinite times 0
    found["step"] = said(policy.step)
    found["same weights"] = all(map(torch.equal, weights, policy.chunks[0].parameters()))
    found["temperatures"] = [
        said(lambda t=t: policy.logprobs(samples, t)) for t in (0, -1, 1e-40, math.inf, "1")
    ]
    found["again"] = learn() == first
    return found


def kinds(path: str, samples: list[dict]) -> dict[str, Any]:
    """Under tensor parallelism: how far the scores of samples in other forms are, and what else is said."""
    from megatron_vlm.generation.generate import generate
    from megatron_vlm.rl.containers import TensorBatch
    from megatron_vlm.rl.losses import Loss
    from megatron_vlm.rl.rollouts import OwnEngine

    policy, second = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300), dist.get_rank() == 1
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        scores = policy.logprobs(samples, entropy=True)
    before = scores.log_probs
    found: dict[str, Any] = {"kept": len(saved), "gradient": before[0].requires_grad}

    def product(log_probs, _, fields):
        return Loss((log_probs * fields["advantage"]).sum(), {})

    def changed(name: str, turn: Callable) -> list[dict]:
        return [{k: turn(v) if k == name else v for k, v in sample.items()} for sample in samples]

    forms = {
        "numpy": [{key: value.numpy() for key, value in sample.items()} for sample in samples],
        "fp64": changed("pixel_values", torch.Tensor.double),
        "int mask": changed("loss_mask", torch.Tensor.int),
        "float mask": changed("loss_mask", torch.Tensor.float),
        "int32": changed("input_ids", torch.Tensor.int),
        "batch": TensorBatch.from_samples(samples),
        "tuple": tuple(samples),
        "gradients": changed("pixel_values", lambda x: x.clone().requires_grad_()),
    }
    for name, form in forms.items():
        scores = policy.logprobs(form).log_probs
        found[name] = max((a - b).abs().max().item() for a, b in zip(scores, before, strict=True))
    given = torch.nn.Parameter(torch.ones(len(samples[0]["input_ids"])))
    policy.forward_backward([samples[0] | {"advantage": given * 2}], product, 1, fields=FIELDS)
    found["a field's gradient"] = given.grad is not None
    found["fp64 field"] = said(
        lambda: policy.forward_backward(
            [samples[0] | {"advantage": np.ones(len(samples[0]["input_ids"]))}], loss, 1, fields=FIELDS
        )
    )
    policy._empty()
    found["other samples"] = said(lambda: policy.logprobs(samples[1:] if second else samples))
    other = samples[1] | {"input_ids": samples[1]["input_ids"].roll(1 if second else 0)}
    found["other tokens"] = said(lambda: policy.logprobs([other]))
    rollout = [each.clone() for each in before]
    found["compare fewer"] = said(lambda: policy.compare(samples, rollout[:-1]))
    rollout[1][samples[1]["loss_mask"][1:].nonzero()[-1]] = math.nan
    found["compare"] = policy.compare(samples, rollout)["after image"].max
    found["compared"] = policy.compare(samples, rollout)["after image"].worst_sample
    ids = samples[1]["input_ids"]
    prompt = {"input_ids": ids, "position_ids": torch.arange(len(ids)), "visual_inputs": None}
    found["prompt"] = said(lambda: generate(policy.chunks, [prompt], 2))
    found["goes on"] = all(map(torch.equal, policy.logprobs(samples).log_probs, before))
    policy.to("cpu")
    found["engine"] = said(lambda: OwnEngine(1, 1)(policy, []))
    return found


def from_run(path: str, samples: list[dict], run_dir: str) -> dict[str, Any]:
    """A policy that takes a step and is saved, and those that other layouts load."""
    from megatron_vlm.parallel import setup
    from megatron_vlm.rl.policy import Policy
    from megatron_vlm.training import checkpoint

    found: dict[str, Any] = {}
    adapter = AdapterConfig(r=4, lora_alpha=8, target_modules="all-linear")
    for name, adapted in (("whole", None), ("adapters", adapter)):
        folder = f"{run_dir}/{name}"
        policy = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300, adapted)
        start = policy.logprobs(samples).log_probs
        policy.forward_backward(samples, loss, 5, fields=FIELDS)
        policy.step()
        trained = policy.logprobs(samples).log_probs
        checkpoint.save(folder, 7, policy.chunks, policy.optimizer, policy.scheduler)
        found[name] = {"moved": far(start, trained)}
        for layout in (ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig()):
            setup.reset_layout(layout, seed=2)
            config = RunConfig(run_dir=folder, parallel=layout)
            config.model.hf_path, config.model.dtype, config.adapter = path, "fp32", policy.config.adapter
            loaded = Policy.from_run(config, 300)
            found[name][f"tp {layout.tp} pp {layout.pp}"] = far(loaded.logprobs(samples).log_probs, trained)
            own = samples if layout.tp * layout.pp == 2 else samples[dist.get_rank() :: 2]
            loaded.forward_backward(own, loss, 5, fields=FIELDS)
            found[name][f"norm tp {layout.tp} pp {layout.pp}"] = loaded.step()
    config.run_dir = f"{run_dir}/none"
    found["none"] = said(lambda: Policy.from_run(config, 300))
    return found


def far(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def shared(path: str, samples: list[dict]) -> str:
    """What a second policy of another layout says."""
    from megatron_vlm.rl.policy import Policy

    policy = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300)
    config = RunConfig(model=policy.config.model, parallel=ParallelConfig())
    return said(lambda: Policy.from_hf(config, 300).logprobs(samples))
