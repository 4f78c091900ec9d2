"""Answers to many prompts: which rank answers which, how many rows at a time, until all have ended.

Tensor- and pipeline-parallel ranks answer together. Data- and context-parallel ranks answer different
prompts: a token at a time leaves context parallelism nothing to cut. Rows go through a pipeline as several
lanes, so that each stage computes one while the next stage computes another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from operator import index

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch import distributed as dist
from transformers import ProcessorMixin

from megatron_vlm.batch import Prompt
from megatron_vlm.generation.cache import bytes_per_row
from megatron_vlm.generation.rows import AnswerRows, Piece, Request
from megatron_vlm.generation.sampling import Sampling
from megatron_vlm.inputs import check_number
from megatron_vlm.job import watchdog
from megatron_vlm.models.head import output_logits
from megatron_vlm.models.stream import Stream
from megatron_vlm.models.vlm import VLMModel, in_evaluation, run_schedule
from megatron_vlm.parallel import setup

PROMPT_TOKENS_AT_ONCE = 2**14  # of one forward pass, unless a single prompt has more
ROWS_AT_ONCE = 256
MOST_NEW_TOKENS = 2**20  # no model has longer rows; room for an answer's tokens is taken at the start


@dataclass(frozen=True)
class Answer:
    """A continuation of a prompt, with a number for each of its tokens.

    tokens               with the stop token, if that ended it
    logprobs             of the distribution that they were sampled from: logits / temperature, and among
                         top-p's tokens only. It is 0 for greedy answers, which are certain.
    logprobs_at_1        of the whole distribution at temperature 1
    finish_reason        "stop" or "length"

    With temperature 1 and top_p 1 the two are the same. A policy whose loss takes log-probabilities at the
    temperature needs top_p 1, as it scores tokens among all.
    """

    tokens: list[int]
    logprobs: list[float]
    logprobs_at_1: list[float]
    finish_reason: str

    @property
    def reply(self) -> list[int]:
        """The tokens without the stop token."""
        return self.tokens[:-1] if self.finish_reason == "stop" else self.tokens


@torch.no_grad()
def generate(
    model: list[torch.nn.Module],
    prompts: list[Prompt],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    answers: int = 1,
    seed: int = 0,
    stop: Iterable[int] = (),
    cache_bytes: int = 2**32,
    numbers: Sequence[int] | None = None,
    own_prompts: bool = False,
) -> list[list[Answer]]:
    """So many answers to each prompt, in the order of the prompts, the same on every rank.

    Collective: all ranks pass the same, and with `own_prompts` all that share a data-parallel rank; each of
    these then answers its own prompts, equally many. `model` are this rank's chunks; they may be wrapped for
    data parallelism. Temperature 0 takes the likeliest token. Sampled answers depend on the seed, the
    prompt's number and the answer's, and not on the layout or what else is asked (but for rounding).
    `numbers` are the prompts' (None: from 0 on).

    A rank's caches take at most `cache_bytes`, or what one row of each lane needs: for each token of a row,
    prompt and answer, 2 * layers * key/value heads / tp * head width * bytes of a number. Layers with a
    sliding window keep no more tokens than that. The memory is given back at the end.
    """
    check_settings(max_new_tokens, temperature, top_p, answers)
    if not prompts:
        return []
    sampling = Sampling(temperature, top_p, seed)
    numbers = numbers or range(len(prompts))
    longest = max(len(prompt["input_ids"]) for prompt in prompts)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if own_prompts:
        longest = max(setup.from_all_ranks(longest))  # decides how many rows the ranks compute at a time
        group = parallel_state.get_context_parallel_group()
    request = Request(prompts, max_new_tokens, sampling, sorted(set(stop)), numbers, longest)
    inner = get_attr_wrapped_model(model[0], "layout", return_model_obj=True)
    request.check(inner)
    numbers_of: dict[tuple[int, int], np.ndarray] = {}  # by prompt and answer
    with in_evaluation(model):
        for lanes in _schedule_batches(request, answers, inner, cache_bytes, group):
            _run(model, lanes)
            for rows in lanes:
                numbers_of |= rows.answered()
        for of_rank in setup.from_all_ranks(numbers_of, group):
            numbers_of |= of_rank
    return [
        [_answer(numbers_of[prompt, answer], request.stop) for answer in range(answers)]
        for prompt in range(len(prompts))
    ]


def reply_text(
    processor: ProcessorMixin, ids: Sequence[int], spoken: Sequence[str] = (), until: Sequence[str] = ()
) -> str:
    """A reply as text, without control tokens; a user's own special tokens and those `spoken` are text.

    It ends before the first of the texts `until`, and has no white space around it.
    """
    silent = _silent_tokens(processor, tuple(spoken))
    text = processor.tokenizer.decode([token for token in ids if token not in silent])
    for end in until:
        text = text.partition(end)[0]
    return text.strip()


@lru_cache(maxsize=4)
def _silent_tokens(processor: ProcessorMixin, spoken: tuple[str, ...]) -> frozenset[int]:
    """Return the ids of the control tokens; of all special tokens if no chat template tells them apart."""
    from megatron_vlm.data.encode.chat_template import ChatTemplate

    added = processor.tokenizer.added_tokens_decoder
    try:
        control = {*ChatTemplate(processor, spoken=spoken).added_control_tokens}
    except ValueError:
        control = {token.content for token in added.values() if token.content not in spoken}
    return frozenset(number for number, token in added.items() if token.special and token.content in control)


def check_settings(max_new_tokens: int, temperature: float, top_p: float, answers: int = 1) -> None:
    """Raises ValueError for settings that `generate` does not take."""
    words = f"a whole number from 1 to {MOST_NEW_TOKENS}"
    check_number(
        "generate: max_new_tokens", max_new_tokens, lambda n: 1 <= index(n) <= MOST_NEW_TOKENS, words
    )
    check_number("generate: answers", answers, lambda n: 1 <= index(n), "a whole number above 0")
    check_number("generate: temperature", temperature, lambda t: 0 <= t < inf, "a number, 0 or more")
    check_number("generate: top_p", top_p, lambda p: 0 < p <= 1, "a number above 0 and at most 1")
    if answers > 1 and not temperature:
        raise ValueError(f"generate: {answers} answers at temperature 0 are all the same; raise temperature.")


def _schedule_batches(
    request: Request, answers: int, model: VLMModel, cache_bytes: int, group: dist.ProcessGroup
) -> Iterable[list[AnswerRows]]:
    """This rank's lanes of rows, one set after the other. On all ranks there are as many sets, lanes and
    prompts, as experts are shared by ranks that must call them together: where something is missing, the
    first pieces are answered again.

    Prompts of similar length are answered together.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    lanes = group.size() * stages
    # a piece is some answers to one prompt, few enough for the cache and for all lanes to get one
    at_once = max(1, min(cache_bytes // bytes_per_row(model.config, request.longest_row), ROWS_AT_ONCE))
    size = min(answers, at_once, -(-len(request.prompts) * answers // lanes))
    order = np.argsort([len(prompt["input_ids"]) for prompt in request.prompts], kind="stable").tolist()
    pieces = [
        Piece(prompt, start, min(start + size, answers))
        for prompt in order
        for start in range(0, answers, size)
    ]
    # lanes are filled up with the first pieces, so that all ranks make the same calls
    lane_size = -(-len(pieces) // lanes)
    pieces += [pieces[i % len(pieces)] for i in range(lane_size * lanes - len(pieces))]
    per_wave = at_once // size
    for start in range(0, lane_size, per_wave):
        yield [
            AnswerRows(request, pieces[lane::lanes][start : start + per_wave], model)
            for lane in range(group.rank() * stages, (group.rank() + 1) * stages)
        ]


def _run(model: list[torch.nn.Module], lanes: list[AnswerRows]) -> None:
    """All tokens of the lanes' rows."""
    request, pieces = lanes[0].request, len(lanes[0].pieces)
    at_once = max(1, PROMPT_TOKENS_AT_ONCE // request.longest_prompt)
    parts = [_prompts(model, lanes, first, at_once) for first in range(0, pieces, at_once)]
    logits = [torch.cat(of_lane) for of_lane in zip(*parts, strict=True)]
    rows = [lane.spread() for lane in lanes]
    _choose(lanes, [x.index_select(0, of) for x, of in zip(logits, rows, strict=False)])
    for _ in range(1, request.max_new_tokens):
        if not _any_runs(lanes):
            break
        length = _divisible(max(len(lane.held) for lane in lanes))
        _choose(lanes, forward(model, [lane.token_stream(length) for lane in lanes]))


def _prompts(model: list[torch.nn.Module], lanes: list[AnswerRows], first: int, count: int) -> list[Tensor]:
    layouts = [lane.layout_of_prompts(first, count) for lane in lanes]
    length = _divisible(max(layout.longest for layout in layouts))
    pairs = zip(lanes, layouts, strict=True)
    return forward(model, [lane.prompt_stream(layout, first, length) for lane, layout in pairs])


def _divisible(tokens: int) -> int:
    """Rounded up, so that sequence parallelism can cut them."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return -(-tokens // tp) * tp


def _choose(lanes: list[AnswerRows], logits: list[Tensor]) -> None:
    """The next token of all held rows, from the last stage's logits."""
    counts = [len(lane.held) for lane in lanes]
    chosen = torch.zeros(3, sum(counts), dtype=torch.float64, device=setup.device())
    if logits:
        chosen = torch.cat([lane.choose(x) for lane, x in zip(lanes, logits, strict=True)], dim=1)
    for lane, part in zip(lanes, broadcast_from_last_stage(chosen).split(counts, dim=1), strict=True):
        lane.take(part.numpy())


def _any_runs(lanes: list[AnswerRows]) -> bool:
    """Whether a row goes on: here, or where experts are spread over ranks, on any rank."""
    runs = any(lane.runs.any() for lane in lanes)
    if get_model_config(lanes[0].model).expert_model_parallel_size == 1:
        return runs
    everywhere = torch.tensor(int(runs), device=setup.device())
    dist.all_reduce(everywhere)
    return bool(everywhere.item())


def _answer(numbers: np.ndarray, stop: list[int]) -> Answer:
    tokens, logprobs, logprobs_at_1 = numbers.tolist()
    tokens = [int(token) for token in tokens]
    return Answer(tokens, logprobs, logprobs_at_1, "stop" if tokens[-1] in stop else "length")


def forward(chunks: list[torch.nn.Module], streams: list[Stream]) -> list[Tensor]:
    """The logits (n, V) of each stream's wanted tokens on the last pipeline stage; elsewhere an empty list.

    The streams have one length; with pipelines, they are as many as its stages.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        watchdog.beat()
        return [chunks[0](stream, output_logits) for stream in streams]
    return run_schedule(chunks, streams, _reported, output_logits, forward_only=True)


def _reported(stream: Stream, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    return logits_NV.new_zeros(()), logits_NV


def broadcast_from_last_stage(values: Tensor) -> Tensor:
    """The tensor of the last stage's first rank, on every rank that shares the model, on the host."""
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        tp = parallel_state.get_tensor_model_parallel_world_size()
        dist.broadcast(values, group=group, group_src=group.size() - tp)
    return values.cpu()
