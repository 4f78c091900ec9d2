"""What `test_alarm.py` runs: a policy of two ranks, of which the second fails alone in a pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import policy_in_ranks
import rollout_engines
import saved_cases
import torch
from policy_limits import said
from torch import distributed as dist

from megatron_vlm.config import ParallelConfig
from megatron_vlm.job.alarm import alarm

TP, PP, DP = ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig()
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB."


def fails(name: str, path: str, held: str, heard: str) -> None:
    """The first rank waits for the second, whose caller catches what it raises, calls again, and goes on."""
    samples, _ = saved_cases.read(held)
    layout, call, plant = CASES[name]
    policy = policy_in_ranks.policy_of(path, layout, 300)
    if dist.get_rank() == 1:
        plant(policy)
        first, again = said(lambda: call(policy, samples)), said(lambda: policy.logprobs(samples))
        Path(heard).write_text(f"{first}\n{again}\n{policy.chunks[0].training}\n")
    else:
        call(policy, samples)
    time.sleep(1000)


def score_twice(policy, samples: list[dict]) -> None:
    """A rank that scores other samples waits for the other in its next call."""
    policy.logprobs(samples)
    policy.logprobs(samples)


def learn(policy, samples: list[dict]) -> None:
    policy.forward_backward(samples, policy_in_ranks.loss, 5, entropy=True, fields=["advantage"])


def learn_twice(policy, samples: list[dict]) -> None:
    """With a step between, after which a rank may wait for the other in its next call."""
    learn(policy, samples)
    policy.step()
    learn(policy, samples)


def answer(policy, _) -> None:
    from megatron_vlm.rl.rollouts import OwnEngine

    OwnEngine(2, 8)(policy, rollout_engines.prompts_of(policy.source))


def fail(*_) -> None:
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def layer(policy) -> torch.nn.Module:
    return policy.chunks[0].module.language_model.decoder.layers[-1]


def in_forward(policy) -> None:
    layer(policy).mlp.register_forward_hook(fail)


def in_backward(policy) -> None:
    layer(policy).mlp.register_full_backward_hook(fail)


def at_a_token(policy) -> None:
    """The prompts go through, and so do the first tokens."""
    left = iter(range(3))
    layer(policy).mlp.register_forward_hook(lambda *_: None if next(left, None) is not None else fail())


def in_step(policy) -> None:
    policy.optimizer.chained_optimizers[0].optimizer.step = fail


CASES: dict[str, tuple[ParallelConfig, Callable, Callable]] = {
    "forward, TP2": (TP, learn, in_forward),
    "backward, PP2": (PP, learn, in_backward),
    "backward, DP2": (DP, learn, in_backward),
    "scores, DP2": (DP, score_twice, in_forward),
    "generation, TP2": (TP, answer, at_a_token),
    "step, TP2": (TP, learn_twice, in_step),
}


def stuck() -> None:
    """The second rank fails and its caller goes on; the first does not look at what it waits for."""
    dist.init_process_group("gloo")
    try:
        with alarm():
            if dist.get_rank() == 1:
                raise MemoryError("no more\x1b[31m")
            time.sleep(1000)
    except MemoryError:
        time.sleep(1000)
