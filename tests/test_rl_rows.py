"""Samples of any lengths lie in packed rows, each once and whole."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vlm.batch import DataNeeds
from megatron_vlm.rl.micro_batches import documents_of, micro_batches


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
