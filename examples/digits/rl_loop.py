"""Reinforcement learning on a run's latest checkpoint: the model reads digits, and a right one is rewarded.

    torchrun --nproc_per_node 2 rl_loop.py runs/demo-rl/labelled DATA OUTPUT STEPS

Each step samples several answers to some questions of DATA/rewarded.jsonl and improves the model by GRPO. How
many of DATA/held_out.jsonl it reads right is looked at now and then, and never learned from. OUTPUT gets
metrics.jsonl, samples.json and the exported model, `hf`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from evaluate import MAX_NEW_TOKENS, read_questions, without_thoughts
from megatron_vlm.config import RunConfig
from megatron_vlm.generation.generate import generate
from megatron_vlm.generation.prompt import stop_tokens
from megatron_vlm.models.weights.exporting import export_hf
from megatron_vlm.overrides import from_yaml
from megatron_vlm.parallel import setup
from megatron_vlm.rl import losses
from megatron_vlm.rl.policy import Policy
from megatron_vlm.rl.rollouts import OwnEngine, Rollout, RolloutPrompt, Sample, own_share, reply

QUESTIONS, ANSWERS, PARTS = 48, 8, 2  # of a step; its samples make this number of optimizer steps
TEMPERATURE = 1.0
MAX_TOKENS = 1024  # of a packed row
LEARNING_RATE, WARMUP = 5e-4, 10  # without warmup, Adam's first steps are as long as any and mostly noise
LOOK_EVERY = 10  # steps between looks at the held-out questions


def main() -> None:
    start, data, output, steps = *map(Path, sys.argv[1:4]), int(sys.argv[4])
    policy = Policy.from_run(configuration(start, steps), MAX_TOKENS)
    training, held_out = (read_questions(data / f"{name}.jsonl") for name in ("rewarded", "held_out"))
    draw = random.Random(0)
    batches = (draw.sample(training, QUESTIONS) for _ in range(steps))
    engine = OwnEngine(ANSWERS, MAX_NEW_TOKENS, TEMPERATURE)
    history, shown = learn(policy, engine, batches, steps, held_out)
    export_hf(
        [chunk.module for chunk in policy.chunks],
        output / "hf",
        policy.source.folder,
        policy.source.weight_map,
    )
    if setup.is_first_rank():
        (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
        (output / "samples.json").write_text(json.dumps(shown))
    setup.shutdown()


def configuration(run_dir: Path, steps: int) -> RunConfig:
    """The run's own, with another learning rate."""
    config = from_yaml((run_dir / "config.yaml").read_text(encoding="utf-8"))
    config.run_dir = str(run_dir)
    config.optimizer.lr, config.optimizer.min_lr = LEARNING_RATE, LEARNING_RATE / 10
    config.train.steps = steps * PARTS
    config.optimizer.warmup_steps = min(WARMUP, config.train.steps - 1)
    return config


def learn(
    policy: Policy, engine: Rollout, batches: Iterable[list[dict]], steps: int, held_out: list[dict]
) -> tuple[list[dict], dict[str, list[dict]]]:
    """A row of figures for each step, and some samples of the first and of the last."""
    looked_at = [prompt_of(policy, question) for question in held_out]
    history: list[dict] = [{"step": 0, "accuracy": accuracy(policy, looked_at, held_out)}]
    shown: dict[str, list[dict]] = {}
    tell(history[0])
    bar = tqdm(total=steps, desc="GRPO", unit="step", disable=None if setup.is_first_rank() else True)
    for step, questions in enumerate(batches, start=1):
        samples = engine(policy, [prompt_of(policy, question) for question in questions])
        rewards = [float(answer(policy, one) == questions[one["prompt"]]["answer"]) for one in samples]
        row = {"step": step, "reward": sum(rewards) / len(rewards), "samples": len(samples)}
        history.append(row | improve(policy, samples, rewards))
        if step in (1, steps):
            shown["first" if step == 1 else "last"] = described(policy, questions, samples, rewards)
        if step % LOOK_EVERY == 0 or step == steps:
            history[-1]["accuracy"] = accuracy(policy, looked_at, held_out)
            tell(history[-1])
        bar.set_postfix_str(f"reward {row['reward']:.2f}", refresh=False)
        bar.update()
    bar.close()
    return history, shown


def tell(row: dict) -> None:
    if setup.is_first_rank():
        reward = f"reward {row['reward']:.2f}" if "reward" in row else " " * 11
        tqdm.write(
            f"step {row['step']:3} · {reward} · held-out digits {row['accuracy']:.1%}", file=sys.stdout
        )
        sys.stdout.flush()


def improve(policy: Policy, samples: list[Sample], rewards: list[float]) -> dict[str, float]:
    """The optimizer steps that these samples make, and their figures."""
    advantages = losses.grpo_advantages(rewards, [sample["prompt"] for sample in samples])
    weights = losses.grpo_weights(sample["loss_mask"] for sample in samples)
    for sample, advantage, weight in zip(samples, advantages, weights, strict=True):
        sample |= {"advantage": advantage, "weight": weight}
    # equal rewards of all answers to a question have no gradient
    own = own_share([sample for sample in samples if sample["advantage"] != 0])
    parts = [own[part::PARTS] for part in range(PARTS)]
    for part in parts:  # the same rows as below, so that the first ratio is exactly 1
        for sample, old in zip(part, policy.logprobs(part, TEMPERATURE).log_probs, strict=True):
            sample["old"] = old
    figures = {}
    for part in parts:
        logs = policy.forward_backward(
            part,
            grpo,
            len(samples) / PARTS,
            TEMPERATURE,
            fields=["old", "advantage", "weight"],
        )
        norm = policy.step()
        ratio = logs.get("ratio", 1.0)  # there may be no samples
        figures = figures or {"ratio": ratio, "grad_norm": norm}
    return figures | {"last_ratio": ratio, "clip_share": logs.get("clip_share", 0.0)}


def grpo(log_probs, _, fields) -> losses.Loss:
    return losses.ppo_clip(log_probs, fields["old"], fields["advantage"], fields["weight"], clip_high=0.28)


def prompt_of(policy: Policy, question: dict) -> RolloutPrompt:
    images = [image.read_bytes() for image in question["images"]]
    return RolloutPrompt.of(policy.source, question["messages"], images)


def answer(policy: Policy, sample: Sample) -> str:
    return without_thoughts(reply(policy, sample)) if sample["ended"] else ""


def accuracy(policy: Policy, prompts: Sequence[RolloutPrompt], questions: list[dict]) -> float:
    """The share of questions that greedy answers get right."""
    stop = stop_tokens(policy.source.folder, policy.source.description.hf_config)
    found = generate(policy.chunks, [prompt.inputs for prompt in prompts], MAX_NEW_TOKENS, stop=stop)
    decode = policy.source.processor.tokenizer.decode
    said = [without_thoughts(decode(one.reply, skip_special_tokens=True)) for [one] in found]
    return sum(a == q["answer"] for a, q in zip(said, questions, strict=True)) / len(questions)


def described(
    policy: Policy, questions: list[dict], samples: list[Sample], rewards: list[float], count: int = 18
) -> list[dict]:
    """What the contact sheet shows: images, the right answer, and all answers with their mean reward."""
    found = []
    for number, question in enumerate(questions[:count]):
        mine = [i for i, sample in enumerate(samples) if sample["prompt"] == number]
        found.append(
            {
                "images": [str(image) for image in question["images"]],
                "right": question["answer"],
                "said": [answer(policy, samples[i]) for i in mine],
                "reward": sum(rewards[i] for i in mine) / len(mine),
            }
        )
    return found


if __name__ == "__main__":
    main()
