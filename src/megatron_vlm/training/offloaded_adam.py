"""Adam whose numbers lie in host memory: the fp32 parameters and both moments, 12 bytes a parameter in bf16.

A step brings them to the device piece by piece, computes there and sends them back, so it is the same to the
bit as without. Megatron 0.19's own offload computes on the host, keeps bf16 parameters by an option that asks
for Transformer Engine, and chooses by `is_cuda` what it moves: no CPU could prove it. On CUDA this has not
run yet; copies to and from pinned memory then queue behind each other, and the host waits for none.
"""

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

KEPT = ("param", "exp_avg", "exp_avg_sq")
PIECE = 2**26  # numbers that are on the device at a time


def offload(part: DistributedOptimizer) -> None:
    """Moves what torch's Adam keeps to host memory, before its first step.

    Each fp32 copy of parameters in bf16 becomes a tensor of the same shape without memory, which has a
    gradient and stands for the copy in Megatron's lists. Parameters in fp32 are the model's own, and stay.
    """
    adam = part.optimizer
    adam.__class__ = OffloadedAdam
    mains = sum(part.shard_fp32_from_float16_groups, [])
    models = sum(part.shard_float16_groups, [])
    model_of = {id(main): model for main, model in zip(mains, models, strict=True)}
    for group in adam.param_groups:
        for main in group["params"]:
            state = adam.state[main]
            state["step"] = torch.tensor(0.0, device=main.device)
            state |= {name: _on_host(main.detach()) for name in KEPT}
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
            main.model = model_of.get(id(main))
            if main.model is None:
                del state["param"]
            else:
                main.data = main.new_zeros(1).expand(main.shape)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned beside CUDA; on `meta` another one there."""
    host = tensor.device if tensor.is_meta else torch.device("cpu")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=host, pin_memory=tensor.is_cuda).copy_(tensor)


def offloaded_bytes(optimizer: MegatronOptimizer) -> int:
    """The bytes of what lies in host memory."""
    adams = [part.optimizer for part in optimizer.chained_optimizers]
    states = [state for adam in adams if isinstance(adam, OffloadedAdam) for state in adam.state.values()]
    return sum(state[name].nbytes for state in states for name in KEPT if name in state)


class OffloadedAdam(torch.optim.AdamW):
    """torch's AdamW after `offload`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for main in group["params"]:
                if main.grad is not None:
                    for start in range(0, len(main), PIECE):
                        self._step_of(main, group, slice(start, start + PIECE))
                    self.state[main]["step"] += 1

    def _step_of(self, main: Tensor, group: dict[str, Any], piece: slice) -> None:
        state = self.state[main]
        kept = {name: state[name][piece] for name in KEPT if name in state}
        on_device = {name: t.to(main.device, non_blocking=True, copy=True) for name, t in kept.items()}
        param = on_device.get("param", main[piece])
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        torch._fused_adamw_(
            [param],
            [main.grad[piece]],
            [on_device["exp_avg"]],
            [on_device["exp_avg_sq"]],
            [],
            [state["step"] + 1],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **settings,
        )
        for name, tensor in kept.items():
            tensor.copy_(on_device[name], non_blocking=True)
        if main.model is not None:
            main.model[piece].copy_(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the settings of groups. torch's would move the state to the device of parameters."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
