"""Held-out conversations as questions to a model, its answers in their order, and their scores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.utils.data import Dataset

from megatron_vlm.config import ConfigError, DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.accounts.fingerprint import digest, encoder_settings
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.encode.questions import Question, QuestionEncoder
from megatron_vlm.data.encode.replies import between_thinking
from megatron_vlm.data.load.base import loader_of
from megatron_vlm.data.load.energon import EnergonProvider, EnergonSamples
from megatron_vlm.data.load.hf import EncodedRows, HFProvider
from megatron_vlm.data.load.workers import close_loader
from megatron_vlm.extras.evaluate.metrics import Judged, Metric, Score
from megatron_vlm.extras.grounding.boxes import Boxes
from megatron_vlm.generation.generate import generate, reply_text
from megatron_vlm.generation.prompt import stop_tokens
from megatron_vlm.job import watchdog
from megatron_vlm.models.hf import Source
from megatron_vlm.parallel import setup

ANY_LENGTH = 2**20  # tokens; only the model's own limit counts
AT_ONCE = 32  # questions; `generate` takes as many of them at a time as its caches have room for
Record = dict[str, Any]  # of an answer, or of a question that could not be asked; JSON data


class Questions(Dataset):
    """Questions by their place: the chosen `rows` of a source.

    One that cannot be asked is its record, with the `problem`. `fingerprint` says what decides the questions.
    """

    def __init__(
        self, rows: EncodedRows | EnergonSamples, chosen: Sequence[int], name: str, longest: int | None
    ):
        self.name = name
        self.rows = rows
        self.chosen = chosen
        self._longest = longest
        self.boxes = rows.encoder.documents.boxes
        self.fingerprint = {"data": rows.fingerprint, "rows": digest(chosen)} | encoder_settings(rows.encoder)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, place: int) -> Question | Record:
        keys = {"key": f"sample {self.chosen[place]}"}
        try:
            sample = self.rows.sample(self.chosen[place])  # Energon's split.yaml may exclude it
            keys = keys_of(sample.__key__, sample.record_id)
            question = self.rows.encoder.documents.question(sample)
            last = int(question.prompt["position_ids"].max())
            if self._longest is not None and last >= self._longest:
                raise BadSample("over_length", f"position {last}, and the model knows {self._longest}")
            return question
        except BadSample as bad:
            return keys | {"problem": f"{bad.reason}: {bad.detail}"}


def of_any_length(data: DataConfig) -> DataConfig:
    """The settings with which questions are encoded: as in training, but whole and in one size."""
    return replace(data, seq_length=ANY_LENGTH, over_length="drop", max_drop_share=1.0, resize_jitter=0)


def open_questions(
    data: DataConfig, source: Source, max_new_tokens: int, samples: int | None = None, seed: int = 0
) -> Questions:
    """The rows that `data` holds out for validation; `samples` of them (None: all), which the seed chooses.

    Raises ConfigError if there are none.
    """
    data = of_any_length(data)
    encoder = HFEncoderVLMTaskEncoder(source.processor, data, source.needs)
    encoder.documents = QuestionEncoder(source.processor, data, source.needs)
    # Energon gives samples by restore key, a map-style dataset by index
    is_energon = data.dataset_type == "energon"
    if is_energon:
        rows = EnergonProvider(data).valid_samples(encoder)
    else:
        name, rows = HFProvider(data).valid_rows(encoder) or ("", None)
    if rows is None:
        raise ConfigError(
            f"evaluate: {data.train_data_path} has no rows that are held out; give DATA, or set "
            "data.valid_data_path or data.validation_share."
        )
    places = np.arange(len(rows)) if is_energon else np.sort(rows.table.rows_of(0, 0))
    if samples is not None and samples < len(places):
        places = np.sort(np.random.default_rng(seed).choice(places, samples, replace=False))
    # a prompt must leave room for its answer
    most_positions = source.description.architecture.get("most_positions")
    name = rows.name if is_energon else name
    return Questions(rows, places.tolist(), name, most_positions and most_positions - max_new_tokens + 1)


def answers(
    chunks: list[torch.nn.Module],
    source: Source,
    questions: Questions,
    max_new_tokens: int,
    first: int = 0,
    num_workers: int = 0,
) -> Iterator[list[Record]]:
    """The records of the questions from `first` on, some at a time, in order and the same on every rank.

    Collective. Each rank encodes its share of the questions.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    stop = stop_tokens(source.folder, source.description.hf_config)
    places = range(first, len(questions))
    # a round has as many questions for each rank, so that all encode alike
    question_count = AT_ONCE * setup.data_parallel_place()[1]
    at_once = -(-question_count // ranks) * ranks
    loader = loader_of(questions, places[rank::ranks], num_workers)
    encoded = iter(loader)
    try:
        for some in batched(places, at_once):
            watchdog.beat(f"answering question {some[0]} of {len(questions)}")
            # each rank encodes its share, then all generate together
            shares = setup.from_all_ranks([next(encoded) for _ in some[rank::ranks]])
            questions_in_order = [shares[n % ranks][n // ranks] for n in range(len(some))]
            prompts = [question.prompt for question in questions_in_order if isinstance(question, Question)]
            replies = iter(generate(chunks, prompts, max_new_tokens, stop=stop))
            records = []
            # a question that could not be encoded is a record already
            for question in questions_in_order:
                if not isinstance(question, Question):
                    records.append(question)
                    continue
                [reply] = next(replies)
                text = reply_text(source.processor, reply.reply, questions.boxes.tokens)
                about = {"tokens": reply.tokens, "finish_reason": reply.finish_reason}
                records.append(record_of(question, text) | about)
            yield records
    finally:
        close_loader(loader)


def keys_of(key: str, record_id: str | None) -> Record:
    """The `key` of a sample, and its record's `id` if it has one."""
    return {"key": key, "id": record_id} if record_id else {"key": key}


def record_of(question: Question, answer: str) -> Record:
    """The beginning of a record: a question and any answer to it."""
    record = keys_of(question.key, question.record_id) | {"question": question.text}
    return record | {"answer": answer, "references": question.references}


@dataclass
class Scored:
    """The scores of records: of each figure over all, and each record's own.

    `unscored` has reasons without a score, each with how many records have it and the key of the first.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    of_records: list[dict[str, float]] = field(default_factory=list)
    unscored: dict[str, list] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """A line for each score, and for what has none."""
        for name, score in self.scores.items():
            yield f"{name} {score.score:.4f} ({score.samples} samples)"
        for reason, (count, key) in self.unscored.items():
            yield f"without a score: {count}, {reason}; such as {key}"

    def count(self, reason: str, key: str) -> None:
        """Count a record without a score."""
        self.unscored.setdefault(reason, [0, key])[0] += 1


def scored(records: Sequence[Record], metrics: Mapping[str, Metric], boxes: Boxes) -> Scored:
    """The scores of records by metrics, over those with an answer. Thinking in an answer does not count."""
    result = Scored()
    higher_is_better: dict[str, bool] = {}

    def boxes_in(text: str) -> list[list[float]]:  # in shares of a picture
        return [shape.numbers for shape in boxes.seen(text, (1, 1)) if len(shape.numbers) == 4]

    for record in records:
        result.of_records.append({})
        if "problem" in record:
            result.count(record["problem"].partition(":")[0], record["key"])
            continue
        text = record["answer"]
        answer = "".join(text[start:stop] for start, stop in between_thinking(text, 0, len(text))).strip()
        judged = Judged(record["question"], answer, record["references"], boxes_in)
        for name, metric in metrics.items():
            try:
                figures = metric(judged)
            except BadSample as bad:
                result.count(f"{name}: {bad.detail}", record["key"])
                continue
            figures = figures if isinstance(figures, Mapping) else {name: figures}
            result.of_records[-1].update(figures)
            higher_is_better |= dict.fromkeys(figures, getattr(metric, "higher_is_better", True))
    for name, is_better in higher_is_better.items():
        values = [figures[name] for figures in result.of_records if name in figures]
        result.scores[name] = Score(sum(values) / len(values), len(values), is_better)
    return result
