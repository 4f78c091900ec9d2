"""Held-out conversations as questions to a model: rows of a source, each up to its last reply."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch.utils.data import Dataset

from megatron_vlm.config import ConfigError, DataConfig
from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.accounts.fingerprint import digest, encoder_settings
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.encode.questions import Question, QuestionEncoder
from megatron_vlm.data.load.energon import EnergonProvider, EnergonSamples
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.load.rows import EncodedRows
from megatron_vlm.messages import printable
from megatron_vlm.models.hf import Source

ANY_LENGTH = 2**20  # tokens; only the model's own limit counts
NO_REFERENCE = "no_reference"
# what a question gives in place of itself: why it cannot be asked, as an answer's record has it
Problem = dict[str, str]


class Questions(Dataset):
    """Questions by their place: the chosen `rows` of a source. One that cannot be asked is a `Problem`.

    `fingerprint` says what decides them, as JSON data by name.
    """

    def __init__(
        self, rows: EncodedRows | EnergonSamples, chosen: Sequence[int], name: str, longest: int | None
    ):
        self.name = name
        self.rows = rows
        self.chosen = list(chosen)
        self._longest = longest
        self.boxes = rows.encoder.documents.boxes
        self.fingerprint = {"data": rows.fingerprint, "rows": [len(self.chosen), digest(self.chosen)]}
        self.fingerprint |= encoder_settings(rows.encoder)

    def __len__(self) -> int:
        return len(self.chosen)

    def notes(self) -> list[str]:
        """Return a line if the first row is a preference pair, whose rejected answer is not read."""
        line = "the questions are of preference pairs: answers are scored against the chosen"
        try:
            is_pair = len(self) > 0 and self.rows.sample(self.chosen[0]).rejected is not None
        except BadSample:
            return []
        return [line] if is_pair else []

    def __getitem__(self, place: int) -> Question | Problem:
        key = f"sample {self.chosen[place]}"
        try:
            sample = self.rows.sample(self.chosen[place])  # Energon's split.yaml may exclude it
            key = sample.__key__
            question = self.rows.encoder.documents.question(sample)
            last = int(question.prompt["position_ids"].max())
            if self._longest is not None and last >= self._longest:
                raise BadSample("over_length", f"position {last}, and the model knows {self._longest}")
            return question
        except BadSample as bad:
            reason = NO_REFERENCE if bad.reason == "no_trained_tokens" else bad.reason
            return {"key": key, "problem": f"{reason}: {bad.detail}"}


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
    if data.dataset_type == "energon":
        rows = EnergonProvider(data).valid_samples(encoder)
        found = rows and (rows.name, rows)
        places = np.arange(len(rows or ()))
    elif (found := HFProvider(data).valid_rows(encoder)) is not None:
        places = np.sort(found[1].table.rows_of(0, 0))
    if found is None:
        raise ConfigError(
            f"evaluate: {printable(data.train_data_path)} has no rows that are held out; give DATA, or set "
            "data.valid_data_path or data.validation_share."
        )
    name, rows = found
    if samples is not None and samples < len(places):
        places = np.sort(np.random.default_rng(seed).choice(places, samples, replace=False))
    most = source.description.architecture.get("most_positions")
    return Questions(rows, places.tolist(), name, most and most - max_new_tokens + 1)
