"""Rows that grow together: their prompts and then their tokens as streams, and when each row ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_vlm.batch import Batch, GenericVisualInputs, Prompt
from megatron_vlm.generation.cache import DecodePlan, KeyValueCache, Prefill
from megatron_vlm.generation.sampling import Sampling
from megatron_vlm.models.language_model import check_positions
from megatron_vlm.models.layers.moe import FREE_ROUTE, ROUTE_OF_PADDING
from megatron_vlm.models.stream import Stream, StreamLayout, check_tokens
from megatron_vlm.models.vlm import VLMModel
from megatron_vlm.parallel.setup import device, on_device

NOTHING = np.empty(0, np.int64)


class Piece(NamedTuple):
    """Some of the answers to a prompt: the prompt's number, the first answer, the one after the last."""

    prompt: int
    start: int
    stop: int


@dataclass(frozen=True)
class Request:
    """The settings of generation that all rows share; what is drawn depends on the prompts' `numbers`."""

    prompts: list[Prompt]
    max_new_tokens: int
    sampling: Sampling
    stop: list[int]
    numbers: Sequence[int]
    longest_prompt: int  # of all ranks that compute together

    @property
    def longest_row(self) -> int:
        """The most tokens of a row that are kept; nothing follows the last, so it is not."""
        return self.longest_prompt + self.max_new_tokens - 1

    def check(self, model: VLMModel) -> None:
        """Raises ValueError, as every rank does, for tokens, places or media that the model does not take."""
        last = max(prompt["position_ids"].max().item() for prompt in self.prompts)
        most_positions = model.config.most_positions
        check_positions(last + self.max_new_tokens - 1, most_positions, "a prompt with its answer")
        for number, prompt in enumerate(self.prompts):
            ids = prompt["input_ids"].numpy()
            check_tokens(ids, model.visual_kinds(ids), model.config.vocab_size)
            if problem := model.misfit(prompt["input_ids"], prompt["visual_inputs"]):
                raise ValueError(
                    f"prompt {number}: {problem}; give all that the model's processor makes, and "
                    "input_ids that are not cut."
                )


class AnswerRows:
    """One row for each answer of the pieces: R of them; the model computes the rows that are `held`.

    `taken` (3, B, steps) fp64 are each row's tokens and their log-probabilities, see `Sampling.choose`;
    `counts` (B,) how many there are.
    """

    def __init__(self, request: Request, pieces: list[Piece], model: VLMModel):
        self.request, self.pieces, self.model = request, pieces, model
        self.windows = set(model.config.layer_windows or (None,))
        rows = [(i, answer) for i, piece in enumerate(pieces) for answer in range(piece.start, piece.stop)]
        self.piece_of_row = np.array([i for i, _ in rows])
        self.answers = [(pieces[i].prompt, answer) for i, answer in rows]
        prompts, steps = [request.prompts[piece.prompt] for piece in pieces], request.max_new_tokens
        numbers = [request.numbers[piece.prompt] for piece in pieces]
        draws = [request.sampling.draws(numbers[i], answer, steps) for i, answer in rows]
        self.draws, self.steps = np.stack(draws), 0
        last = [prompt["position_ids"].max().item() for prompt in prompts]
        self.positions = np.array(last)[self.piece_of_row]  # that of the last token so far, on every axis
        lengths = np.array([len(prompt["input_ids"]) for prompt in prompts])
        self.longest = int(lengths.max())
        self.cache = KeyValueCache(self.longest - lengths, self.longest + steps - 1)
        self.held = np.arange(len(rows))
        self.runs = np.ones(len(rows), bool)
        self.taken, self.counts = np.zeros((3, len(rows), steps)), np.zeros(len(rows), np.int64)

    def layout_of_prompts(self, first: int, count: int) -> StreamLayout:
        """The prompts of `count` pieces as a stream to be, for `prompt_stream`."""
        prompts = [self.request.prompts[piece.prompt] for piece in self.pieces[first : first + count]]
        return self.model.layout(batch_of(prompts), ranks=1)

    def prompt_stream(self, layout: StreamLayout, first: int, length: int) -> Stream:
        """Prompts whose last tokens' logits are wanted and whose keys go into the cache."""
        real_BS = layout.batch["attention_mask"].numpy()
        lengths = real_BS.sum(1)
        last_B = np.arange(len(lengths)) * real_BS.shape[1] + lengths - 1
        stream = layout.stream(0, length, self.windows, device(), last_B)
        prefill = Prefill(self.cache, first, lengths, self.windows, device())
        stream.plan.attend, stream.plan.recur = prefill, prefill.recur
        return stream

    def spread(self) -> Tensor:
        """After all prompts: the cache gets a row for every answer. Returns the piece of each."""
        if len(self.piece_of_row) > len(self.pieces):
            self.cache.select(self.piece_of_row)
        return on_device(self.piece_of_row, device())

    def token_stream(self, length: int) -> Stream:
        """The last token of each row that is held; its key goes into the cache."""
        rows, row_device = len(self.held), device()

        def padded(values_B: np.ndarray) -> Tensor:
            return on_device(np.pad(values_B, (0, length - rows)), row_device)[None]

        axes = self.request.prompts[0]["position_ids"].dim() - 1
        position_ids = padded(self.positions[self.held])
        order = torch.arange(length, device=row_device)
        # rows that are held come first; what follows is padding, which no expert and no logit is for
        place = self.longest + self.steps - 1
        dtype = self.model.config.params_dtype
        return Stream(
            input_ids=padded(self.taken[0, self.held, self.steps - 1].astype(np.int64)),
            position_ids=position_ids.expand(3, 1, -1) if axes else position_ids,
            plan=DecodePlan(self.cache, place, self.windows, dtype, row_device),
            visual_inputs=None,
            feature_ranks=NOTHING,
            feature_rows=NOTHING,
            output_rows=order[:rows],
            labels=order[:0],
            weights=None,
            output_places=order[:rows],
            outputs=rows,
            trained_weight=0.0,
            routes=torch.where(order < rows, FREE_ROUTE, ROUTE_OF_PADDING)[None, :, None, None],
        )

    def choose(self, logits_BV: Tensor) -> Tensor:
        """(3, held) fp64, see `Sampling.choose`."""
        return self.request.sampling.choose(logits_BV, self.draws[self.held, self.steps])

    def take(self, chosen: np.ndarray) -> None:
        """The next token of each held row. When half of them have ended, the cache forgets these."""
        runs = self.runs[self.held]
        self.taken[:, self.held, self.steps] = chosen * runs
        self.counts[self.held] += runs
        self.runs[self.held] = runs = runs & ~np.isin(chosen[0], self.request.stop)
        self.positions += 1
        self.steps += 1
        if 0 < 2 * runs.sum() <= len(runs):
            self.held = self.held[runs]
            self.cache.select(np.flatnonzero(runs))

    def answered(self) -> dict[tuple[int, int], np.ndarray]:
        """(3, tokens) of `taken` by prompt and answer."""
        return {answer: self.taken[:, row, : self.counts[row]] for row, answer in enumerate(self.answers)}


def batch_of(prompts: list[Prompt]) -> Batch:
    """The prompts as rows of one micro batch."""
    lengths = [len(prompt["input_ids"]) for prompt in prompts]

    def rows(tensors: list[Tensor]) -> Tensor:
        return torch.stack([pad(x, (0, max(lengths) - x.shape[-1])) for x in tensors], dim=-2)

    visual = [prompt["visual_inputs"] for prompt in prompts if prompt["visual_inputs"] is not None]
    return {
        "input_ids": rows([prompt["input_ids"] for prompt in prompts]),
        "position_ids": rows([prompt["position_ids"] for prompt in prompts]),
        "attention_mask": rows([torch.ones(length, dtype=torch.int32) for length in lengths]),
        "visual_inputs": GenericVisualInputs.cat(visual),
    }
