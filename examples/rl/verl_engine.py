"""verl's training engine, met by `Policy`: register `class Engine(PolicyEngine, BaseEngine)`, with `run` set to your
layout, as EngineRegistry.register("language_model", "megatron_vlm"). Rows are without padding (verl's
NO_PADDING). tests/test_rl_interfaces.py has the signatures that verl publishes.
"""

import contextlib
from dataclasses import replace

import torch
from megatron.core import parallel_state
from torch.nn.functional import pad

from megatron_vlm.config import RunConfig
from megatron_vlm.rl.losses import Loss
from megatron_vlm.rl.policy import Policy


class PolicyEngine:
    run, max_tokens, mode = RunConfig(), 8192, None
    is_param_offload_enabled = is_optimizer_offload_enabled = False

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.path = model_config.local_path

    def initialize(self):
        run = replace(self.run, model=replace(self.run.model, hf_path=self.path))
        self.policy = Policy.from_hf(run, self.max_tokens)

    @contextlib.contextmanager
    def train_mode(self, **kwargs):
        yield self

    eval_mode = train_mode  # calls say themselves whether they learn

    def optimizer_zero_grad(self):
        """Nothing: each step empties them."""

    def optimizer_step(self):
        return self.policy.step()

    def lr_scheduler_step(self):
        return self.policy.scheduler.get_lr({"lr_mult": 1.0})  # a step has advanced it

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        samples = [{"input_ids": ids} for ids in data["input_ids"].unbind()]
        for sample, images in zip(samples, data.get("multi_modal_inputs", None) or (), strict=False):
            sample |= getattr(images, "data", images) or {}
        if forward_only and loss_function is None:
            ...
