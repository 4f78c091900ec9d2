"""Preference records: every way of writing one gives the same pair, and a broken one says what is wrong."""

from __future__ import annotations

import json

import pytest
from samples import sample_of

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, parse_record
from megatron_vlm.data.preferences import halves_of
from megatron_vlm.data.shard_format import cook_record


def turn(role: str, text: str) -> dict:
    return {"role": role, "content": text}


ASKED = [turn("user", "Which?"), turn("assistant", "This one?"), turn("user", "<image>No.")]
GOOD, BAD = turn("assistant", "A cat."), turn("assistant", "A dog.")
TRANSCRIPT = "\n\nHuman: Which?\n\nAssistant: This one?\n\nHuman: <image>No.\n\nAssistant:"
RECORDS = {
    "TRL": {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
    "TRL without prompt": {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    "text": {"prompt": ASKED, "chosen": "A cat.", "rejected": "A dog."},
    "one reply": {"messages": [*ASKED, GOOD], "rejected_response": "A dog."},
    "two conversations": {"messages": [*ASKED, GOOD], "rejected_messages": [*ASKED, BAD]},
    "LLaMA-Factory": {
        "conversations": ASKED,
        "chosen": {"from": "gpt", "value": "A cat."},
        "rejected": {"from": "gpt", "value": "A dog."},
    },
    "whole beside the prompt": {"prompt": ASKED, "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    "UltraFeedback": {
        "prompt": "Which?",
        "messages": [*ASKED, GOOD],
        "chosen": [*ASKED, GOOD],
        "rejected": [*ASKED, BAD],
    },
    "hh-rlhf": {"chosen": f"{TRANSCRIPT} A cat.", "rejected": f"{TRANSCRIPT} A dog."},
    "rm-static": {"prompt": TRANSCRIPT, "chosen": "A cat.", "rejected": "A dog."},
    "the chosen reply in the prompt": {"messages": [*ASKED, GOOD], "chosen": [GOOD], "rejected": [BAD]},
    "rejected beside the turns": {"messages": [*ASKED, GOOD], "rejected": "A dog."},
    "question and answer": {"question": ASKED, "answer": "A cat.", "rejected": "A dog."},
    "other columns": {"prompt": ASKED, "better": "A cat.", "worse": "A dog."},
}


def halves(record: dict) -> list[list[dict]]:
    """As a run reads them, from a source or from a shard."""
    columns = {"chosen": "better", "rejected": "worse"} if "better" in record else {}
    conversation = parse_record(Columns(columns)(record)).stored()
    images = [b"x"] if '"image"' in json.dumps(conversation) else []
    from_source = sample_of(conversation, images)
    stored = {"__key__": "0", "__restore_key__": (), "json": json.dumps(conversation).encode()}
    from_shard = cook_record(stored | ({"img000.png": b"x"} if images else {}))
    halves = [[half.messages for half in halves_of(each)] for each in (from_source, from_shard)]
    assert halves[0] == halves[1]
    return halves[0]


@pytest.mark.parametrize("name", RECORDS)
def test_every_way_of_writing_a_record_gives_the_same_pair(name):
    for half, text in zip(halves(RECORDS[name]), ("A cat.", "A dog."), strict=True):
        assert half == [
            {"role": "user", "content": [{"type": "text", "text": "Which?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "This one?"}], "loss": False},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "No."}]},
            {"role": "assistant", "content": [{"type": "text", "text": text}]},
        ]


@pytest.mark.parametrize(
    ("record", "detail"),
    [
        ({"messages": [*ASKED, GOOD]}, "no rejected answer"),
        ({"accepted": TRANSCRIPT, "rejected": TRANSCRIPT}, "data.columns.chosen=NAME names"),
        ({"messages": [*ASKED, GOOD], "rejected_messages": [*ASKED[:2], BAD]}, "the prompts differ: turn 0"),
        (RECORDS["TRL"] | {"rejected_images": ["a.jpg"]}, "rejected_images"),
        (RECORDS["TRL"] | {"rejected_messages": [*ASKED, BAD]}, "rejected and rejected_messages are two"),
        (RECORDS["two conversations"] | {"chosen": "A bird."}, "chosen and messages are two names"),
        (RECORDS["TRL"] | {"question": "Who?"}, "question and prompt are two names"),
    ],
)
def test_a_broken_record_says_what_is_wrong(record, detail):
    with pytest.raises(BadSample, match=detail) as bad:
        halves(record)
    assert bad.value.reason == "bad_preference"
