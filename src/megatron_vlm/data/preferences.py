"""A preference record → one sample of two documents: the prompt with the chosen answer, then with the other.

To everything else on the way it is one sample, so both halves are in one row, are dropped together, come once
an epoch, and a resumed run goes on with the same pairs. In a row, documents 1 and 2 are a pair, 3 and 4, ...
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_vlm.config import RunConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.sample import ChatMLSample, place_media
from megatron_vlm.data.encode.encoder import DocumentEncoder, HFEncoderTaskSample, Measured, join_documents
from megatron_vlm.data.on_disk.fields import CHOSEN, REJECTED

HALVES = CHOSEN, REJECTED


@dataclass
class MeasuredPair:
    """The same as `Measured` for both documents together."""

    halves: tuple[Measured, Measured]
    length: int
    patches: int


class PairEncoder:
    """In the place of a `DocumentEncoder`: measures and encodes pairs with it. Both methods raise BadSample,
    also if only one half cannot be trained on, or if both do not fit into a row together."""

    needs_reply = True

    def __init__(self, plain: DocumentEncoder, config: RunConfig):
        self._one = plain
        self._data = config.data
        self.per_sample = len(HALVES)
        self.chat = plain.chat
        self.processing = plain.processing
        self.why_hf_processor = plain.why_hf_processor

    def measure(self, sample: ChatMLSample) -> MeasuredPair:
        measured = []
        for name, half in zip(HALVES, halves_of(sample), strict=True):
            with _named(name):
                measured.append(self._one.measure(half))
        chosen, rejected = measured
        patches = chosen.patches + rejected.patches
        self._check(chosen.text.input_ids.tolist(), rejected.text.input_ids.tolist())
        if (limit := self._data.max_patches) is not None and patches > limit:
            raise BadSample("over_patches", f"{patches} patches of both answers, data.max_patches = {limit}")
        return MeasuredPair((chosen, rejected), chosen.length + rejected.length, patches)

    def encode(self, sample: ChatMLSample, measured: MeasuredPair | None = None) -> HFEncoderTaskSample:
        measures = measured.halves if measured else (None, None)
        documents = []
        for name, half, of_half in zip(HALVES, halves_of(sample), measures, strict=True):
            with _named(name):
                documents.append(self._one.encode(half, of_half))
        chosen, rejected = (document.input_ids.tolist() for document in documents)
        self._check(chosen, rejected)
        return join_documents(documents)

    def _check(self, chosen: list[int], rejected: list[int]) -> None:
        if chosen == rejected:
            raise BadSample("bad_preference", "both answers have the same tokens")
        if len(chosen) + len(rejected) > self._data.seq_length:
            lengths = f"chosen {len(chosen)} + rejected {len(rejected)} tokens"
            raise BadSample("over_length", f"{lengths}, seq_length = {self._data.seq_length}; a row has both")


def halves_of(sample: ChatMLSample) -> tuple[ChatMLSample, ChatMLSample]:
    """Both conversations of a preference record, with the same media. Only the answers are trained: the turns
    after those that both begin with. Raises BadSample if they do not differ in answers, and only in these."""
    if problem := sample.problem or sample.no_reply:
        raise problem
    if sample.rejected is None:
        raise BadSample("bad_preference", "no rejected answer beside the chosen one")
    if isinstance(sample.rejected, BadSample):
        raise sample.rejected
    rejected = place_media(sample.rejected, len(sample.imgs or []), len(sample.videos or []))
    pairs = enumerate(zip(sample.messages, rejected, strict=False))
    shortest = min(len(sample.messages), len(rejected))
    shared = next((turn for turn, (first, second) in pairs if first != second), shortest)
    answers = {CHOSEN: sample.messages[shared:], REJECTED: rejected[shared:]}
    if not any(answers.values()):
        raise BadSample("bad_preference", "the chosen and the rejected answer are equal")
    for name, turns in answers.items():
        if not turns:
            raise BadSample("bad_preference", f"the {name} answer is missing: it ends before the other")
        if (role := turns[0]["role"]) != "assistant":
            detail = f"the prompts differ: turn {shared} of the {name} conversation is of role {role}"
            raise BadSample("bad_preference", detail)
    prompt = [turn | {"loss": 0.0} if turn["role"] == "assistant" else turn for turn in rejected[:shared]]
    return tuple(dataclasses.replace(sample, messages=prompt + turns) for turns in answers.values())


@contextmanager
def _named(name: str) -> Iterator[None]:
    """A BadSample from inside says which answer it is about."""
    try:
        yield
    except BadSample as bad:
        raise BadSample(bad.reason, f"{name} answer: {bad.detail}") from bad
