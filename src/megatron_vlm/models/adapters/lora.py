"""One adapter, and what the adapters of one of our linears, or of a rank's experts, add to its output.

Adapters of routed experts are peft's `target_parameters`, with expert parallelism.
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import linear

from megatron_vlm.models.adapters.targets import Target
from megatron_vlm.parallel.linears import grouped_product


class Lora(nn.Module):
    """This rank's part of the adapter of one HF linear: `lora_A` (r, in), `lora_B` (out, r) and, with DoRA
    (arXiv 2402.09353), `lora_magnitude_vector` (out,), which `LoRAHook.begin` fills.

    Where tensor parallelism cuts the base weight along its outputs, B is cut like it and A is whole; where it
    cuts the inputs, A is cut and B is whole. `axes` has the axis along which each is cut, or None;
    `whole` the shapes of the whole ones.

    A starts as in peft (uniform, Kaiming with a = √5), from numbers that follow from `seed` and the module's
    name alone, so that every layout starts from the same; B starts as zero.
    """

    def __init__(self, target: Target, base: Tensor, seed: int):
        super().__init__()
        axis, ranks = target.rule.operation.axis, 1
        if axis is not None:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
        out, width = target.out, target.width
        assert [out, width] == target.rule.operation.hf_shapes(base, ranks)[target.place]
        self.target, self.scale = target, target.scale
        self.whole = {"lora_A": [target.rank, width], "lora_B": [out, target.rank]}
        self.axes = {"lora_A": 1 if axis == 1 else None, "lora_B": 0 if axis == 0 else None}
        whole_A = initial_A(target, seed, base)
        if axis == 1:
            whole_A = whole_A.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
        self.lora_A = nn.Parameter(whole_A.to(base.device, base.dtype, copy=True).contiguous())
        self.lora_B = nn.Parameter(base.new_zeros(out // (ranks if axis == 0 else 1), target.rank))
        if target.dora:
            self.whole["lora_magnitude_vector"] = [out]
            self.axes["lora_magnitude_vector"] = self.axes["lora_B"]
            self.lora_magnitude_vector = nn.Parameter(base.new_ones(len(self.lora_B)))
        for name, cut in self.axes.items():
            set_tensor_model_parallel_attributes(getattr(self, name), cut is not None, cut or 0, 1)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have the other parts of what is cut."""
        return parallel_state.get_tensor_model_parallel_group()

    def as_in_peft(self, name: str, shards: list[Tensor]) -> Tensor:
        """Peft's whole parameter `name` from all ranks' parts, or from one that is whole."""
        axis = self.axes[name]
        if axis is None:
            return shards[0]
        operation, full_shape = self.target.rule.operation, self.whole[name]
        parts = [operation.in_blocks(shard, full_shape, len(shards)) for shard in shards]
        return torch.cat([part for block in zip(*parts, strict=True) for part in block], dim=axis)

    def part(self, name: str, values: Any) -> Tensor:
        """This rank's part of parameter `name`, read from peft's whole one."""
        if self.axes[name] is None:
            return values[:]
        return self.target.rule.operation.part(values, self.whole[name], self.group.rank(), self.group.size())

    def sharded(self, key: str, name: str) -> ShardedTensor | ShardedTensorFactory:
        """Parameter `name` for a checkpoint."""
        tensor, axis = getattr(self, name), self.axes[name]
        if axis is None:
            return make_sharded_tensor_for_checkpoint(tensor, key)
        sharded = make_tp_sharded_tensor_for_checkpoint(tensor, key, tp_axis=axis)
        blocks = self.target.rule.operation.blocks(self.whole[name][axis])
        sizes = [block // self.group.size() for block in blocks]
        if len(sizes) == 1:
            return sharded
        return _split_tensor_factory(sharded, sizes, [str(number) for number in range(len(sizes))], axis)


def initial_A(target: Target, seed: int, base: Tensor) -> Tensor:
    """(r, in), or (experts · r, in)."""
    shape = target.rank * (target.experts or 1), target.width
    if base.is_meta:
        return base.new_empty(shape)
    numbers = torch.Generator(device="cpu").manual_seed(seed + (zlib.crc32(target.module.encode()) << 20))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=numbers)


class LoRAHook:
    """A linear of ours with the adapters of the HF linears that it holds; a forward hook of the linear.

    `parts` are those linears in the order of the weight's rule, None where one has no adapter: its rows of
    the output stay as they are. `heights` are their rows on this rank. `order` says which of these, counted
    through all parts, each row of ours is; None: the same. Along `axis` tensor parallelism cuts the weight;
    None: a replica of the tower.
    """

    def __init__(self, module: nn.Module, loras: dict[int, Lora], target: Target, dropout: float):
        """`loras` are by the place of their linear in `target.rule`."""
        operation = target.rule.operation
        self.weight = module.weight
        numbers = torch.arange(len(self.weight), device="cpu")
        rows = [torch.cat([view.flatten() for view in views]) for views in operation.views(numbers)]
        self.parts = [loras.get(place) for place in range(len(rows))]
        self.heights = list(map(len, rows))
        self.order = torch.cat(rows).argsort().to(self.weight.device) if len(rows) > 1 else None
        self.axis = operation.axis
        self.sequence_parallel = getattr(module, "sequence_parallel", False)
        self.dropout = dropout
        self.dora = target.dora
        self._squares: Tensor | None = None  # (out,) norms of the weight's rows, squared: they never change
        for lora in self.loras:
            for name, cut in lora.axes.items():
                if self.axis is None and target.weight.startswith("vision."):  # replicas see other images
                    getattr(lora, name).average_gradients_across_tp_domain = True
                elif cut is None:  # what is whole has its gradient from this rank's tokens
                    getattr(lora, name).sequence_parallel = self.sequence_parallel
        module.register_forward_hook(self)

    @property
    def loras(self) -> Iterator[Lora]:
        return (part for part in self.parts if part is not None)

    def __call__(self, module: nn.Module, inputs: tuple, output: Any) -> Any:
        y, *bias = output if isinstance(output, tuple) else (output,)
        drops = module.training and self.dropout > 0
        x = self._dropped(inputs[0]) if drops else inputs[0]
        low = self._shared(linear(x, self.A(y.dtype)))
        if not self.dora:
            y = self._plus(y, low)
        else:
            inside = None if getattr(module, "skip_bias_add", False) else module.bias
            frozen = module.forward(x) if drops else output  # without this hook
            of_x = frozen[0] if isinstance(frozen, tuple) else frozen
            of_x, factors = of_x if inside is None else of_x - inside, self.factors().to(y.dtype)
            adapted = self._plus(of_x, low) * factors
            # the weights' own part of y never loses inputs, only what is to change it, as in peft
            y = y + adapted - of_x if drops else adapted if inside is None else adapted + inside
        return (y, *bias) if isinstance(output, tuple) else y

    def _plus(self, y: Tensor, low: Tensor) -> Tensor:
        """Returns y + B low."""
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), self.B(y.dtype).t()).view(y.shape)

    def A(self, dtype: torch.dtype) -> Tensor:
        """(Σ r, in) of all parts."""
        parts = [lora.lora_A.to(dtype) for lora in self.loras]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def B(self, dtype: torch.dtype) -> Tensor:
        """(out, Σ r), scaled, in the order of our rows; zero but for each part's own rows and columns."""
        blocks = [
            self.weight.new_zeros(height, 0, dtype=dtype)
            if lora is None
            else lora.lora_B.to(dtype) * lora.scale
            for lora, height in zip(self.parts, self.heights, strict=True)
        ]
        if self.order is None:
            return blocks[0]
        return torch.block_diag(*blocks).index_select(0, self.order)

    def factors(self) -> Tensor:
        """(out,) with DoRA: each row's magnitude over the norm of W + B A, in fp32; 1 without an adapter."""
        zeros, parts = self.weight.new_zeros, list(zip(self.parts, self.heights, strict=True))
        magnitudes = [zeros(height) if lora is None else lora.lora_magnitude_vector for lora, height in parts]
        adapted = [
            torch.full_like(part, lora is not None) for part, (lora, _) in zip(magnitudes, parts, strict=True)
        ]
        magnitude = torch.cat(magnitudes).float()
        is_adapted = torch.cat(adapted)
        if self.order is not None:
            magnitude = magnitude.index_select(0, self.order)
            is_adapted = is_adapted.index_select(0, self.order)
        return torch.where(is_adapted > 0, magnitude / self.norms(), 1.0)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """(out,) of the rows of W + B A, in fp32 and without forming B A: |w + b A|² = |w|² + 2 b·(A w) +
        b·(A Aᵀ b). As in the paper, no gradient goes through them."""
        if self._squares is None:
            self._squares = torch.linalg.vector_norm(self.weight, dim=1, dtype=torch.float32).square()
        A, B = self.A(self.weight.dtype), self.B(torch.float32)
        mixed = 2 * (self.weight @ A.t()).float() + B @ (A @ A.t()).float()
        squares = self._squares + (B * mixed).sum(1)
        if self.axis == 1:  # other ranks have the other columns
            dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        return squares.clamp_min(0).sqrt()

    @torch.no_grad()
    def begin(self) -> None:
        """With DoRA, takes the magnitudes of the weight's rows, so that nothing is changed at first."""
        if self.dora:
            norms = self.norms()
            if self.order is not None:
                norms = torch.empty_like(norms).index_copy(0, self.order, norms)
            for lora, part in zip(self.parts, norms.split(self.heights), strict=True):
                if lora is not None:
                    lora.lora_magnitude_vector.copy_(part)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight with what its adapters stand for, added in fp32. With DoRA, a collective."""
        merged = self.weight.float() + self.B(torch.float32) @ self.A(torch.float32)
        return (merged * self.factors()[:, None] if self.dora else merged).to(self.weight.dtype)

    def _shared(self, low: Tensor) -> Tensor:
        """A x of the tokens whose outputs this rank computes, whole: the only numbers that ranks exchange."""
        if self.axis == 0 and self.sequence_parallel:
            return gather_from_sequence_parallel_region(low)
        if self.axis == 0:
            return copy_to_tensor_model_parallel_region(low)
        if self.axis == 1 and self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low)
        if self.axis == 1:
            return reduce_from_tensor_model_parallel_region(low)
        return low

    def _dropped(self, x: Tensor) -> Tensor:
        """Drops by the same numbers on ranks that have the same inputs. Those of the tower come from the
        generator that its recomputation restores."""
        numbers = nullcontext()
        if self.axis == 0 and not self.sequence_parallel:
            numbers = get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name())
        elif self.axis is not None:
            numbers = get_cuda_rng_tracker().fork()
        with numbers:
            return nn.functional.dropout(x, self.dropout)


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
