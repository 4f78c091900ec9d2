"""Samples of any lengths lie in packed rows, each once and whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vlm.batch import DataNeeds
from megatron_vlm.rl.micro_batches import MicroBatch, documents_of, micro_batches


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 30), st.data())
def test_every_sample_is_in_one_row_within_the_budget(lengths, max_tokens, data):
    samples = [{"input_ids": torch.full((length,), number)} for number, length in enumerate(lengths)]
    rows = micro_batches(documents_of(samples, DataNeeds()), max_tokens)
    assert sorted(document.number for row in rows for document in row.documents) == list(range(len(samples)))
    for row in rows:
        ids, held = row.batch["input_ids"][0], [document.number for document in row.documents]
        assert ids.tolist() == [number for number in held for _ in range(lengths[number])]
        assert len(ids) <= max_tokens or len(held) == 1
        assert row.batch["labels"][0].ne(-100).sum() == len(ids) - len(held)
    order = data.draw(st.permutations(range(len(samples))))
    others = micro_batches(documents_of([samples[number] for number in order], DataNeeds()), max_tokens)
    assert [row.batch["input_ids"].numel() for row in others] == [
        row.batch["input_ids"].numel() for row in rows
    ]


def document(mask: list[int] | None, tokens: int = 4, **fields):
    sample = {"input_ids": torch.arange(tokens)} | {name: torch.tensor(x) for name, x in fields.items()}
    sample |= {} if mask is None else {"loss_mask": torch.tensor(mask)}
    return documents_of([sample], DataNeeds())[0]


@pytest.mark.parametrize(
    ("mask", "field", "found"),
    [
        ([0, 1, 0, 1], [10, 11, 12, 13], [11, 13]),  # one for each token
        ([0, 1, 0, 1], [11, 12, 13], [11, 13]),  # each but the first
        ([0, 1, 0, 1], [11, 13], [11, 13]),  # each scored one
        ([0, 1, 0, 1], 5, [5, 5]),
        ([0, 1, 1, 0], [11, 12, 13], [11, 12]),
        ([1, 1, 1, 1], [11, 12, 13], [11, 12, 13]),
        ([1, 1, 1, 0], [10, 11, 12, 13], [11, 12]),
        ([1, 0, 0, 0], [11, 12, 13], []),
        (None, [11, 12, 13], [11, 12, 13]),
    ],
)
def test_a_field_has_an_entry_for_each_scored_token(mask, field, found):
    assert document(mask, value=field).field("value").tolist() == found


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_field_that_is_not_finite_is_named_with_its_sample(value):
    fields = {
        "advantage": torch.tensor([1.0, value]),
        "weight": torch.ones(2),
        "sample": torch.tensor([4, 7]),
    }
    assert MicroBatch({}, [], fields).odd_fields() == [f"advantage of sample 7 is {value}"]
