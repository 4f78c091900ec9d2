"""TensorList and TensorBatch do with samples what lists do, and refuse what they cannot hold by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_vlm.batch import HOST_FIELDS
from megatron_vlm.rl.containers import VISUAL_FIELDS, TensorBatch, TensorList

Sample = dict[str, Tensor]
QUICK = settings(max_examples=40, deadline=None)
NO_ROWS = {"pixel_values": torch.empty(0, 4), "image_grid_thw": torch.empty(0, 3, dtype=torch.int64)}


@st.composite
def samples(draw, at_least: int = 1) -> list[Sample]:
    """Some with images, some without; no two tensors are alike."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=at_least, max_size=6))
    return [sample(tokens, images, generator) for tokens, images in lengths]


def sample(tokens: int, images: int, generator: torch.Generator | None = None) -> Sample:
    grid = torch.randint(1, 4, (images, 3), generator=generator)
    patches = int(grid.prod(-1).sum())
    visual = {"pixel_values": torch.rand(patches, 4, generator=generator), "image_grid_thw": grid}
    return {
        "input_ids": torch.randint(0, 1000, (tokens,), generator=generator),
        "advantages": torch.rand(tokens, generator=generator).bfloat16(),
        "reward": torch.rand((), generator=generator, dtype=torch.float64),
        **(visual if images else {}),
    }


def whole(samples: list[Sample]) -> list[Sample]:
    """With zero rows where a sample lacks what another has."""
    keys = {key for each in samples for key in each}
    return [{key: each[key] if key in each else NO_ROWS[key] for key in keys} for each in samples]


def same(found: TensorBatch | TensorList, expected: list) -> bool:
    """Row by row, with dtypes; a list of samples, or of tensors."""
    if isinstance(found, TensorList):
        found, expected = ([{"": each} for each in rows] for rows in (found, expected))
    else:
        assert found.batch_size == len(expected)
        found = found.samples()
    return len(found) == len(expected) and all(
        a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(found, expected, strict=True)
    )


def both(samples: list[Sample]) -> list[tuple[TensorBatch | TensorList, list]]:
    """Each container beside the list that it stands for."""
    ids = [each["input_ids"] for each in samples]
    return [(TensorBatch.from_samples(samples), whole(samples)), (TensorList(ids), ids)]


@QUICK
@given(samples(), st.data())
def test_rows_are_selected_as_from_a_list(given_samples, data):
    size = len(given_samples)
    end, step = st.none() | st.integers(-8, 8), st.sampled_from([None, 1, 2, -1, -3])
    chosen_slice = slice(data.draw(end), data.draw(end), data.draw(step))
    rows = data.draw(st.lists(st.integers(-size, size - 1), max_size=8))
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    by_mask = [row for row, is_in in enumerate(mask) if is_in]
    selections = [(chosen_slice, list(range(size))[chosen_slice]), (rows, rows), (mask, by_mask)]
    for kind in (torch.tensor, np.array):
        selections += [(kind(rows), rows), (kind(mask), by_mask)]
    for container, as_list in both(given_samples):
        for selection, expected in selections:
            if expected:
                assert same(container[selection], [as_list[row] for row in expected])
            else:
                with pytest.raises(ValueError, match=f"none of {size} rows is selected"):
                    container[selection]


def test_text_beside_images_whichever_comes_first():
    text, image = sample(4, 0), sample(3, 2)
    for order in ([text, image], [image, text]):
        batch = TensorBatch.cat([TensorBatch.from_samples([each]) for each in order])
        assert sorted(map(len, batch["image_grid_thw"])) == [0, 2]
        assert batch["pixel_values"].dtype == torch.float32 and batch["pixel_values"][
            order.index(text)
        ].shape == (0, 4)
    assert "pixel_values" not in TensorBatch.from_samples([text, {**text, "pixel_values": None}])


@QUICK
@given(samples(), st.data())
def test_entries_and_fields_are_assigned_as_in_lists_and_dicts(given_samples, data):
    (batch, _), (tensors, as_tensors) = both(given_samples)
    row = data.draw(st.integers(-len(as_tensors), len(as_tensors) - 1))
    new = torch.arange(data.draw(st.integers(0, 4)))
    for index in (row, np.int64(row), torch.tensor(row)):
        changed, expected = TensorList(tensors), list(as_tensors)
        changed[index] = expected[row] = new
        assert same(changed, expected) and same(tensors, as_tensors)
    with pytest.raises(IndexError):
        tensors[len(as_tensors)] = new
    fields = dict(batch.items())
    for key, value in (("input_ids", tensors[::-1]), ("scores", torch.rand(len(as_tensors), 2))):
        batch[key] = fields[key] = value
        assert batch == TensorBatch(fields) and list(batch) == list(fields)
        assert same(batch[[row]], [{name: field[row] for name, field in fields.items()}])


@QUICK
@given(samples())
def test_pickle_returns_an_equal_batch(given_samples):
    for container, _ in both(given_samples):
        restored = pickle.loads(pickle.dumps(container))  # noqa: S301 - it was written here
        assert restored == container and type(restored) is type(container)


class Foreign:
    """As SkyRL's TensorList."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors


def test_containers_and_samples_of_others_are_taken():
    ragged = [torch.zeros(2), torch.zeros(3)]
    expected = TensorBatch(a=torch.tensor([1.0, 0.5]), b=TensorList(ragged))
    assert TensorBatch({"a": torch.tensor([1.0, 0.5]), "b": Foreign(ragged), "none": None}) == expected
    rows = [{"a": 1, "b": np.zeros(2, np.float32)}, {"a": 0.5, "b": [0.0, 0.0, 0.0]}]
    assert TensorBatch.from_samples(rows) == expected
    assert TensorBatch.from_samples(iter(expected.samples())) == expected


def test_tensordict_both_ways():
    tensordict = pytest.importorskip("tensordict")
    given_samples = [sample(4, 0), sample(2, 3), sample(3, 1)]
    batch = TensorBatch.from_samples(given_samples)
    stack = batch.to_tensordict()
    assert isinstance(stack, tensordict.LazyStackedTensorDict) and stack[1]["pixel_values"].shape[1] == 4
    assert TensorBatch.from_samples(stack) == batch
    lacking = tensordict.lazy_stack([tensordict.TensorDict(each, batch_size=[]) for each in given_samples])
    assert TensorBatch.from_samples(lacking) == batch
    dense = tensordict.TensorDict({"a": torch.arange(3), "b": torch.zeros(3, 2)}, batch_size=[3])
    assert TensorBatch.from_samples(dense) == TensorBatch(a=torch.arange(3), b=list(torch.zeros(3, 2)))


def two(**more) -> TensorBatch:
    return TensorBatch(ids=torch.zeros(2, 3), reward=torch.zeros(2), **more)


ERRORS: dict[str, tuple[Callable, str]] = {
    "empty list": (lambda: TensorList([]), "TensorList: an empty list has no dtype and no device"),
    "no tensor": (lambda: TensorList([torch.zeros(1), 2.0]), "entry 1 is of type float; give tensors"),
    "devices": (
        lambda: TensorList([torch.zeros(1), torch.zeros(1, device="meta")]),
        "entry 1 is torch.float32 on meta, the list torch.float32 on cpu; bring",
    ),
    "dtypes": (
        lambda: TensorList([torch.zeros(1), torch.zeros(1).half()]),
        "entry 1 is torch.float16 on cpu, the list torch.float32 on cpu",
    ),
    "sizes": (
        lambda: two(x=[torch.zeros(1)] * 3),
        "TensorBatch: x has batch size 3 and is on cpu, ids has 2 and is on cpu; give every field one entry",
    ),
    "devices of fields": (
        lambda: two(x=torch.zeros(2, device="meta")),
        "x has batch size 2 and is on meta, ids has 2 and is on cpu; .* one device",
    ),
    "scalar": (
        lambda: two(x=torch.tensor(1.0)),
        r"x has shape \(\); the first axis has to be that of the samples",
    ),
    "unknown key": (lambda: two()["rewards"], "no field rewards; did you mean reward?"),
    "set by row": (lambda: two().__setitem__(0, two()), "TensorBatch: 0 is no name"),
    "no fields": (lambda: TensorBatch().batch_size, "without fields there is no batch size"),
    "none selected": (lambda: two()[2:], "TensorBatch: none of 2 rows is selected"),
    "cat, lacks": (
        lambda: TensorBatch.cat([two(), two().select(["ids"])]),
        "2 of 4 samples lack reward: 2, 3; give it to all. Only visual fields may be absent: pixel_values, ",
    ),
    "cat, dtype": (
        lambda: TensorBatch.cat([two(), TensorBatch({**two(), "reward": torch.zeros(2).half()})]),
        "TensorBatch: reward: TensorList: entry 1 is torch.float16",
    ),
    "cat, shapes": (
        lambda: TensorBatch.cat([two(), TensorBatch({**two(), "ids": torch.zeros(2, 5)})]),
        r"cat: ids has rows of shapes \[\(3,\), \(5,\)\]",
    ),
    "samples, lacks": (
        lambda: TensorBatch.from_samples([{"ids": [1]}] * 7 + [{"ids": [1], "reward": 1.0}]),
        "7 of 8 samples lack reward: 0, 1, 2, 3, 4 and 2 more; give it to all",
    ),
    "samples, text": (
        lambda: TensorBatch.from_samples([{"key": "a"}]),
        "from_samples: key: .*str.*; give numbers",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_what_is_wrong(case):
    call, text = ERRORS[case]
    with pytest.raises((ValueError, KeyError, IndexError, RuntimeError, TypeError), match=text):
        call()


def test_every_visual_field_may_be_absent_and_nothing_else():
    assert set(VISUAL_FIELDS) > HOST_FIELDS
    for key in VISUAL_FIELDS:
        first, second = TensorBatch.from_samples([{"ids": 1}, {"ids": 2, key: torch.ones(2, 3)}])[key]
        assert first.shape == (0, 3) and second.shape == (2, 3)
