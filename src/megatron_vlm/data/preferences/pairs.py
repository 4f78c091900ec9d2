"""A preference record → one sample of two documents: the prompt with the chosen answer, then with the other.

To everything else on the way it is one sample, so both halves are in one row, are dropped together, come once
an epoch, and a resumed run goes on with the same pairs. In a row, documents 1 and 2 are a pair, 3 and 4, ...
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_vlm.config import DataConfig
from megatron_vlm.data.conversation.chatml import BadSample, ChatMLSample, cook_chatml_sample
from megatron_vlm.data.encode.document import DocumentEncoder, HFEncoderTaskSample, Measured
from megatron_vlm.data.encode.packed import join_documents
from megatron_vlm.data.on_disk.fields import CHOSEN, REJECTED, REJECTED_TURNS, TURNS

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

    def __init__(self, one: DocumentEncoder, data: DataConfig):
        self._one, self._data, self.per_sample = one, data, len(HALVES)
        self.chat, self.processing, self.why_hf_processor = one.chat, one.processing, one.why_hf_processor

    def measure(self, sample: ChatMLSample) -> MeasuredPair:
        chosen, rejected = (
            _named(name, self._one.measure, half)
            for name, half in zip(HALVES, halves_of(sample), strict=True)
        )
        patches = chosen.patches + rejected.patches
        self._check(chosen.text.input_ids.tolist(), rejected.text.input_ids.tolist())
        if (most := self._data.max_patches) is not None and patches > most:
            raise BadSample("over_patches", f"{patches} patches of both answers, data.max_patches = {most}")
        return MeasuredPair((chosen, rejected), chosen.length + rejected.length, patches)

    def encode(self, sample: ChatMLSample, measured: MeasuredPair | None = None) -> HFEncoderTaskSample:
        known = measured.halves if measured else (None, None)
        documents = [
            _named(name, self._one.encode, half, of_half)
            for name, half, of_half in zip(HALVES, halves_of(sample), known, strict=True)
        ]
        self._check(*(document.input_ids.tolist() for document in documents))
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
    if sample.problem is not None:
        raise sample.problem
    conversation = sample.conversation
    if REJECTED_TURNS not in conversation:
        raise BadSample("bad_preference", "no rejected answer beside the chosen one")
    chosen, tools = cook_chatml_sample(conversation)
    rejected = {"system": conversation.get("system"), "messages": conversation[REJECTED_TURNS]}
    answers = {CHOSEN: chosen, REJECTED: cook_chatml_sample(rejected)[0]}
    shared = _shared(*answers.values())
    _check_answers(answers, shared)
    said = (*TURNS, "conversation", "system", REJECTED_TURNS)
    others = {name: value for name, value in conversation.items() if name not in said} | {"tools": tools}
    prompt = [turn | {"loss": False} if turn["role"] == "assistant" else turn for turn in chosen[:shared]]
    return tuple(
        dataclasses.replace(sample, conversation=others | {"messages": prompt + turns[shared:]})
        for turns in answers.values()
    )


def _shared(one: list[dict], other: list[dict]) -> int:
    """How many turns both begin with."""
    differ = (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differ, min(len(one), len(other)))


def _check_answers(answers: dict[str, list[dict]], shared: int) -> None:
    rests = {name: turns[shared:] for name, turns in answers.items()}
    if not any(rests.values()):
        raise BadSample("bad_preference", "the chosen and the rejected answer are equal")
    for name, rest in rests.items():
        if not rest:
            raise BadSample(
                "bad_preference", f"the {name} answer is missing: it ends where the other goes on"
            )
        if rest[0]["role"] != "assistant":
            detail = (
                f"the prompts differ: turn {shared} of the {name} conversation is of role {rest[0]['role']}"
            )
            raise BadSample("bad_preference", detail)


def _named(name: str, encode, *given):
    """Returns what `encode` gives; its BadSample says which answer it is about."""
    try:
        return encode(*given)
    except BadSample as bad:
        raise BadSample(bad.reason, f"{name} answer: {bad.detail}") from bad
