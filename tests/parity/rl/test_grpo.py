"""GRPO as the objective of a run: its loss and gradients are those of Transformers by TRL's formulas."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import saved_cases
import torch
from PIL import Image
from samples import sample_of

from megatron_vlm.config import DataConfig, GRPOConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.image_processors import get_image_spec

# ---- what runs in the ranks


PROMPTS = ("t", "it", "itit")  # a letter for each part: i image, t a few words
ADVANTAGES = (1.5, 0.0, -0.7, 0.3, -1.1, 0.2)  # of two answers to each prompt
LENGTHS = (9, 4, 12, 1, 6, 8)
CUT = {"dr_grpo, without cut answers": (4,), "dapo, without a rank's answers": (1, 3, 5)}  # which did not end
SEQ_LENGTH = 1024
SETTINGS = {
    "grpo, with KL": GRPOConfig(loss_type="grpo", beta=0.1, epsilon=0.1),
    "dapo, higher clip": GRPOConfig(loss_type="dapo", epsilon=0.05, epsilon_high=0.1, delta=1.2),
    "dr_grpo, without cut answers": GRPOConfig(
        loss_type="dr_grpo", epsilon=0.1, mask_truncated_completions=True
    ),
    "dapo, without a rank's answers": GRPOConfig(epsilon=0.1, mask_truncated_completions=True),
}
# so that the old log-probabilities are those of before the model moves
SETTINGS = {
    name: replace(grpo, steps_per_generation=2, max_completion_length=16, temperature=0.8)
    for name, grpo in SETTINGS.items()
}


def layouts_of(family: str) -> list[str]:
    dense = ["1 process", "TP2+SP", "PP2·VPP2", "CP2", "DP2 dist. optimizer", "CP2·DP2"]
    return {"gemma3": dense, "qwen3_vl_moe": ["TP2+SP", "EP2"]}.get(family, ["TP2+SP"])


def cases_of(family: str, path: Path | str) -> dict[str, Any]:
    """Samples with advantages, and the loss and gradients that Transformers and TRL's formula give them for a
    model that has left its starting weights. Those are at `path`, and the others beside it."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
    from megatron_vlm.models.families import describe
    from megatron_vlm.objectives import objective_of
    from megatron_vlm.weight_files import hub_name
    from tiny.checkpoints import build_tiny_checkpoint

    moved = build_tiny_checkpoint(family, Path(path).with_name("moved"), seed=5)
    config, processor = AutoConfig.from_pretrained(path), AutoProcessor.from_pretrained(path)
    description = describe(config)
    start, model = (
        AutoModelForImageTextToText.from_pretrained(each, dtype=torch.float32) for each in (path, moved)
    )
    with torch.no_grad():  # a small step away, so that some ratios are clipped and others are not
        for one, other in zip(start.parameters(), model.parameters(), strict=True):
            other.copy_(one + 0.3 * (other - one))
        for one, other in zip(start.buffers(), model.buffers(), strict=True):
            other.copy_(one)
    model.save_pretrained(moved)

    run = RunConfig(data=DataConfig(seq_length=SEQ_LENGTH))
    run.train.objective = "grpo"
    encoder = HFEncoderVLMTaskEncoder(processor, run.data, description.data_needs)
    encoder.documents = objective_of(run).sample_encoder(encoder.documents, run)
    numbers, samples, scores = np.random.default_rng(3), [], []
    ids = torch.arange(3, 100)
    of_texts = ids[torch.as_tensor(description.visual_kinds(ids)) == 0].numpy()  # an answer has no images
    for n, parts in enumerate(PROMPTS):
        user, _ = parity.conversation(numbers, parts)
        images = [part["image"] for part in user["content"] if part["type"] == "image"]
        content = [{k: v for k, v in part.items() if k != "image"} for part in user["content"]]
        conversation = parse_record({"prompt": [{"role": "user", "content": content}]})
        sample = sample_of(conversation.stored(), [_png(image) for image in images], key=str(n))
        prompt = encoder.documents.encode(sample)
        theirs = processor.apply_chat_template(
            [user], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert theirs["input_ids"][0].tolist() == prompt.input_ids.tolist()
        for answer in (2 * n, 2 * n + 1):
            tokens = torch.from_numpy(numbers.choice(of_texts, LENGTHS[answer]))
            ids = torch.cat([prompt.input_ids, tokens])
            mask = torch.arange(len(ids)) >= len(prompt.input_ids)
            visual = prompt.visual_inputs.as_model_kwargs() if prompt.visual_inputs else {}
            samples.append(
                {"input_ids": ids, "loss_mask": mask, "prompt": n, "number": answer, "key": str(n)}
                | {"advantage": ADVANTAGES[answer], **visual}
            )
            inputs = _with_answer(processor, dict(theirs), tokens, description)
            scores.append([_log_probs(each, inputs, tokens) for each in (model, start)])
    expected = {}
    for name, grpo in SETTINGS.items():
        model.zero_grad()
        loss = _loss_of_trl(grpo, scores, CUT.get(name, ()))
        loss.backward(retain_graph=True)
        grads = {
            hub_name(key, description.renames): param.grad.clone()
            for key, param in model.named_parameters()
            if param.grad is not None
        }
        expected[name] = {"loss": loss.item(), "grads": grads}
    return {"moved": str(moved), "samples": samples, "expected": expected}


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _with_answer(processor: Any, inputs: dict, tokens: torch.Tensor, description: Any) -> dict:
    """The processor's outputs for the prompt, with the answer behind it."""
    ready = get_image_spec(processor).unpad(inputs)
    seen = {key: value for key, value in ready.items() if key in description.visual_keys}
    visual = parity.GenericVisualInputs(**seen) if seen else None
    inputs["input_ids"] = torch.cat([inputs["input_ids"][0], tokens])[None]
    for key in parity.TEXT_KEYS:
        if key in inputs and key != "input_ids":
            value = 1 if key == "attention_mask" else 0
            inputs[key] = torch.nn.functional.pad(inputs[key], (0, len(tokens)), value=value)
    inputs["position_ids"] = description.position_ids(inputs["input_ids"][0], visual).unsqueeze(-2)
    return inputs


def _log_probs(model: torch.nn.Module, inputs: dict, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(**inputs, use_cache=False).logits[0].float() / 0.8
    return logits[-len(tokens) - 1 : -1].log_softmax(-1).gather(1, tokens[:, None])[:, 0].double()


def _loss_of_trl(grpo: GRPOConfig, scores: list, cut: tuple[int, ...]) -> torch.Tensor:
    """`GRPOTrainer._compute_loss` of TRL 1.16, by hand: padded rows, and the model's log-probabilities."""
    keeps = [answer not in cut for answer in range(len(scores))]
    longest = max(LENGTHS)

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])

    logps, old = padded([one[0] for one in scores]), padded([one[1].detach() for one in scores])
    mask = padded([torch.ones(length).double() * keep for length, keep in zip(LENGTHS, keeps, strict=True)])
    advantages = torch.tensor(ADVANTAGES).double()[:, None]
    high = grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high
    coef_1 = torch.exp(logps - old)
    coef_2 = torch.clamp(coef_1, 1 - grpo.epsilon, 1 + high)
    if grpo.delta is not None:
        coef_1 = torch.clamp(coef_1, max=grpo.delta)
    per_token = -torch.min(coef_1 * advantages, coef_2 * advantages)
    if grpo.beta:
        per_token = per_token + grpo.beta * (torch.exp(old - logps) - (old - logps) - 1)
    if grpo.loss_type == "grpo":
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if grpo.loss_type == "dr_grpo":
        return (per_token * mask).sum() / (len(scores) * grpo.max_completion_length)
    return (per_token * mask).sum() / mask.sum()


def measure(names: list[str], path: str, held: str) -> list[dict]:
    """The worst differences over all ranks, by layout and settings."""
    from megatron_vlm.parallel import setup

    case, rows = saved_cases.read(held), []
    for name in names:
        layout = parity.LAYOUTS[name][1]
        if not torch.distributed.is_initialized():
            setup.init_distributed(layout, seed=1)
        setup.reset_layout(layout, seed=1)
        rows += [{"layout": name, "settings": kind} | _measure(layout, path, case, kind) for kind in SETTINGS]
    return rows


def _measure(layout: ParallelConfig, path: str, case: dict, kind: str) -> dict:
    from megatron.core import parallel_state

    from megatron_vlm.models.hf import open_source
    from megatron_vlm.models.weights.importing import import_hf
    from megatron_vlm.objectives import objective_of
    from megatron_vlm.training.figures import BySource
    from megatron_vlm.training.loop import starting_model
    from megatron_vlm.training.step import mean_loss

    run = RunConfig(run_dir="none", parallel=layout, model=ModelConfig(hf_path=path, dtype="fp32"))
    run.data.seq_length = 256  # several answers in a row
    run.train.objective, run.grpo = "grpo", SETTINGS[kind]
    source = open_source(path)
    ddp = starting_model(run, source)
    grpo = objective_of(run).step_loss(run, ddp)
    grpo.take_model(source, ddp)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    cut = CUT.get(kind, ())
    samples = [sample | {"ended": sample["number"] not in cut} for sample in case["samples"][rank::ranks]]
    micro_batches = grpo.micro_batches_of(samples)
    chunks = [chunk.module for chunk in ddp]
    import_hf(chunks, Path(case["moved"]), source.weight_map)

    for chunk in ddp:
        chunk.zero_grad_buffer()
    reports, logged = parity.backward(ddp, micro_batches, grpo), BySource((), objective_of(run).figures)
    logged.count(micro_batches, reports)
    loss, _ = mean_loss(reports)
    sums = logged.sums()
    torch.distributed.all_reduce(sums)
    if layout.distributed_optimizer:
        parity.gather_sharded_grads(ddp)
    expected = case["expected"][kind]
    worst, missing = parity.compare_gradients(ddp, source.weight_map.rules, expected["grads"])
    return {
        "loss": abs(loss - expected["loss"]),
        "gradient": worst,
        "without a gradient": missing,
        "figures": logged.figures(sums.cpu().numpy()),
    }


# ---- the tests


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    return parity.measured(request, tmp_path_factory, parity.LAYOUTS, cases_of, measure)


@pytest.mark.parametrize(("family", "layout"), parity.cells(layouts_of, ("TP2+SP",)))
def test_loss_and_gradients_are_those_of_transformers(rows_of, family, layout):
    rows = rows_of(parity.LAYOUTS[layout][0])
    found = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert [row["settings"] for row in found] == list(SETTINGS)
    for row in found:
        assert row["loss"] <= 1e-5 and row["gradient"][0] <= 1e-4, row
        assert not row["without a gradient"]
        figures = row["figures"]
        assert 0 < figures["clip_ratio/region_mean"] < 1 and figures["entropy"] > 0
        assert ("kl" in figures) == ("KL" in row["settings"])
