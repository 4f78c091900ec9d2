"""What `test_policy.py` runs: a policy against Transformers' log_softmax and gradients."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import parity
import saved_cases
import torch
from PIL import Image

from megatron_vlm.config import AdapterConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.data.image_processors import get_image_spec

TEMPERATURE, COEFFICIENT = 0.7, 0.3
OURS = ("loss_mask", "advantage", "routes")
ROWS = ("t", "it", "ititit")


def layouts_of(family: str) -> list[str]:
    """`test_parity.py` looks at the model; what differs here are rows, outputs and gradients."""
    from megatron_vlm.models.families import load

    each = ["TP2+SP", "PP2", "CP2"]
    if load(family).has_experts:
        each += ["EP2", "CP2·EP2"]
    further = ["1 process", "PP2·VPP2", "DP2 dist. optimizer", "CP2·DP2"]
    return each + further * (family == "gemma3")


def samples_of(family: str, path: Path | str) -> list[dict[str, torch.Tensor]]:
    """What the processor makes of texts with 0, 1 and 3 images, and a video; advantages for every token."""
    from transformers import AutoConfig, AutoProcessor

    from megatron_vlm.models.families import describe

    description, processor = describe(AutoConfig.from_pretrained(path)), AutoProcessor.from_pretrained(path)
    numbers = np.random.default_rng(3)
    samples = []
    for row in (*ROWS, *(["vt"] if parity.takes_videos(description) else [])):
        found = parity.encode_row(processor, parity.conversation(numbers, row))
        ids = found["input_ids"][0]
        sample = {key: value[0] if key in parity.TEXT_KEYS else value for key, value in found.items()}
        sample["loss_mask"] = torch.from_numpy(numbers.random(len(ids)) < 0.6)
        sample["loss_mask"] &= ids < description.text.vocab_size  # Kimi's token of videos is none of it
        samples.append(sample | {"advantage": torch.from_numpy(numbers.normal(size=len(ids))).float()})
    return samples


def reference(path: Path | str, samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Log-probabilities and entropies of all tokens but the first by Transformers, gradients of `loss` over
    the wanted ones, and by layer the experts of each token: those of its `routes` if it has any."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from megatron_vlm.models.families import describe
    from megatron_vlm.weight_files import hub_name

    description = describe(AutoConfig.from_pretrained(path))
    kind = get_image_spec(AutoProcessor.from_pretrained(path))
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    model = parity.clip_by_clip(model)
    positions, found, total = description.position_ids, {"log_probs": [], "entropies": []}, 0.0
    given, found["experts"] = with_given_experts(model)
    for sample in samples:
        given["routes"] = sample.get("routes")
        found["experts"].append({})
        ids, ready = sample["input_ids"], kind.unpad(sample)
        seen = {key: ready[key] for key in description.visual_keys if key in ready}
        inputs = parity.GenericVisualInputs(**seen) if seen else None
        text = {key: sample[key][None] for key in parity.TEXT_KEYS if key in sample}
        visual = {key: sample[key] for key in sample if key not in (*text, *OURS)}
        text["position_ids"] = positions(ids, inputs).unsqueeze(-2)
        logits = model(**text, **visual, use_cache=False).logits[0, :-1] / TEMPERATURE
        log_p = logits.log_softmax(-1)
        scored = ids[1:, None].clamp(max=logits.shape[-1] - 1)
        mine, entropy = log_p.gather(1, scored)[:, 0], -(log_p.exp() * log_p).sum(-1)
        wanted = sample["loss_mask"][1:]
        total = total - (mine * sample["advantage"][1:] + COEFFICIENT * entropy)[wanted].sum()
        found["log_probs"].append(mine.detach() * wanted)
        found["entropies"].append(entropy.detach() * wanted)
    (total / 5).backward()
    grads = {hub_name(name, description.renames): param.grad for name, param in model.named_parameters()}
    return found | {"loss": total.item() / 5, "grads": grads}


def with_given_experts(model) -> tuple[dict[str, Any], list[dict[int, torch.Tensor]]]:
    """Lets the routers of Transformers take given["routes"] (T or T - 1, layers, k), and note what they take
    in the last entry of the list. The weights are made of their own logits, as their forwards make them."""
    given: dict[str, Any] = {"routes": None}
    taken: list[dict[int, torch.Tensor]] = []

    def take(layer: int, gate, _, output):
        logits, weights, experts = output
        if given["routes"] is not None:
            routes = given["routes"][:, layer].long()
            experts = experts.clone()
            experts[: len(routes)] = torch.where(routes < 0, experts[: len(routes)], routes)
            sigmoid, scaled = hasattr(gate, "e_score_correction_bias"), hasattr(gate, "per_expert_scale")
            # Gemma 4's first output is probabilities already
            scores = logits if scaled else logits.sigmoid() if sigmoid else logits.softmax(-1)
            scores = scores.gather(1, experts)
            weights = scores / scores.sum(-1, keepdim=True) * getattr(gate, "routed_scaling_factor", 1.0)
            if scaled:
                weights = weights * gate.per_expert_scale[experts]
        taken[-1][layer] = experts.sort(-1).values.short()
        return logits, weights, experts

    text = getattr(model.model, "language_model", None) or model.model.text_model
    for layer, module in enumerate(text.layers):
        if (gate := getattr(module.mlp, "gate", getattr(module, "router", None))) is not None:
            gate.register_forward_hook(partial(take, layer))
    return given, taken


def loss(log_probs, entropies, fields):
    from megatron_vlm.rl import losses

    return losses.policy_gradient(log_probs, fields["advantage"]) + losses.entropy_bonus(
        entropies, COEFFICIENT
    )


def policy_of(
    path: str, layout: ParallelConfig, max_tokens: int, adapter: AdapterConfig | None = None, **model: Any
):
    from megatron_vlm.parallel import setup
    from megatron_vlm.rl.policy import Policy

    config = RunConfig(parallel=layout, model=ModelConfig(**{"hf_path": path, "dtype": "fp32"} | model))
    config.adapter = adapter or AdapterConfig()
    config.optimizer.lr, config.optimizer.warmup_steps = 1e-2, 0
    if torch.distributed.is_initialized():
        setup.reset_layout(layout, seed=1)
    return Policy.from_hf(config, max_tokens)


def mine(samples: list) -> list:
    """Those of this data-parallel rank: the first has one sample, the second the others."""
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_world_size() == 1:
        return samples
    return samples[1:] if parallel_state.get_data_parallel_rank() else samples[:1]


def measure(names: list[str], path: str, held: str) -> list[dict]:
    """The worst differences to Transformers over all ranks, by layout and by how samples are packed."""
    rows = []
    for name in names:
        for max_tokens in (1, 300):
            rows.append({"layout": name, "max_tokens": max_tokens} | _measure(name, path, held, max_tokens))
    return rows


def _measure(name: str, path: str, held: str, max_tokens: int) -> dict:
    samples, expected = saved_cases.read(held)
    return differences(policy_of(path, parity.LAYOUTS[name][1], max_tokens), samples, expected)


def differences(policy, samples: list, expected: dict[str, Any]) -> dict:
    """The worst over all ranks; takes no step."""
    from megatron_vlm.training import step

    layout, own = policy.config.parallel, mine(samples)
    first = next(i for i, sample in enumerate(samples) if sample is own[0])
    wrong = torch.zeros((), dtype=torch.int64)

    def checked(log_probs, entropies, fields):
        """`loss`; the first ratio is 1, and every token knows its sample."""
        wrong.add_((log_probs != fields["old"]).sum() * (policy.max_tokens > 1))
        wrong.add_((fields["sample"] != fields["number"]).sum())
        return loss(log_probs, entropies, fields)

    scores = policy.logprobs(own, TEMPERATURE, entropy=True)
    worst = 0.0
    for kind, found in (("log_probs", scores.log_probs), ("entropies", scores.entropies)):
        assert len(found) == len(own)
        for ours, theirs in zip(found, expected[kind][first:], strict=False):
            worst = max(worst, (ours.cpu() - theirs).abs().max().item())
    known = [sample | {"old": old} for sample, old in zip(own, scores.log_probs, strict=True)]
    half = len(own) // 2  # one call with packed rows, two without: other rows would differ in last bits
    fields, logs = ["advantage", "old", "number"], []
    for part in [known] if policy.max_tokens > 1 else (known[:half], known[half:]):
        numbered = [sample | {"number": number} for number, sample in enumerate(part)]
        logs.append(policy.forward_backward(numbered, checked, 5, TEMPERATURE, True, fields))
    step.reduce_gradients(policy.chunks)
    if layout.distributed_optimizer:
        parity.gather_sharded_grads(policy.chunks)
    chunks, rules = [chunk.module for chunk in policy.chunks], policy.source.weight_map.rules
    difference, scales = (0.0, ""), parity.gradient_scales(expected["grads"])
    for key, grad in parity.gradients_of(chunks, rules):
        theirs = expected["grads"].get(key)
        theirs = torch.zeros_like(grad) if theirs is None else theirs
        difference = max(difference, ((grad - theirs).abs().max().item() / scales(key), key))
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, (worst, difference, wrong.item()))
    return {
        "log_probs": max(each[0] for each in every),
        "gradient": max(each[1] for each in every),
        "loss": abs(sum(each["loss"] for each in logs) - expected["loss"]),
        "wrong": sum(each[2] for each in every),
    }


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
