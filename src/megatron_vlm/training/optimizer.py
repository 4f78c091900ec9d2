"""Adam with warm-up and cosine decay, through Megatron-Core's optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from torch.nn import Parameter

from megatron_vlm.config import RunConfig
from megatron_vlm.training.gradients import take_norms_on_device
from megatron_vlm.training.offloaded_adam import offload
from megatron_vlm.training.sharded_optimizer import ShardedOptimizer

LONGEST_WARMUP = 50  # steps, if the configuration leaves it open
NO_END = 2**40  # steps
ByPart = Mapping[str, Mapping[str, list[Parameter]]]  # setting -> its keys -> this rank's parameters


def build_optimizer(
    model_chunks: list[DistributedDataParallel],
    config: RunConfig,
    steps: int | None = None,
    by_part: ByPart | None = None,
) -> tuple[ChainedOptimizer, Schedule]:
    """AdamW over all trainable parameters of `model_chunks`, and its schedule over a run of `steps` steps.

    `steps` None: `train.steps`, or else a schedule without an end, for what trains no run. `by_part` has the
    parameters with a learning rate or weight decay of their own (`OptimizerConfig.by_part`).

    Biases and all other one-dimensional parameters, such as norms, have no weight decay. Adam's moments and
    the parameters it updates are fp32, whatever the model's dtype. After each `optimizer.step()` call
    `scheduler.step(increment=1)`. The learning rate rises linearly over `warmup_steps` steps, is `lr` at
    the next step and falls as a cosine to `min_lr` at the last. Raises ValueError if nothing is trainable or
    the warm-up does not end before the run.
    """
    settings = _optimizer_config(config)
    steps = steps or config.train.steps or NO_END
    warmup = _warmup(config, steps)
    optimizer = get_megatron_optimizer(
        settings,
        model_chunks,
        config_overrides=get_standard_config_overrides(settings) | _overrides(config, by_part or {}),
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


def _overrides(config: RunConfig, by_part: ByPart) -> dict[ParamKey, dict[str, float]]:
    """The settings that groups of parameters have in place of the optimizer's own."""
    decays = config.optimizer.weight_decay_by_part.items()
    settings = {
        "optimizer.lr_by_part": {key: {"lr_mult": factor} for key, factor in _factors(config).items()},
        "optimizer.weight_decay_by_part": {key: {"start_wd": wd, "end_wd": wd} for key, wd in decays},
    }
    overrides = {}
    for setting, by_key in by_part.items():
        for key, parameters in by_key.items():
            chosen = frozenset(map(id, parameters))
            is_chosen = ParamWithNamePredicate(f"{setting} {key}", lambda p, _, ids=chosen: id(p) in ids)
            overrides[ParamKey(with_name_predicate=is_chosen)] = settings[setting][key]
    return overrides


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
    warmup = config.optimizer.warmup_steps
    warmup = min(LONGEST_WARMUP, steps // 10) if warmup is None else warmup
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
        lr_decay_style="cosine",
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
