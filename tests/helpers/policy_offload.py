"""What `test_rl_memory.py` runs: policies whose memory goes to the host and comes back between calls."""

from __future__ import annotations

from typing import Any

import policy_in_ranks
import saved_cases
import torch

from megatron_vlm.config import ParallelConfig

# name -> processes, layout, dtype
CASES = {
    "bf16, shares": (2, ParallelConfig(), "bf16"),
    "fp32, shares": (2, ParallelConfig(), "fp32"),
    "fp32, whole optimizer": (2, ParallelConfig(tp=2, distributed_optimizer=False), "fp32"),
    "bf16, whole optimizer": (2, ParallelConfig(pp=2, distributed_optimizer=False), "bf16"),
}


def measure(path: str, held: str, cases: list[str]) -> dict[str, Any]:
    from megatron_vlm.rl import memory

    memory.SMALLEST, memory.LARGEST = 64, 1024  # so that tiny storages have several pieces
    samples, _ = saved_cases.read(held)
    return {name: _measure(path, samples, *CASES[name][1:]) for name in cases}


def _measure(path: str, samples: list, layout: ParallelConfig, dtype: str) -> dict[str, Any]:
    def backward(policy, part: list) -> dict:
        return policy.forward_backward(part, policy_in_ranks.loss, 5, entropy=True, fields=["advantage"])

    stays = policy_in_ranks.policy_of(path, layout, 300, dtype=dtype)
    half, own = 1, policy_in_ranks.mine(samples)
    for _ in range(2):
        backward(stays, own[:half])
        backward(stays, own[half:])
        stays.step()
    found: dict[str, Any] = {"stays": _weights(stays), "stays norm": stays.step()}

    moves = policy_in_ranks.policy_of(path, layout, 300, dtype=dtype)
    before = _weights(moves)
    backward(moves, own[:half])
    grads = [buffer.grad_data.clone() for buffer in _buffers(moves)]
    moves.to("cpu")
    moves.to("cpu", grads=False)  # twice is as good as once
    found["pieces"] = max(len(kept) for *_, kept in moves.memory._away["model"])
    found["left at first"] = left(moves)
    found["said"] = {}
    for name, call in {
        "logprobs": lambda: moves.logprobs(own),
        "forward_backward": lambda: backward(moves, own),
        "step": moves.step,
        "hf_weights": lambda: next(moves.hf_weights()),
        "to": lambda: moves.to("tpu"),
    }.items():
        try:
            call()
        except ValueError as error:
            found["said"][name] = str(error)
    moves.to("cuda")
    found["as before"] = all(torch.equal(before[name], x) for name, x in _weights(moves).items())
    found["grads as before"] = all(map(torch.equal, grads, (b.grad_data for b in _buffers(moves))))
    found["grads are some"] = any(each.any().item() for each in grads)
    backward(moves, own[half:])
    moves.to("cpu", model=False)
    moves.logprobs(own)  # the weights are there
    moves.to("cuda", optimizer=False)
    moves.to("cuda", grads=False)
    moves.step()
    moves.to("cpu")
    found["left"] = left(moves)
    found["zeros kept"] = [kept is not None for _, _, kept in moves.memory._away["grads"]]
    moves.to("cuda")
    backward(moves, own[:half])
    backward(moves, own[half:])
    moves.step()
    found |= {"moves": _weights(moves), "moves norm": moves.step()}
    return found


def _buffers(policy) -> list:
    return [each for chunk in policy.chunks for each in chunk.buffers + chunk.expert_parallel_buffers]


def _weights(policy) -> dict[str, torch.Tensor]:
    named = (
        (f"{n}.{name}", param) for n, c in enumerate(policy.chunks) for name, param in c.named_parameters()
    )
    return {name: param.detach().clone() for name, param in named}


def left(policy) -> dict[str, int]:
    """Bytes that are there, by an own way to all tensors."""
    tensors = {
        "weights": [param for chunk in policy.chunks for param in chunk.parameters()],
        "buffers": [each.param_data for each in _buffers(policy) if each.param_data is not None],
        "gradients": [each.grad_data for each in _buffers(policy)],
        "moments": [
            state[name]
            for part in policy.optimizer.chained_optimizers
            for state in part.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ],
        "main weights": [
            param
            for part in policy.optimizer.chained_optimizers
            for group in part.optimizer.param_groups
            for param in group["params"]
        ],
    }
    return {
        name: (len(found), sum(each.untyped_storage().nbytes() for each in found))
        for name, found in tensors.items()
    }
