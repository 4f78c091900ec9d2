"""The Hugging Face source: the samples Energon would give, in an order that resumes exactly."""

import json

import pytest
import torch
from prepared_shards import prepare
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.hf import HFProvider

ROWS = 23


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_sharegpt(tmp_path_factory.mktemp("hf") / "source", ROWS)


@pytest.fixture(scope="module")
def folder(source):
    return write_hf_folder(source.parent.parent / "rows", source)


@pytest.fixture
def encoder(processor):
    return HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))


def train_loader(folder, encoder, num_workers=0, rank=0, world_size=1, seed=3, batch=2, **kwargs):
    paths = folder if isinstance(folder, list) else str(folder)
    return HFProvider(DataConfig(train_data_path=paths, num_workers=num_workers, **kwargs)).train_loader(
        encoder, micro_batch_size=batch, rank=rank, world_size=world_size, seed=seed
    )


def valid_loader(folder, encoder, num_workers=0, rank=0, world_size=1, batch=1):
    return HFProvider(
        DataConfig(train_data_path=str(folder), valid_data_path=str(folder), num_workers=num_workers)
    ).valid_loader(encoder, micro_batch_size=batch, rank=rank, world_size=world_size)


def test_the_same_records_give_the_same_batches_as_energon(tmp_path, source, folder, encoder):
    prepare({"val": source}, tmp_path / "energon")
    energon = EnergonProvider(
        DataConfig(train_data_path="", valid_data_path=str(tmp_path / "energon"), num_workers=0)
    )
    settings = {"micro_batch_size": 1, "rank": 0, "world_size": 1}
    expected = list(energon.valid_loader(encoder, **settings))
    batches = list(valid_loader(folder, encoder))
    assert len(batches) == len(expected) == ROWS
    assert [key for [[key]] in (batch["__key__"] for batch in batches)] == [
        key.removeprefix("val-") for [[key]] in (batch["__key__"] for batch in expected)
    ]
    for ours, theirs in zip(batches, expected, strict=True):
        assert set(ours) == set(theirs)
        for name in set(ours) - {"__key__", "__restore_key__", "visual_inputs"}:
            assert torch.equal(ours[name], theirs[name]), name
        if theirs["visual_inputs"] is None:
            assert ours["visual_inputs"] is None
        else:
            assert torch.equal(ours["visual_inputs"].pixel_values, theirs["visual_inputs"].pixel_values)


@pytest.mark.parametrize(
    "field, change",
    [
        ("world_size: saved 1, now 2", {"world_size": 2}),
        ("seed: saved 3, now 4", {"seed": 4}),
        ("micro_batch_size: saved 2, now 1", {"batch": 1}),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(folder, encoder, field, change):
    state = train_loader(folder, encoder).state_dict()
    with pytest.raises(ValueError, match=field):
        train_loader(folder, encoder, **change).load_state_dict(state)


def test_loading_leaves_the_random_numbers_of_the_run_alone(folder, encoder):
    before = torch.get_rng_state()
    loader = train_loader(folder, encoder, num_workers=2)
    next(loader)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def swapped(rows):
    rows[3], rows[11] = rows[11], rows[3]


def edited(rows):
    rows[11]["conversations"][1]["value"] = "number 99"


def another_image(rows):
    rows[11]["images"] = rows[12]["images"]


@pytest.mark.parametrize("change", [swapped, edited, another_image])
@pytest.mark.parametrize("kind", ["lines", "saved", "list"])
def test_a_state_is_refused_when_one_row_changed(tmp_path, encoder, change, kind):
    """Rows 3, 11 and 12 are none of the first, the last, or those at equal distances between."""
    source = write_sharegpt(tmp_path / "source", ROWS)
    rows = [json.loads(line) for line in source.read_text().splitlines()]

    def loader():
        if kind == "lines":
            return train_loader(source, encoder)
        saved = str(write_hf_folder(tmp_path / f"rows{len(list(tmp_path.iterdir()))}", source))
        return train_loader([str(other), saved] if kind == "list" else saved, encoder)

    other = write_sharegpt(tmp_path / "other", 4)
    state = loader().state_dict()
    loader().load_state_dict(state)
    change(rows)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="configuration: dataset: saved '(23|27) rows, content"):
        loader().load_state_dict(state)
