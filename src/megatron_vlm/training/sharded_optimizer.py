"""Megatron's distributed optimizer, whose share of each rank is saved and loaded as boxes of whole tensors.

It lays all parameters end to end and gives each data-parallel rank a piece. Megatron's fully reshardable
format gathers the pieces of all ranks into whole parameters, in fp32 in the host memory of every rank, to
save and again to load. A run of a parameter's numbers, however, is a few boxes of the tensor that it is: the
rest of a row, whole rows, the beginning of a row. So each rank writes and reads the boxes of its own runs.
The files hold the same tensors under the same names, and any layout reads them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_vlm.training.offloaded_adam import OffloadedAdam


class ShardedOptimizer(DistributedOptimizer):
    """Megatron's (0.19) with a share of its own in checkpoints, and for torch's Adam, offloaded or not."""

    def number_parameters(self) -> None:
        """Numbers the parameters of each group as Adam has them: those in fp32 before those in bf16.

        Megatron numbers them as buffers have them. So with both types in a group it would save, and load, one
        parameter's state as another's.
        """
        for group, models in enumerate(zip(self.model_fp32_groups, self.model_float16_groups, strict=True)):
            for place, parameter in enumerate(chain.from_iterable(models)):
                self.model_param_group_index_map[parameter] = group, place

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: Any = None
    ) -> dict[int, dict[str, dict[int, ShardedTensor]]]:
        """The boxes of this rank's share in order: by number of the parameter, then by name of its state.

        They are views of the state itself, so to read into them is to restore it.
        """
        torch.cuda.synchronize()  # what was sent to host memory has arrived
        entries = nested_values(model_sharded_state_dict)
        of_parameter = {id(getattr(entry, "data", None)): entry for entry in entries}
        state = {}
        for number, parameter in enumerate(self.model_param_gbuf_map):
            entry = of_parameter[id(parameter)]
            first = self._get_model_param_range_map(parameter)["param"].start
            tensors = self._get_main_param_and_optimizer_states(parameter)
            state[number] = {
                name: dict(enumerate(_boxes_of(entry, name, tensors[name].detach(), first)))
                for name in ("param", *self.optimizer_state_keys)
            }
        return state

    def load_parameter_state_from_fully_reshardable(self, state_dict: dict) -> None:
        """Does nothing: what was read is where it belongs."""

    def _copy_main_params_to_model_params(self) -> None:
        if not isinstance(self.optimizer, OffloadedAdam):  # which has done it
            super()._copy_main_params_to_model_params()

    def state_dict(self) -> dict[str, Any]:
        """Megatron's state, also on a rank whose share has no parameter, where Megatron finds no step.

        The step of such a rank is never saved, because rank 0 always has parameters.
        """
        if self.optimizer.state:
            return super().state_dict()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {"optimizer": {"param_groups": [{**group, "step": 0.0} for group in groups]}}


def _boxes_of(
    entry: ShardedTensor | ShardedTensorFactory, name: str, run: Tensor, first: int
) -> Iterator[ShardedTensor]:
    """The boxes of a `run` of numbers of a parameter's state, from its number `first` on, in their order.

    `entry` says which part of which tensors of a checkpoint the parameter is.
    """
    changes = {
        "key": ".".join(("optimizer", "state", name, entry.key)),
        "data": torch.empty(entry.data.shape, dtype=run.dtype, device="meta"),
        "replica_id": (*entry.replica_id[:2], 0),  # other data-parallel ranks have other runs
    }
    if isinstance(entry, ShardedTensorFactory):
        parts = nested_values(replace(entry, **changes).build())
    else:
        parts = [replace(entry, dtype=run.dtype, **changes)]
    for part in parts:
        assert part.data.is_contiguous()
        begins = part.data.storage_offset()  # among the parameter's numbers
        sizes = (1,) * part.prepend_axis_num + part.local_shape
        start = max(first, begins)
        stop = min(first + len(run), begins + part.data.numel())
        for place, box in boxes(sizes, start - begins, stop - begins):
            yield replace(
                part,
                data=run[start - first :][: math.prod(box)].view(box),
                local_shape=box,
                global_offset=tuple(map(sum, zip(part.global_offset, place, strict=True))),
                axis_fragmentations=None,
                prepend_axis_num=0,
            )
            start += math.prod(box)


def boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The fewest boxes, as (place, sizes), of a contiguous array's numbers from `start` to before `stop`."""
    if not sizes and start < stop:
        yield (), ()
    row = math.prod(sizes[1:])
    while sizes and start < stop:
        number, begins = divmod(start, row)
        if rows := 0 if begins else (stop - start) // row:
            yield (number, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
            start += rows * row
        else:
            ends = min(stop - number * row, row)
            inner = boxes(sizes[1:], begins, ends)
            yield from (((number, *place), (1, *box)) for place, box in inner)
            start = number * row + ends
