"""verl's engine, met by `Policy`: register `class Engine(PolicyEngine, BaseEngine)` with `run` set to your
layout and `tools` to verl.utils.tensordict_utils. Samples are without padding (NO_PADDING). Nothing of
verl is imported; tests/parity/rl/test_rl_interfaces.py has the signatures that it publishes."""

import contextlib
from dataclasses import replace

import torch
from megatron.core import parallel_state
from torch.nn.functional import pad

from megatron_vlm.config import RunConfig
from megatron_vlm.rl.losses import Loss
from megatron_vlm.rl.policy import Policy


class PolicyEngine:
    run, max_tokens, tools = RunConfig(), 8192, None
    is_param_offload_enabled = is_optimizer_offload_enabled = False
    get_data_parallel_size = staticmethod(parallel_state.get_data_parallel_world_size)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.path = model_config.local_path

    def initialize(self):
        run = replace(self.run, model=replace(self.run.model, hf_path=self.path))
        self.policy = Policy.from_hf(run, self.max_tokens)

    def train_mode(self, **kwargs):
        return contextlib.nullcontext(self)  # each call says itself whether it learns

    eval_mode = train_mode

    def optimizer_zero_grad(self):
        """A step has done it."""

    def optimizer_step(self):
        return self.policy.step()

    def lr_scheduler_step(self):
        return self.policy.scheduler.get_lr({"lr_mult": 1.0})  # a step has moved it

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        samples = [{"input_ids": ids} for ids in data["input_ids"].unbind()]
        for sample, images in zip(samples, data.get("multi_modal_inputs", [{}] * len(samples)), strict=True):
            sample |= getattr(images, "data", images) or {}
        temperature = torch.as_tensor(data["temperature"]).flatten()[0].item()
        ranks, group, metrics = self.get_data_parallel_size(), self.get_data_parallel_group(), {}
        tokens = data["loss_mask"].values().sum().to(next(self.policy.chunks[0].parameters()).device)
        torch.distributed.all_reduce(tokens, group=group)
        self.tools.assign_non_tensor(data, batch_num_tokens=tokens.item(), dp_size=ranks)
        if forward_only:
            output = {"log_probs": nested(self.policy.logprobs(samples, temperature).log_probs)}
            found = [loss_function(model_output=output, data=data, dp_group=group)] if loss_function else []
            return {"model_output": output, "loss": [float(each) for each, _ in found], "metrics": {}}

        def loss(log_probs, _, fields):
            numbers = fields["sample"].unique_consecutive().tolist()
            output = nested(log_probs.split([len(samples[number]["input_ids"]) - 1 for number in numbers]))
            rows = self.tools.index_select_tensor_dict(data, numbers)
            total, more = loss_function(model_output={"log_probs": output}, data=rows, dp_group=group)
            metrics.update({name: [*metrics.get(name, ()), value] for name, value in more.items()})
            return Loss(total, {})

        found = self.policy.forward_backward(samples, loss, ranks, temperature)  # verl's losses want a mean
        return {"model_output": {}, "loss": [found["loss"]], "metrics": metrics}

    def get_per_tensor_param(self, **kwargs):
        return self.policy.hf_weights(), None

    def is_mp_src_rank_with_outputs(self):
        ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        return ranks == (0, 0) and parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def nested(rows):
    """verl's log-probabilities: entry t is of token t + 1, and the last is none."""
    return torch.nested.as_nested_tensor([pad(row, (0, 1)) for row in rows], layout=torch.jagged)
