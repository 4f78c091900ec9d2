"""Greedy decoding on the Megatron model, under any layout.

Every new token is one forward pass over the whole rows, without a key/value cache: correct, simple, and fast
enough for the short answers of an evaluation. For long generations, serve the exported HF folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.batch import GenericVisualInputs, Prompt
from megatron_vlm.training.step import forward_backward


def logits_step(data_iterator: Iterator[dict], model: torch.nn.Module):
    """Forward step whose report holds the micro batch's logits (B, S, V)."""
    batch = next(data_iterator)
    logits = model(batch["input_ids"], batch["position_ids"], batch["attention_mask"], batch["visual_inputs"])
    return logits, partial(_report_logits, batch.get("logit_index"))


def _report_logits(index_B: Tensor | None, logits_BSV: Tensor):
    if index_B is not None:
        logits_BSV = logits_BSV[torch.arange(len(index_B), device=index_B.device), index_B][:, None]
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits_BSV)
    zero = whole.new_zeros(())
    return zero, zero.int(), {"logits": whole}


@torch.no_grad()
def generate(
    chunks: list[torch.nn.Module], prompts: list[Prompt], max_new_tokens: int, stop_ids: Iterable[int]
) -> list[list[int]]:
    """The greedy continuation of each prompt, without its stop token; the same on every rank.

    Collective over a model-parallel group; all its ranks pass the same prompts. The chunks are put into eval
    mode.
    """
    stop = set(stop_ids)
    lengths = torch.tensor([len(prompt["input_ids"]) for prompt in prompts])
    batch = _rows(prompts, int(lengths.max()) + max_new_tokens)
    device = batch["input_ids"].device
    row_B, lengths = torch.arange(len(prompts), device=device), lengths.to(device)
    for chunk in chunks:
        chunk.eval()
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        batch["attention_mask"] = (
            torch.arange(batch["input_ids"].shape[1], device=device) < lengths[:, None]
        ).int()
        batch["logit_index"] = lengths - 1
        token_B = _next_token(forward_backward(chunks, [batch], logits_step, forward_only=True), lengths)
        batch["input_ids"][row_B, lengths] = token_B
        lengths = lengths + 1
        for row, token in enumerate(token_B.tolist()):
            if row in running and token in stop:
                running.discard(row)
            elif row in running:
                answers[row].append(token)
        if not running:
            break
    return answers


def _rows(prompts: list[Prompt], length: int) -> dict[str, Any]:
    """The prompts as rows of one micro batch, with room for the answers after them."""
    first = prompts[0]["input_ids"]
    input_ids = first.new_zeros(len(prompts), length)
    for row, prompt in zip(input_ids, prompts, strict=True):
        row[: len(prompt["input_ids"])] = prompt["input_ids"]
    visual = [prompt["visual_inputs"] for prompt in prompts if prompt["visual_inputs"] is not None]
    return {
        "input_ids": input_ids,
        "position_ids": torch.stack([_positions(p["position_ids"], length) for p in prompts], dim=-2),
        "visual_inputs": GenericVisualInputs.cat(visual),
    }


def _positions(prompt: Tensor, length: int) -> Tensor:
    """The prompt's positions (..., T), continued on every axis as for text after the prompt."""
    answer = prompt.max() + 1 + torch.arange(length - prompt.shape[-1], device=prompt.device)
    return torch.cat((prompt, answer.expand(*prompt.shape[:-1], -1)), dim=-1)


def _next_token(reports: list[dict[str, Tensor]], lengths_B: Tensor) -> Tensor:
    """(B,) token ids, sent from the last stage to all."""
    token_B = torch.zeros_like(lengths_B)
    if reports:
        token_B = reports[0]["logits"][:, 0].argmax(-1)
    last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(token_B, last_rank, group=parallel_state.get_pipeline_model_parallel_group())
    return token_B
