"""A model's answers to questions, in their order, and what metrics say of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import batched
from typing import Any

import torch
from torch import distributed as dist

from megatron_vlm.data.encode.questions import Question
from megatron_vlm.data.encode.replies import between_thinking
from megatron_vlm.data.generation_prompt import stop_tokens
from megatron_vlm.data.grounding.boxes import Boxes
from megatron_vlm.data.load.limits import close_loader
from megatron_vlm.data.load.rows import loader_of
from megatron_vlm.extras.evaluate.metrics import Judged, Metric, Parts, Score, parts_of, scores_of
from megatron_vlm.extras.evaluate.questions import Problem, Questions
from megatron_vlm.generation.generate import generate, reply_text
from megatron_vlm.job import watchdog
from megatron_vlm.models.hf import Source
from megatron_vlm.parallel import setup

Record = dict[str, Any]  # of an answer, or of a question that could not be asked; JSON data


@dataclass(frozen=True)
class Asking:
    """How questions are answered; `batch_size` of them at a time by each data-parallel rank."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32


def answers(
    chunks: list[torch.nn.Module],
    source: Source,
    questions: Questions,
    how: Asking,
    first: int = 0,
    num_workers: int = 0,
) -> Iterator[list[Record]]:
    """The records of the questions from `first` on, some at a time, in order and the same on every rank.

    Collective. Each rank encodes its share of the questions. Sampled answers depend on a question's place,
    not on what else is asked, so it does not matter where an evaluation goes on.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    places = range(first, len(questions))
    wanted = how.batch_size * setup.data_parallel_place()[1]
    at_once = -(-wanted // ranks) * ranks
    stop = stop_tokens(source.folder, source.description.hf_config)
    loader = loader_of(questions, places[rank::ranks], num_workers)
    encoded = iter(loader)
    try:
        for some in batched(places, at_once):
            watchdog.beat(f"answering question {some[0]} of {len(questions)}")
            own = [next(encoded) for _ in some[rank::ranks]]
            everyone = setup.from_all_ranks(own) if ranks > 1 else [own]
            asked = [everyone[n % ranks][n // ranks] for n in range(len(some))]
            yield _answered(chunks, source, questions.boxes, asked, some, how, stop)
    finally:
        close_loader(loader)


def _answered(
    chunks: list[torch.nn.Module],
    source: Source,
    boxes: Boxes,
    asked: Sequence[Question | Problem],
    places: Sequence[int],
    how: Asking,
    stop: list[int],
) -> list[Record]:
    open_ones = [(place, one) for place, one in zip(places, asked, strict=True) if isinstance(one, Question)]
    replies = generate(
        chunks,
        [question.prompt for _, question in open_ones],
        how.max_new_tokens,
        temperature=how.temperature,
        top_p=how.top_p,
        seed=how.seed,
        stop=stop,
        numbers=[place for place, _ in open_ones],
    )
    records = {}
    for (place, question), [reply] in zip(open_ones, replies, strict=True):
        text = reply_text(source.processor, reply.reply, boxes.tokens)
        said = {"tokens": reply.tokens, "finish_reason": reply.finish_reason}
        records[place] = record_of(question, text) | said
    return [records.get(place, one) for place, one in zip(places, asked, strict=True)]


def record_of(question: Question, answer: str) -> Record:
    """The beginning of a record: a question and any answer to it."""
    asked = {"key": question.key, "question": question.text}
    return asked | {"answer": answer, "references": question.references}


@dataclass
class Scored:
    """The scores of records: of each figure over all, and each record's own.

    `problems` are the questions that could not be asked, by reason, and `missing` the answers that a metric
    does not score, by metric and reason; each with the key of an example.
    """

    scores: dict[str, Score]
    of_records: list[Parts]
    problems: dict[str, list] = field(default_factory=dict)
    missing: dict[str, list] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """A line for each score, and for what has none."""
        for name, score in self.scores.items():
            yield f"{name} {score}"
        for reason, (count, key) in {**self.problems, **self.missing}.items():
            yield f"without a score: {count}, {reason}; such as {key}"


def scored(records: Sequence[Record], metrics: Mapping[str, Metric], boxes: Boxes, seed: int = 0) -> Scored:
    """The scores of records by metrics, over those with an answer. Thinking in an answer does not count."""
    higher: dict[str, bool] = {}
    of_records: list[Parts] = []
    reasons: list[tuple[bool, str, str]] = []  # whether there is an answer, the reason, the key
    for record in records:
        if "problem" in record:
            of_records.append({})
            reasons.append((False, record["problem"].partition(":")[0], record["key"]))
            continue
        answer = without_thought(record["answer"])
        given = Judged(record["question"], answer, record["references"], partial(_boxes_in, boxes))
        parts, missing, better = parts_of(metrics, given)
        of_records.append(parts)
        higher |= better
        reasons += [(True, f"{name}: {why}", record["key"]) for name, why in missing.items()]
    problems, missing = (
        _counted((reason, key) for asked, reason, key in reasons if asked is wanted)
        for wanted in (False, True)
    )
    return Scored(scores_of(of_records, higher, seed), of_records, problems, missing)


def without_thought(answer: str) -> str:
    """The answer without what the model thought before it."""
    return "".join(answer[start:stop] for start, stop in between_thinking(answer, 0, len(answer))).strip()


def _boxes_in(boxes: Boxes, text: str) -> list[list[float]]:
    """The boxes of a text, in shares of a picture."""
    return [shape.numbers for shape in boxes.seen(text, (1, 1)) if len(shape.numbers) == 4]


def _counted(reasons: Iterator[tuple[str, str]]) -> dict[str, list]:
    """[how many, the first key] by reason."""
    listed = list(reasons)
    counts = Counter(reason for reason, _ in listed)
    firsts = dict(reversed(listed))
    return {reason: [count, firsts[reason]] for reason, count in counts.items()}
