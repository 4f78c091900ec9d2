"""Adam with warm-up and cosine decay, through Megatron-Core's optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_vlm.config import RunConfig
from megatron_vlm.training.gradients import clip_on_device


def build_optimizer(
    model_chunks: list[DistributedDataParallel], config: RunConfig
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW over all trainable parameters of `model_chunks`, and its schedule, counted in steps.

    Biases and all other one-dimensional parameters, such as norms, have no weight decay. Adam's moments and
    the parameters it updates are fp32, whatever the model's dtype. After each `optimizer.step()` call
    `scheduler.step(increment=1)`. The learning rate rises linearly over `warmup_steps` steps, is `lr` at
    the next step and falls as a cosine to `min_lr` at the last. Raises ValueError if nothing is trainable or
    the warm-up does not end before the run.
    """
    settings = _optimizer_config(config)
    _check_schedule(config)
    optimizer = get_megatron_optimizer(
        settings,
        model_chunks,
        config_overrides=get_standard_config_overrides(settings),
        use_gloo_process_groups=False,
    )
    if not optimizer.param_groups:
        raise ValueError(
            f"optimizer: no parameter is trainable on any rank, model.freeze is {config.model.freeze}; "
            "leave one part out of model.freeze."
        )
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
            part.__class__ = _TorchAdamDistributedOptimizer  # Megatron has no option for the class
    fuse(optimizer)
    clip_on_device()
    return optimizer, _scheduler(optimizer, config)


def fuse(optimizer: MegatronOptimizer) -> None:
    """Lets torch's Adams update all parameters in one kernel; again after loading, which replaces groups."""
    for adam in torch_adams(optimizer):
        for group in adam.param_groups:
            group.update(fused=True, foreach=False)


def torch_adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Adam]:
    """torch's own Adams inside `optimizer`; none if the Adam is that of Transformer Engine or Apex."""
    for part in _parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            yield part.optimizer


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


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


def _check_schedule(config: RunConfig) -> None:
    steps, warmup = config.train.steps, config.optimizer.warmup_steps
    if not 0 <= warmup < steps:
        raise ValueError(
            f"optimizer: warmup_steps {warmup} is not within the run's {steps} steps; "
            "lower optimizer.warmup_steps or raise train.steps."
        )
    if not 0 <= config.optimizer.min_lr <= config.optimizer.lr:
        raise ValueError(
            f"optimizer: min_lr {config.optimizer.min_lr} is not between 0 and lr {config.optimizer.lr}; "
            "change one of them."
        )


def _scheduler(optimizer: MegatronOptimizer, config: RunConfig) -> OptimizerParamScheduler:
    adam, steps = config.optimizer, config.train.steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=adam.lr / (adam.warmup_steps + 1),  # not 0, which would waste the first step
        max_lr=adam.lr,
        min_lr=adam.min_lr,
        lr_warmup_steps=adam.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style="cosine",
        start_wd=adam.weight_decay,
        end_wd=adam.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run takes only the step from the checkpoint
    )


class _TorchAdamDistributedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer with what its checkpoints lack for torch's own Adam (0.19).

    torch keeps one `step` tensor per parameter; Megatron saves one number for all.
    """

    def state_dict(self):
        """Megatron's state, also on a rank whose share has no parameter, where Megatron finds no step.

        The step of such a rank is never saved, because rank 0 always has parameters.
        """
        if self.optimizer.state:
            return super().state_dict()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {"optimizer": {"param_groups": [{**group, "step": 0.0} for group in groups]}}

    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        """Adds the `step` that Megatron looks for among the tensors; None means it comes from elsewhere."""
        super()._set_main_param_and_optimizer_states(model_param, {"step": None, **tensors})
