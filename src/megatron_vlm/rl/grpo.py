"""`train.objective=grpo`: a step answers its prompts, gets rewards for the answers, and trains on them.

GRPO (arXiv 2402.03300), with the losses of DAPO (arXiv 2503.14476) and Dr. GRPO (arXiv 2503.20783); settings
are called as in TRL's GRPOConfig. A data-parallel rank answers the prompts of its own micro batches, and
trains on these answers. A checkpoint lies between steps, so it holds no answers, and a run that goes on from
it draws the answers that an uninterrupted run draws.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import TrainerState

from megatron_vlm.batch import Batch, GenericVisualInputs, Prompt
from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.callbacks.completions import CompletionsLog
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.generation.generate import reply_text
from megatron_vlm.generation.prompt import stop_tokens
from megatron_vlm.imports import calling, load_function
from megatron_vlm.job import watchdog
from megatron_vlm.models.head import of_all_context_ranks
from megatron_vlm.models.hf import Source
from megatron_vlm.models.stream import Stream
from megatron_vlm.models.vlm import run_schedule, streams_of
from megatron_vlm.objectives import GRPO
from megatron_vlm.parallel import setup
from megatron_vlm.rl import losses
from megatron_vlm.rl.agreement import gather
from megatron_vlm.rl.policy import Scorer, scores_head
from megatron_vlm.rl.rewards import PLACE, AnswerRewards, Rewards
from megatron_vlm.rl.rollouts import RolloutPrompt, Sample, own_answers
from megatron_vlm.training.figures import counts_data
from megatron_vlm.training.losses import Loss, Reports, StartingWeights

ENGINE = "grpo.engine"


@dataclass(frozen=True)
class AskedPrompt(RolloutPrompt):
    """A row of a batch, by its sample's key, with what its rewards are computed from."""

    key: str
    facts: dict[str, Any]


def prompts_of(micro_batches: list[Batch]) -> list[AskedPrompt]:
    """The rows of micro batches of prompts, on every pipeline stage with their images. Collective."""
    prompts = []
    for batch in micro_batches:
        visual = batch["visual_inputs"]
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:  # later stages were given none
            visual = setup.from_all_ranks(visual, parallel_state.get_pipeline_model_parallel_group())[0]
        items = visual.items() if visual is not None else []
        images = iter(item for item in items if item.pixel_values_videos is None)
        videos = iter(item for item in items if item.pixel_values_videos is not None)
        lengths = (batch["attention_mask"] > 0).sum(1).tolist()
        for row, (length, keys, question) in enumerate(
            zip(lengths, batch["__key__"], batch["asked"], strict=True)
        ):
            image_count, video_count = question["items"]
            own_items = [*islice(images, image_count), *islice(videos, video_count)]
            inputs: Prompt = {
                "input_ids": batch["input_ids"][row, :length],
                "position_ids": batch["position_ids"][..., row, :length],
                "visual_inputs": GenericVisualInputs.cat(own_items),
            }
            key = keys[0] if keys else ""
            prompts.append(AskedPrompt(question["prompt"], question["images"], inputs, key, question))
    return prompts


def of_data_ranks(values: list[Any]) -> tuple[list[Any], int]:
    """The values of all data-parallel ranks, and where this rank's begin among them. Collective."""
    rank, ranks = setup.data_parallel_place()
    of_rank = dict(setup.from_all_ranks((rank, values)))
    first = sum(len(of_rank[other]) for other in range(rank))
    return [value for other in range(ranks) for value in of_rank[other]], first


class Grpo(Callback):
    """The run's first callback, which makes a step's micro batches of its prompts, and the run's `StepLoss`.

    Reports are as `token_loss`'s, with the figures of `objectives.GRPO` in `logs`. Validation answers each
    prompt greedily: `valid_reward` is the mean reward, and `valid_loss` is that, negated.
    """

    def __init__(self, config: RunConfig, chunks: list[nn.Module]):
        self._config, self._grpo = config, config.grpo
        self._start = StartingWeights(chunks) if config.grpo.beta else None
        self._metrics: dict[str, float] = {}  # of the step
        self._users_metrics: dict[str, float] = {}
        self._has_noted_equal = False  # which is said once
        self._log: CompletionsLog | None = None  # on the first rank

    def take_model(self, source: Source, chunks: list[nn.Module]) -> None:
        """Take the model that answers and is trained."""
        self._scorer = Scorer(self._config, source, chunks, self._config.data.seq_length)
        self._stop = stop_tokens(source.folder, source.description.hf_config)

    def on_train_begin(self, run: Run) -> None:
        grpo = self._grpo
        self.take_model(run.source, run.model)
        self._rewards = Rewards(self._config.train.reward_names)
        # its `global_step` counts the steps that are done
        self._state = TrainerState(global_step=run.step, max_steps=run.milestones.steps)
        self._step = run.step
        self._engine = None
        if grpo.engine is not None:
            place = f"{ENGINE}: {grpo.engine}"
            with calling(place, grpo.engine):
                self._engine = load_function(place, grpo.engine)(grpo)
            if not callable(self._engine):
                kind = type(self._engine).__name__
                raise ConfigError(
                    f"{place}: returned {kind}, no function; return a Rollout (docs/how-to/preferences.md)."
                )
        if run.is_first_rank:
            self._log = CompletionsLog(run.config.run_dir, run.step + 1)

    def on_step_begin(self, run: Run) -> None:
        """Answer the prompts of `run.micro_batches`, and make `run.parts` of the answers."""
        began = time.monotonic()
        watchdog.beat(f"answering the prompts of step {run.step}")
        self._step = run.step
        self._state.global_step = run.step - 1
        prompts = prompts_of(run.micro_batches)
        samples = self._answer(prompts)
        of_rank, of_all_ranks = self._rewards_of(prompts, samples)
        self._metrics = self._figures(of_all_ranks, samples)
        place = f"step {run.step}"
        if np.isnan(of_all_ranks.rewards).all():
            run.message(f"{place}: no function of {PLACE} judges any answer; nothing is trained")
        elif self._metrics["frac_reward_zero_std"] == 1 and not self._has_noted_equal:
            self._has_noted_equal = True
            run.message(f"{place}: all rewards of each prompt are equal: nothing to learn from them")
        self._users_metrics = {name: float(np.mean(values)) for name, values in of_all_ranks.metrics.items()}
        groups = [sample["prompt"] for sample in samples]
        advantages = self._advantages(self._total(of_rank), self._total(of_all_ranks), groups)
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            sample |= {"key": prompts[sample["prompt"]].key, "advantage": advantage}
        if self._log is not None:
            rewards = dict(zip(self._rewards.names, of_rank.rewards.T.tolist(), strict=True))
            self._log.write(run.step, prompts, samples, rewards, of_rank.extra)
        watchdog.beat(f"computing log-probabilities of step {run.step}")
        # all answers are trained on num_iterations times, a part in each optimizer step
        count = self._grpo.steps_per_generation
        parts = [self.micro_batches_of(samples[index::count]) for index in range(count)]
        run.parts = parts * self._grpo.num_iterations
        self._metrics["rollout_seconds"] = time.monotonic() - began

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        metrics |= self._metrics
        if clash := sorted(metrics.keys() & self._users_metrics.keys()):
            raise ConfigError(f"{PLACE}: log_metric({clash[0]!r}) is a figure of the run; give another name.")
        metrics |= self._users_metrics
        self._state.global_step = run.step

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    # -- answers and their rewards

    def _answer(self, prompts: list[AskedPrompt], greedy: bool = False) -> list[Sample]:
        """The answers to this rank's prompts: `num_generations` for each, or one greedy one."""
        grpo = self._grpo
        if self._engine is not None and not greedy:
            return self._ask_engine(prompts)
        keys, first = of_data_ranks([prompt.key for prompt in prompts])
        return own_answers(
            self._scorer,
            prompts,
            max_new_tokens=grpo.max_completion_length,
            temperature=0.0 if greedy else grpo.temperature,
            top_p=1.0 if greedy else grpo.top_p,
            answers=1 if greedy else grpo.num_generations,
            seed=(self._config.train.seed << 32) + self._step,
            stop=self._stop,
            numbers=draw_numbers(keys)[first : first + len(prompts)],
            own_prompts=True,
        )

    def _ask_engine(self, prompts: list[AskedPrompt]) -> list[Sample]:
        """The same from an engine, which every rank asks for the answers to all prompts of the step."""
        everyone, first = of_data_ranks(prompts)
        grpo = self._grpo
        place = f"{ENGINE}: {grpo.engine}"
        with calling(place, grpo.engine):
            samples = self._engine(self._scorer, everyone)
            numbers = [sample["prompt"] for sample in samples]
            longest = max((int(sample["loss_mask"].sum()) for sample in samples), default=0)
        if longest > grpo.max_completion_length:
            raise ConfigError(f"{place}: an answer has {longest} tokens, over grpo.max_completion_length.")
        count = grpo.num_generations
        if numbers != np.arange(len(everyone)).repeat(count).tolist():
            raise ConfigError(
                f"{place}: {len(samples)} answers to {len(everyone)} prompts; give {count} (num_generations)"
                " for each, those to a prompt one after another."
            )
        answers = samples[first * count : (first + len(prompts)) * count]  # to the prompts of this rank
        return [sample | {"prompt": sample["prompt"] - first} for sample in answers]

    def _text(self, sample: Sample) -> str:
        ids = sample["input_ids"][sample["loss_mask"]].tolist()
        ids = ids[:-1] if sample["ended"] else ids
        return reply_text(self._scorer.source.processor, ids)

    def _rewards_of(
        self, prompts: list[AskedPrompt], samples: list[Sample]
    ) -> tuple[AnswerRewards, AnswerRewards]:
        """Rewards of the answers of this rank, and of all ranks. The functions run once for ranks that share
        their prompts."""
        rank, ranks = setup.data_parallel_place()
        columns, _ = of_data_ranks([name for prompt in prompts for name in prompt.facts["columns"]])
        scored = error = None
        if counts_data():
            try:
                for sample in samples:
                    sample["text"] = self._text(sample)
                scored = self._rewards(
                    [prompts[sample["prompt"]].facts for sample in samples],
                    [sample["text"] for sample in samples],
                    [sample["input_ids"][sample["loss_mask"]].tolist() for sample in samples],
                    self._state,
                    set(columns),
                )
            except Exception as problem:  # noqa: BLE001 - all ranks raise it; now they wait for this one
                error = problem
        of_rank = dict(filter(None, gather(scored and (rank, scored), error)))
        return of_rank[rank], AnswerRewards.join([of_rank[other] for other in range(ranks)])

    def _total(self, scored: AnswerRewards) -> np.ndarray:
        """(answers,) the weighted sum of each one's rewards; NaN for one that no function judged."""
        weights = self._grpo.reward_weights or [1.0] * len(self._rewards.names)
        total = np.nansum(scored.rewards * weights, axis=1)
        return np.where(np.isnan(scored.rewards).all(1), np.nan, total)

    def _advantages(self, rewards: np.ndarray, of_all_ranks: np.ndarray, groups: Sequence[int]) -> Tensor:
        """(answers,) fp32; 0 for an answer without a reward."""
        judged = torch.from_numpy(~np.isnan(rewards))
        rewards_B, groups_B = torch.from_numpy(rewards)[judged], torch.tensor(groups)[judged]
        if self._grpo.scale_rewards == "group":
            values = losses.grpo_advantages(rewards_B, groups_B)
        else:
            values = losses.dr_grpo_advantages(rewards_B, groups_B)
        if self._grpo.scale_rewards == "batch":
            values = values / (_deviation(of_all_ranks) + losses.SMALLEST_DEVIATION)
        return torch.zeros(len(rewards)).masked_scatter(judged, values.float())

    def _figures(self, scored: AnswerRewards, samples: list[Sample]) -> dict[str, float]:
        """The figures of a step's answers, over all ranks, called as TRL calls them. Collective."""
        of_ranks = setup.from_all_ranks([(int(s["loss_mask"].sum()), s["ended"]) for s in samples])
        tokens = [count for of_rank in of_ranks for count, _ in of_rank]
        ended = [has_ended for of_rank in of_ranks for _, has_ended in of_rank]
        total = self._total(scored)
        groups = total.reshape(-1, self._grpo.num_generations)
        figures = {"reward": _mean(total), "reward_std": _deviation(total)}
        for name, values in zip(self._rewards.names, scored.rewards.T, strict=True):
            figures |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _deviation(values)}
        return figures | {
            "frac_reward_zero_std": float(np.mean(np.isclose([_deviation(group) for group in groups], 0))),
            "completions/mean_length": float(np.mean(tokens)),
            "completions/max_length": float(np.max(tokens)),
            "completions/clipped_ratio": 1 - float(np.mean(ended)),
        }

    # -- training

    def micro_batches_of(self, samples: list[Sample]) -> list[Batch]:
        """The micro batches of one optimizer step: the answers that have a gradient, packed into rows.

        A sample has its `key` and `advantage`. Collective; each data-parallel rank gives its own.
        """
        grpo = self._grpo
        is_left_out = grpo.mask_truncated_completions
        kept = [s for s in samples if s["loss_mask"].any() and (s["ended"] or not is_left_out)]
        trained = [s for s in kept if s["advantage"] != 0 or grpo.beta]
        fields = ["advantage", "weight"]
        for sample in trained:
            tokens = int(sample["loss_mask"].sum())
            sample["weight"] = 1 / tokens if grpo.loss_type == "grpo" else 1.0
        # packed into the same rows as below, so that ratios are exactly 1 until the first update
        if grpo.steps_per_generation * grpo.num_iterations > 1:
            self._add_scores("old", trained)
            fields.append("old")
        if self._start is not None:
            with self._start.in_place():
                self._add_scores("reference", trained)
            fields.append("reference")
        rows = self._scorer.rows(trained, fields)
        batches = []
        for row in rows:
            keys = [[document.sample["key"] for document in row.documents]]
            batches.append(row.batch | {"__key__": keys, "fields": row.given, "divisor": 0.0})
        tokens = sum(int(sample["loss_mask"].sum()) for sample in kept)
        divisors = {
            "grpo": len(samples),
            "dapo": tokens,
            "dr_grpo": len(samples) * grpo.max_completion_length,
        }
        divisor = float(divisors[grpo.loss_type])
        if not any(setup.from_all_ranks(divisor)):  # all answers are left out, and the loss is 0
            divisor = 1.0
        batches[0]["divisor"] = divisor
        return batches

    def _add_scores(self, name: str, samples: list[Sample]) -> None:
        scores = self._scorer.logprobs(samples, self._grpo.temperature).log_probs
        for sample, log_probs in zip(samples, scores, strict=True):
            sample[name] = log_probs

    def __call__(
        self, chunks: list[nn.Module], micro_batches: list[Batch], forward_only: bool = False
    ) -> tuple[Reports, float]:
        """Reports on the last stage; the gradients are there unless `forward_only`, for prompts."""
        if forward_only:
            return self._validate(micro_batches)
        streams = streams_of(chunks, micro_batches)
        loss = partial(self._loss, iter(micro_batches))  # the last stage asks in their order
        head = scores_head(self._grpo.temperature, entropy=True)
        reports = run_schedule(chunks, streams, loss, head)
        return reports, sum(batch.get("divisor", 1.0) for batch in micro_batches)

    def _loss(
        self, batches: Iterator[Batch], stream: Stream, output: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """A sum over tokens and its report, like `token_loss`."""
        batch = next(batches)
        grpo = self._grpo
        log_probs, entropies = of_all_context_ranks(output, stream, dim=1)
        # a rehearsal has batches of conversations, without rewards
        fields = batch.get("fields", {})
        advantages = fields.get("advantage", torch.zeros_like(log_probs))
        weights = fields.get("weight", torch.ones_like(log_probs))
        old = fields.get("old", log_probs.detach())
        bounds = grpo.epsilon, grpo.epsilon_high, grpo.delta
        loss = losses.ppo_clip(log_probs, old, advantages, weights, *bounds)
        if grpo.beta:
            reference = fields.get("reference", log_probs.detach())
            loss += losses.kl_penalty(log_probs, reference, grpo.beta, weights)
        return loss.total, self._report(stream, batch, loss, output, entropies.detach())

    def _report(
        self, stream: Stream, batch: Batch, loss: Loss, output: Tensor, entropies: Tensor
    ) -> dict[str, Any]:
        first = parallel_state.get_context_parallel_rank() == 0  # all of these ranks have the same tokens
        total = loss.total.detach().double()
        count = torch.full_like(total, entropies.numel())
        logs = {
            "ratio": loss.logs["ratio"],
            "clip_ratio/region_mean": loss.logs["clip_share"],
            "entropy": torch.stack([entropies.double().sum(), count]),
            "kl": loss.logs.get("kl", torch.zeros_like(loss.logs["ratio"])),
        }
        logs["reward"] = torch.zeros_like(logs["entropy"])
        sums = torch.stack([total, torch.full_like(total, batch.get("divisor", 1.0)), count])
        return {
            "sums": sums * first,
            "logs": {name: value.double() * first for name, value in logs.items()},
            "losses": -output[0].detach(),
            "places": stream.output_places,
        }

    # -- validation

    def _validate(self, micro_batches: list[Batch]) -> tuple[Reports, float]:
        """Reports of the rewards of greedy answers; a row without a sample's key does not count."""
        watchdog.beat("answering the prompts of the validation")
        prompts = prompts_of(micro_batches)
        samples = self._answer(prompts, greedy=True)
        total = self._total(self._rewards_of(prompts, samples)[0])
        keys = [bool(keys) for batch in micro_batches for keys in batch["__key__"]]
        rewards = np.where(keys, total, np.nan)
        reports = []
        device = setup.device()
        for of_batch in np.split(rewards, np.cumsum([len(batch["__key__"]) for batch in micro_batches])[:-1]):
            reward, count = np.nansum(of_batch), float((~np.isnan(of_batch)).sum())
            if parallel_state.get_context_parallel_rank():
                reward = count = 0.0
            logs = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in GRPO.figures}
            logs["reward"] = torch.tensor([reward, count], dtype=torch.float64, device=device)
            sums = torch.tensor([-reward, count, count], dtype=torch.float64, device=device)
            nothing = torch.zeros(0, dtype=torch.int64, device=device)
            reports.append({"sums": sums, "logs": logs, "losses": nothing.double(), "places": nothing})
        return (reports if parallel_state.is_pipeline_last_stage() else []), float(len(prompts))


def draw_numbers(keys: Sequence[str]) -> list[int]:
    """Return a seed for the answers of each prompt of a step, the same on whichever rank has the prompt.

    It depends on the prompt's key and on how often that came before in the step.
    """
    times = Counter()
    numbers = []
    for key in keys:
        numbers.append(crc32(f"{key} {times[key]}".encode() if times[key] else key.encode()))
        times[key] += 1
    return numbers


def _mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")


def _deviation(values: np.ndarray) -> float:
    """The deviation of a sample (n - 1), as in TRL; 0 for one value."""
    values = values[~np.isnan(values)]
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
