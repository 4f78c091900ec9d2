"""Adam with its schedule, through Megatron-Core's optimizers; sharded checkpoints; host memory.

The state of Megatron's distributed optimizer is saved and loaded as boxes of whole tensors
(`ShardedOptimizer`). It lays all parameters end to end and gives each data-parallel rank a piece.
Megatron's fully reshardable format gathers the pieces of all ranks into whole parameters, in fp32 in the
host memory of every rank, to save and again to load. A run of a parameter's numbers, however, is a few
boxes of the tensor that it is: the rest of a row, whole rows, the beginning of a row. So each rank writes
and reads the boxes of its own runs. The files hold the same tensors under the same names, and any layout
reads them.

With `optimizer.offload` the fp32 parameters and both moments lie in host memory, 12 bytes a parameter in
bf16 (`offload`). A step brings them to the device bucket by bucket, computes there and sends them back, so
it is the same to the bit as without. While a bucket is updated and leaves, the next one arrives. Megatron
0.19's own offload (`HybridDeviceOptimizer`) overlaps copies, too. But it computes on the host, to other bits,
keeps gradients there besides, 16 bytes a parameter, and asks for Transformer Engine. The host waits for no
copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import LayerNorm, Parameter

from megatron_vlm.config import RunConfig
from megatron_vlm.models.layers.fused import RMSNorm
from megatron_vlm.parallel.pinned import host_tensors
from megatron_vlm.training.step import take_norms_on_device

KEPT = ("param", "exp_avg", "exp_avg_sq")
BUCKET = 2**25  # parameters whose state comes to the device at once; two of these are there at a time
ALIGNED = 64  # numbers: where parts of a bucket begin, so that kernels read and round all alike


def offload(part: DistributedOptimizer) -> None:
    """Moves what torch's Adam keeps to host memory, before its first step.

    Each fp32 copy of parameters in bf16 becomes a tensor of the same shape without memory, which has a
    gradient and stands for the copy in Megatron's lists. Parameters in fp32 are the model's own, and stay.
    """
    adam = part.optimizer
    adam.__class__ = OffloadedAdam
    adam.arriving = torch.cuda.Stream()
    adam.leaving = torch.cuda.Stream()
    mains = sum(part.shard_fp32_from_float16_groups, [])
    models = sum(part.shard_float16_groups, [])
    model_of = {id(main): model for main, model in zip(mains, models, strict=True)}
    params = [main for group in adam.param_groups for main in group["params"]]
    kept = [(main, name) for main in params for name in KEPT if name != "param" or id(main) in model_of]
    for (main, name), host in zip(kept, _on_host([main for main, _ in kept]), strict=True):
        adam.state[main][name] = host.copy_(main.detach()) if name == "param" else host.zero_()
    for main in params:
        adam.state[main]["step"] = torch.tensor(0.0, device=main.device)
        main.model = model_of.get(id(main))
        if main.model is not None:
            main.data = main.new_zeros(1).expand(main.shape)


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Memory of the host for such tensors, pinned beside CUDA; on `meta` more of that."""
    if tensors and tensors[0].is_meta:
        return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]
    return host_tensors(tensors, pinned=torch.cuda.is_available())


def offloaded_bytes(optimizer: MegatronOptimizer) -> int:
    """The bytes of what lies in host memory."""
    adams = [part.optimizer for part in optimizer.chained_optimizers]
    states = [state for adam in adams if isinstance(adam, OffloadedAdam) for state in adam.state.values()]
    return sum(state[name].nbytes for state in states for name in KEPT if name in state)


class BucketPart(NamedTuple):
    """A run of a parameter in a bucket."""

    main: Tensor
    run: slice
    kept: dict[str, Tensor]  # its state on the host; of a parameter in fp32 the moments alone
    place: int  # of its first number in memory for a bucket


class OffloadedAdam(torch.optim.AdamW):
    """torch's AdamW after `offload`."""

    arriving: torch.cuda.Stream  # of copies to the device
    leaving: torch.cuda.Stream  # of copies to the host

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        buckets = [*self._buckets()]
        if not buckets:
            return
        # Two parts of device memory take turns. Streams are joined at both ends: before, what used this
        # memory is over and the host has the last step's numbers; after, others may have the memory.
        computing = torch.cuda.current_stream()
        longest = max(part.place + len(part.kept["exp_avg"]) for _, parts in buckets for part in parts)
        device = buckets[0][1][0].main.device
        memory = [torch.empty(len(KEPT), longest, device=device) for _ in buckets[:2]]
        self.arriving.wait_stream(computing)
        arrived = self._fetch(buckets[0][1], memory[0])
        for number, (group, parts) in enumerate(buckets):
            computing.wait_stream(self.arriving)
            copies = arrived
            if number + 1 < len(buckets):
                self.arriving.wait_stream(self.leaving)  # the bucket before, whose memory the next one gets
                arrived = self._fetch(buckets[number + 1][1], memory[1 - number % 2])
            self._update(group, parts, copies)
            self.leaving.wait_stream(computing)
            self._send(parts, copies)
        computing.wait_stream(self.leaving)

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list[BucketPart]]]:
        """Parts of all parameters with a gradient, `BUCKET` numbers or fewer at a time, after their group.
        The parameters' steps are counted."""
        for group in self.param_groups:
            parts: list[BucketPart] = []
            place = 0
            for main in (main for main in group["params"] if main.grad is not None):
                state = self.state[main]
                state["step"] += 1
                start = 0
                while start < len(main):
                    run = slice(start, min(len(main), start + BUCKET - place))
                    kept = {name: state[name][run] for name in KEPT if name in state}
                    parts.append(BucketPart(main, run, kept, place))
                    place += -(-(run.stop - start) // ALIGNED) * ALIGNED
                    start = run.stop
                    if place == BUCKET:
                        yield group, parts
                        parts = []
                        place = 0
            if parts:
                yield group, parts

    def _fetch(self, parts: list[BucketPart], memory: Tensor) -> list[dict[str, Tensor]]:
        """Copies in this memory (3, numbers) of what the host keeps of each part."""
        places = dict(zip(KEPT, memory, strict=True))
        with torch.cuda.stream(self.arriving):
            return [
                {name: places[name][place:][: len(x)].copy_(x, non_blocking=True) for name, x in kept.items()}
                for _, _, kept, place in parts
            ]

    def _update(
        self, group: dict[str, Any], parts: list[BucketPart], copies: list[dict[str, Tensor]]
    ) -> None:
        params = [
            of_part.get("param", part.main[part.run]) for part, of_part in zip(parts, copies, strict=True)
        ]
        torch._fused_adamw_(
            params,
            [part.main.grad[part.run] for part in parts],
            [of_part["exp_avg"] for of_part in copies],
            [of_part["exp_avg_sq"] for of_part in copies],
            [],
            [self.state[part.main]["step"] for part in parts],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
        )
        for part, param in zip(parts, params, strict=True):
            if part.main.model is not None:
                part.main.model[part.run].copy_(param)

    def _send(self, parts: list[BucketPart], copies: list[dict[str, Tensor]]) -> None:
        with torch.cuda.stream(self.leaving):
            for part, of_part in zip(parts, copies, strict=True):
                for name, tensor in part.kept.items():
                    tensor.copy_(of_part[name], non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the settings of groups. torch's would move the state to the device of parameters."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})


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


LONGEST_WARMUP = 50  # steps, if the configuration leaves it open
NO_END = 2**40  # steps
ByPart = Mapping[str, Mapping[str, list[Parameter]]]  # setting -> its keys -> this rank's parameters
# names of parameters without weight decay, as in Transformers (5.24, `Trainer.get_decay_parameter_names`)
NAMES_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def build_optimizer(
    model_chunks: list[DistributedDataParallel],
    config: RunConfig,
    steps: int | None = None,
    by_part: ByPart | None = None,
) -> tuple[ChainedOptimizer, Schedule]:
    """AdamW over all trainable parameters of `model_chunks`, and its schedule over a run of `steps` steps.

    `steps` None: `train.steps`, or else a schedule without an end, for what trains no run. `by_part` has the
    parameters with a learning rate or weight decay of their own (`OptimizerConfig.by_part`).

    Biases and norms have no weight decay (`without_decay`). Adam's moments and the parameters it updates are
    fp32, whatever the model's dtype. After each `optimizer.step()` call `scheduler.step(increment=1)`. The
    learning rate rises linearly over `warmup_steps` steps, is `lr` at the next step and goes on by
    `lr_scheduler_type`, all but "constant" to `min_lr` at the last. Raises ValueError if nothing is trainable
    or the warm-up does not end before the run.
    """
    settings = _optimizer_config(config)
    steps = steps or config.train.steps or NO_END
    warmup = _warmup(config, steps)
    optimizer = get_megatron_optimizer(
        settings,
        model_chunks,
        config_overrides=_overrides(config, without_decay(model_chunks), by_part or {}),
        use_gloo_process_groups=False,
    )
    if not optimizer.param_groups:
        raise ValueError(
            f"optimizer: no parameter is trainable on any rank, model.freeze is {config.model.freeze}; "
            "leave one part out of model.freeze."
        )
    # Megatron's for dense weights is empty if experts alone are trained, and cannot be saved
    parts = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    optimizer.chained_optimizers = parts
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            part.__class__ = ShardedOptimizer  # Megatron has no option for the class
            part.number_parameters()
            if config.optimizer.offload:
                offload(part)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            _copy_all(part)
    fuse(optimizer)
    take_norms_on_device()
    return optimizer, _scheduler(optimizer, config, warmup, steps)


def _copy_all(part: Float16OptimizerWithFloat16Params) -> None:
    """Lets Adam update copies of all parameters, of those in fp32, too. Megatron (0.19) copies those in bf16
    alone, and cannot save the state of a group that has both types."""
    for group, models, copies, uncopied in zip(
        part.optimizer.param_groups,
        part.float16_groups,
        part.fp32_from_float16_groups,
        part.fp32_from_fp32_groups,
        strict=True,
    ):
        for model in uncopied:
            copies.append(model.detach().clone())
            copy_tensor_model_parallel_attributes(copies[-1], model)
        models += uncopied
        uncopied.clear()
        group["params"] = [*copies]


def learning_rates(scheduler: Schedule) -> dict[str, float]:
    """The learning rates of the next step: "lr", and "lr_KEY" for each key of `optimizer.lr_by_part`."""
    lr = scheduler.get_lr({"lr_mult": 1.0})
    return {"lr": lr} | {f"lr_{key}": lr * factor for key, factor in scheduler.factors.items()}


def _factors(config: RunConfig) -> dict[str, float]:
    """The learning rate of each key of `lr_by_part` as a multiple of `lr`."""
    return {key: rate / config.optimizer.lr for key, rate in config.optimizer.lr_by_part.items()}


def without_decay(model_chunks: list[DistributedDataParallel]) -> list[Parameter]:
    """Return this rank's parameters that Transformers' Trainer does not decay.

    These are the parameters of each `nn.LayerNorm`, and those whose names in Transformers say that they are
    biases or norms. All norms of our language models have such names there. Norms of towers have their own
    class and name here, too: `norm1` in Qwen2.5-VL's is an RMSNorm, and decays.
    """
    return [
        param
        for chunk in model_chunks
        for prefix, module in chunk.named_modules()
        for name, param in module.named_parameters(prefix, recurse=False)
        if isinstance(module, LayerNorm | RMSNorm) or NAMES_WITHOUT_DECAY.search(name)
    ]


def _overrides(
    config: RunConfig, undecayed: list[Parameter], by_part: ByPart
) -> dict[ParamKey, dict[str, float]]:
    """The settings that groups of parameters have in place of the optimizer's own."""
    decays = config.optimizer.weight_decay_by_part.items()
    settings = {
        "optimizer.lr_by_part": {key: {"lr_mult": factor} for key, factor in _factors(config).items()},
        "optimizer.weight_decay_by_part": {key: {"start_wd": wd, "end_wd": wd} for key, wd in decays},
    }
    overrides = {_key("no weight decay", undecayed): {"wd_mult": 0.0}}
    for setting, by_key in by_part.items():
        for key, parameters in by_key.items():
            overrides[_key(f"{setting} {key}", parameters)] = settings[setting][key]
    return overrides


def _key(name: str, parameters: list[Parameter]) -> ParamKey:
    """Megatron's key for a group of parameters; `name` tells keys apart."""
    ids = frozenset(map(id, parameters))
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name, lambda param, _: id(param) in ids))


def fuse(optimizer: ChainedOptimizer) -> None:
    """Lets torch's Adams update all parameters in one kernel; again after loading, which replaces groups."""
    for adam in torch_adams(optimizer):
        for group in adam.param_groups:
            group.update(fused=True, foreach=False)


def torch_adams(optimizer: ChainedOptimizer) -> list[torch.optim.Adam]:
    """torch's own Adams inside `optimizer`; none if the Adam is Transformer Engine's or Apex's."""
    adams = [part.optimizer for part in optimizer.chained_optimizers]
    return [adam for adam in adams if isinstance(adam, torch.optim.Adam)]


def _optimizer_config(config: RunConfig) -> MegatronOptimizerConfig:
    adam, bf16 = config.optimizer, config.model.dtype == "bf16"
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        min_lr=adam.min_lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.eps,
        clip_grad=adam.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )


def _warmup(config: RunConfig, steps: int) -> int:
    """The steps of warm-up in a run of `steps`."""
    warmup, ratio = config.optimizer.warmup_steps, config.optimizer.warmup_ratio
    if warmup is None and ratio is not None:
        warmup = math.ceil(ratio * steps)  # as in Transformers
    elif warmup is None:
        warmup = min(LONGEST_WARMUP, steps // 10)
    if not 0 <= warmup < steps:
        raise ValueError(
            f"optimizer: warmup_steps {warmup} is not within the run's {steps} steps; lower "
            "optimizer.warmup_steps, or raise train.steps or train.epochs."
        )
    return warmup


def _scheduler(optimizer: ChainedOptimizer, config: RunConfig, warmup: int, steps: int) -> Schedule:
    adam = config.optimizer
    schedule = Schedule(
        optimizer,
        init_lr=adam.lr / (warmup + 1),  # not 0, which would waste the first step
        max_lr=adam.lr,
        min_lr=adam.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style={"wsd": "WSD"}.get(adam.lr_scheduler_type, adam.lr_scheduler_type),
        wsd_decay_steps=math.ceil(adam.decay_ratio * steps),
        lr_wsd_decay_style="linear",
        start_wd=adam.weight_decay,
        end_wd=adam.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run takes only the step from the checkpoint
    )
    schedule.factors = _factors(config)
    return schedule


class Schedule(OptimizerParamScheduler):
    """Megatron's, with the learning rates of parts as multiples of one: all warm up and fall alike."""

    factors: Mapping[str, float] = {}  # by key of `optimizer.lr_by_part`

    def get_lr(self, param_group: dict) -> float:
        return super().get_lr(param_group) * param_group["lr_mult"]
