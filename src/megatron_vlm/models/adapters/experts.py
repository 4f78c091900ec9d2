"""Adapters of routed experts: peft's `target_parameters`, with expert parallelism."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megatron_vlm.models.adapters.lora import Lora, initial_A
from megatron_vlm.models.adapters.targets import Target
from megatron_vlm.parallel.linears import grouped_product


class ExpertLora(Lora):
    """The adapters of this rank's experts: `lora_A` (X, r, in), `lora_B` (X, out, r).

    In peft (`lora.layer.ParamWrapper`) A is (E · r, in), expert by expert, and B (out, r · E), where
    neighbouring columns are of different experts.
    """

    def __init__(self, target: Target, base: Tensor, seed: int):
        nn.Module.__init__(self)
        assert base.shape[1:] == (target.out, target.width)
        local_experts, rank, columns = len(base), target.rank, target.rank * target.experts
        self.target, self.scale = target, target.scale
        self.whole = {"lora_A": [columns, target.width], "lora_B": [target.out, columns]}
        self.axes = {"lora_A": 0, "lora_B": 0}
        local_A = (
            initial_A(target, seed, base).unflatten(0, (-1, rank)).split(local_experts)[self.group.rank()]
        )
        self.lora_A = nn.Parameter(local_A.to(base.device, base.dtype, copy=True).contiguous())
        self.lora_B = nn.Parameter(base.new_zeros(local_experts, target.out, rank))
        for parameter in self.parameters():
            parameter.allreduce = False  # as the experts: gradients are summed over ranks that hold them

    @property
    def group(self) -> dist.ProcessGroup:
        return parallel_state.get_expert_model_parallel_group()

    def as_in_peft(self, name: str, shards: list[Tensor]) -> Tensor:
        experts = torch.cat(shards)
        return experts.flatten(0, 1) if name == "lora_A" else experts.permute(1, 2, 0).flatten(1)

    def part(self, name: str, values: Any) -> Tensor:
        local_experts = len(self.lora_A)
        first = self.group.rank() * local_experts
        if name == "lora_A":
            rank = self.target.rank
            return values[first * rank : (first + local_experts) * rank].unflatten(0, (local_experts, rank))
        experts = values[:].unflatten(1, (self.target.rank, self.target.experts))
        return experts[..., first : first + local_experts].permute(2, 0, 1)

    def sharded(self, key: str, name: str) -> ShardedTensor:
        replica = 0, 0, parallel_state.get_expert_data_parallel_rank()
        place = 0, self.group.rank(), self.group.size()
        return ShardedTensor.from_rank_offsets(key, getattr(self, name), place, replica_id=replica)


@dataclass
class LoRAExperts:
    """A projection of all experts of this rank, `weight` (X, out, in), and their adapters."""

    weight: nn.Parameter
    lora: ExpertLora

    def __call__(self, rows_ZD: Tensor, output: Tensor, ends_X: Tensor) -> Tensor:
        """The projection's output with what the adapters add; rows are sorted by expert."""
        low = grouped_product(rows_ZD, self.lora.lora_A.to(output.dtype), ends_X)
        B = self.lora.lora_B.to(output.dtype) * self.lora.scale
        return output + grouped_product(low, B, ends_X)

    def begin(self) -> None:
        """Nothing but DoRA's magnitudes, which these have not, begins with the weights' values."""

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weights with what their adapters stand for, added in fp32, one expert at a time."""
        merged = torch.empty_like(self.weight)
        for into, weight, A, B in zip(merged, self.weight, self.lora.lora_A, self.lora.lora_B, strict=True):
            into.copy_(torch.addmm(weight.float(), B.float(), A.float(), alpha=self.lora.scale))
        return merged
