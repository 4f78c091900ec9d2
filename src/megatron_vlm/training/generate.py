"""Greedy decoding on the Megatron model, under any layout.

Every new token is one forward pass over the whole rows, without a key/value cache: correct, simple, and fast
enough for the short answers of an evaluation. For long generations, serve the exported HF folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.batch import Batch, GenericVisualInputs, Prompt
from megatron_vlm.models.head import output_logits
from megatron_vlm.models.stream import Stream
from megatron_vlm.parallel.setup import device
from megatron_vlm.training.step import forward_backward


@torch.no_grad()
def logits(
    chunks: list[torch.nn.Module], micro_batches: list[Batch], wanted: list[np.ndarray] | None = None
) -> list[Tensor]:
    """The logits (n, V) of each micro batch's `wanted` tokens, indices into B * S; None: of all tokens, in
    which those of padding are zero. On the last pipeline stage; elsewhere an empty list. Collective."""
    wanted = wanted or [np.arange(batch["input_ids"].numel()) for batch in micro_batches]
    reports = forward_backward(chunks, micro_batches, _logits_step, forward_only=True, wanted=wanted)
    return [report["logits"] for report in reports]


def _logits_step(data_iterator: Iterator[Stream], model: torch.nn.Module):
    stream = next(data_iterator)
    return model(stream, output_logits), partial(_report_logits, stream)


def _report_logits(stream: Stream, logits_NV: Tensor):
    held = tensor_parallel.gather_from_tensor_model_parallel_region(logits_NV)
    whole = held.new_zeros(stream.outputs, held.shape[1]).index_copy(0, stream.output_places, held)
    if parallel_state.get_context_parallel_world_size() > 1:  # each rank has the logits of its tokens
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
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
    lengths_B = np.array([len(prompt["input_ids"]) for prompt in prompts])
    batch = _rows(prompts, int(lengths_B.max()) + max_new_tokens)
    row_B, room = np.arange(len(prompts)), batch["input_ids"].shape[1]
    for chunk in chunks:
        chunk.eval()
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        batch["attention_mask"] = torch.from_numpy(np.arange(room) < lengths_B[:, None]).int()
        last_B = row_B * room + lengths_B - 1
        token_B = _next_token(logits(chunks, [batch], [last_B]), len(prompts))
        batch["input_ids"][row_B, lengths_B] = token_B
        lengths_B += 1
        for row, token in enumerate(token_B.tolist()):
            if row in running and token in stop:
                running.discard(row)
            elif row in running:
                answers[row].append(token)
        if not running:
            break
    return answers


def _rows(prompts: list[Prompt], length: int) -> Batch:
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


def _next_token(last_logits: list[Tensor], rows: int) -> Tensor:
    """(B,) token ids on the host, sent from the last stage to all."""
    token_B = (
        last_logits[0].argmax(-1) if last_logits else torch.zeros(rows, dtype=torch.int64, device=device())
    )
    last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(token_B, last_rank, group=parallel_state.get_pipeline_model_parallel_group())
    return token_B.cpu()
