"""What `test_rollouts.py` runs in processes: engines, and a loop that learns."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import policy_in_ranks
import torch
from PIL import Image

from megatron_vlm.config import ParallelConfig

TEMPERATURE, ANSWERS, NEW_TOKENS, STEPS = 0.8, 4, 6, 30
LEARNS = "gemma3"  # the loop knows no family


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (40 + 8 * seed, 56, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def prompts_of(source) -> list:
    """A text, and texts with one and two images."""
    from megatron_vlm.rl.rollouts import RolloutPrompt

    found = []
    for images in (0, 1, 2):
        parts = [{"type": "image"}] * images + [{"type": "text", "text": f"What are these {images}?"}]
        files = [jpeg(seed) for seed in range(images)]
        found.append(RolloutPrompt.of(source, [{"role": "user", "content": parts}], files))
    return found


def measure(asked: dict[str, tuple[str, dict[str, str]]], dead: str) -> dict[str, Any]:
    """By family, what two processes find; with the URLs of servers by style, and one without a server."""
    return {family: _family(path, urls, dead, family == LEARNS) for family, (path, urls) in asked.items()}


def _family(path: str, urls: dict[str, str], dead: str, learns: bool) -> dict[str, Any]:
    from examples.rl.http_rollouts import EngineError, HttpEngine
    from megatron_vlm.rl.rollouts import OwnEngine

    policy = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300)
    prompts = prompts_of(policy.source)
    engine = OwnEngine(ANSWERS, NEW_TOKENS, TEMPERATURE)
    found = {"own": looked_at(policy, engine(policy, prompts), TEMPERATURE)}
    found["again"] = looked_at(policy, engine(policy, prompts), TEMPERATURE)
    for style, url in urls.items():
        engine = HttpEngine(url, "tiny", ANSWERS, NEW_TOKENS, TEMPERATURE)
        found[style] = looked_at(policy, engine(policy, prompts), 1.0 if style == "vllm" else TEMPERATURE)
    try:
        HttpEngine(dead, "tiny", ANSWERS, NEW_TOKENS, retries=1, pause=0.01)(policy, prompts)
    except EngineError as error:
        found["dead"] = str(error)
    found["cut"] = cut(policy, prompts)
    found |= {"loop": learnt(policy, prompts[1])} if learns else {}
    policy = policy_in_ranks.policy_of(path, ParallelConfig(), 300)  # two ranks of data parallelism
    found["shares"] = shares(policy, prompts)
    return found


def looked_at(policy, samples: list[dict], temperature: float) -> dict[str, Any]:
    """The answers, and how far the engine's log-probabilities are from the policy's."""
    from megatron_vlm.rl.rollouts import own_share

    differences = policy.compare(
        own_share(samples), [one["rollout_log_probs"] for one in own_share(samples)], temperature
    )
    return {
        "answers": [one["input_ids"][one["loss_mask"]].tolist() for one in samples],
        "prompts": [one["prompt"] for one in samples],
        "ended": [one["ended"] for one in samples],
        "images": [len(one.get("pixel_values", ())) for one in samples],
        "differences": {name: dataclasses.asdict(each) for name, each in differences.items()},
    }


def cut(policy, prompts: list) -> list[tuple]:
    """Answers that hold a placeholder, as samples: their tokens, log-probabilities and end."""
    from megatron_vlm.rl.rollouts import Answered, samples_of

    ids = prompts[1].inputs["input_ids"]
    kinds = torch.as_tensor(policy.source.description.visual_kinds(ids))
    placeholder = ids[kinds != 0][0].item()
    answered = [
        Answered([5, 6, placeholder, 7], [-1.0, -2.0, -3.0, -4.0], True),
        Answered([placeholder], [-1.0], True),
    ]
    samples = samples_of(policy, prompts[1:2], [answered])
    policy.logprobs(samples)
    return [
        (one["input_ids"][one["loss_mask"]].tolist(), one["rollout_log_probs"].tolist(), one["ended"])
        for one in samples
    ]


def learnt(policy, prompt) -> dict[str, Any]:
    """GRPO where the lower half of all tokens is rewarded: the rewards of the steps, and the ratios."""
    from megatron_vlm.rl import losses
    from megatron_vlm.rl.rollouts import OwnEngine, own_share

    half = policy.source.description.text.vocab_size // 2
    engine, rewards_of, ratios = OwnEngine(32, 1), [], []

    def grpo(log_probs, _, fields):
        return losses.ppo_clip(log_probs, fields["old"], fields["advantage"])

    for _ in range(STEPS):
        samples = engine(policy, [prompt])
        rewards = [float(one["input_ids"][-1] < half) for one in samples]
        rewards_of.append(sum(rewards) / len(rewards))
        advantages = losses.grpo_advantages(rewards, [one["prompt"] for one in samples])
        own = own_share([one | {"advantage": a} for one, a in zip(samples, advantages, strict=True)])
        old = policy.logprobs(own).log_probs
        own = [one | {"old": each} for one, each in zip(own, old, strict=True)]
        logs = policy.forward_backward(own, grpo, len(samples), fields=["old", "advantage"])
        ratios.append(logs["ratio"])
        policy.step()
    return {"rewards": rewards_of, "ratios": ratios}


def shares(policy, prompts: list) -> dict[str, Any]:
    """Which of five samples this rank has, and what the policy answers as two data-parallel ranks."""
    from megatron_vlm.rl.rollouts import OwnEngine, own_share

    samples = OwnEngine(ANSWERS, NEW_TOKENS, TEMPERATURE)(policy, prompts)
    return {
        "own": [one["number"] for one in own_share([{"number": number} for number in range(5)])],
        "answers": looked_at(policy, samples, TEMPERATURE)["answers"],
    }
