"""SkyRL's policy worker, met by `Policy`: its method names, its batches, its sums.

Give SkyRL `class Worker(PolicyWorker, PolicyWorkerBase)` in the place of its MegatronPolicyWorkerBase, with
`run` set to your layout. Nothing of SkyRL is imported; tests/parity/rl/test_rl_interfaces.py has what it
publishes.
"""

from collections import namedtuple
from dataclasses import replace

import torch
from megatron.core import parallel_state
from torch.nn.functional import pad

from megatron_vlm.config import RunConfig
from megatron_vlm.rl import losses
from megatron_vlm.rl.policy import Policy

WorkerOutput = namedtuple("WorkerOutput", "loss_fn_output_type loss_fn_outputs metrics")
OF_RESPONSES = ("advantages", "action_log_probs", "base_action_log_probs")  # (batch, response length)


class PolicyWorker:
    run = RunConfig()

    def __init__(self, cfg, **others):
        self.cfg = cfg

    def init_model(self, model_path, num_training_steps: int = 1e9):
        run = replace(self.run, model=replace(self.run.model, hf_path=model_path))
        self.policy = Policy.from_hf(run, max(self.cfg.max_tokens_per_microbatch, 1))

    def forward(self, data, loss_fn=None, loss_fn_config=None, return_per_token_outputs=True):
        if loss_fn is not None:
            raise ValueError(f"forward: {loss_fn} is not computed without gradients; leave loss_fn out.")
        wanted = torch.ones(len(data["sequences"]), data.metadata["response_length"])
        found = self.policy.logprobs(samples_of(data, wanted), self.cfg.algorithm.temperature).log_probs
        rows = [pad(each.cpu(), (wanted.shape[1], 0))[-wanted.shape[1] :].tolist() for each in found]
        return WorkerOutput("scalar", [{"logprobs": row} for row in rows], {})

    def forward_backward(self, data, loss_fn=None, loss_fn_config=None, return_per_token_outputs=True):
        rules, samples = self.cfg.algorithm, samples_of(data, data["loss_mask"])
        kind, outputs = loss_fn or rules.policy_loss_type, [{} for _ in samples]
        if kind not in ("regular", "dual_clip"):
            raise ValueError(f"forward_backward: there is no loss {kind} here; give regular or dual_clip.")
        dual, every = kind == "dual_clip", len(samples) * parallel_state.get_data_parallel_world_size()
        bounds = rules.eps_clip_low, rules.eps_clip_high, rules.clip_ratio_c if dual else None

        def loss(log_probs, _, fields):
            for number in fields["sample"].unique().tolist() if return_per_token_outputs else ():
                outputs[number] = {"logprobs": log_probs[fields["sample"] == number].tolist()}
            old, advantages = fields["action_log_probs"], fields["advantages"]  # scaled: sums are wanted
            total = losses.ppo_clip(log_probs, old, advantages, None, *bounds)
            if not rules.use_kl_loss:
                return total
            given = rules.kl_loss_coef / every, fields["share"], rules.kl_estimator_type
            return total + losses.kl_penalty(log_probs, fields["base_action_log_probs"], *given)

        fields = ["share", *(key for key in OF_RESPONSES if data.get(key) is not None)]
        logs = self.policy.forward_backward(samples, loss, 1, rules.temperature, fields=fields)
        return WorkerOutput("scalar", outputs, {"policy_loss": logs.pop("loss"), **logs})

    def optim_step(self):
        return self.policy.step()


def samples_of(data, wanted):
    """The rows of a batch without padding; `wanted` (batch, response length) are the tokens to score."""
    samples, names = [], (*OF_RESPONSES, "pixel_values", "image_grid_thw")
    for row, real in enumerate(data["attention_mask"].bool()):
        left = len(real) - wanted.shape[1], 0  # responses are at the right end
        mask = pad(wanted[row], left)[real]
        sample = {"input_ids": data["sequences"][row][real], "loss_mask": mask}
        for key, values in ((key, data[key]) for key in names if data.get(key) is not None):
            sample[key] = pad(values[row], left)[real] if key in OF_RESPONSES else values[row]
        samples.append(sample | {"share": 1 / mask.sum().clamp(min=1)})  # of a token in its sequence's mean
    return samples
