"""The Hugging Face source: the samples Energon would give, in an order that resumes exactly."""

import json

import datasets
import pyarrow.parquet as pq
import pytest
import torch
from loaders import take
from prepared_shards import prepare
from sources import image_bytes, record, write_hf_folder, write_sharegpt

from megatron_vlm.batch import IGNORE_INDEX
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


def numbers(batches):
    return [int(key) for batch in batches for row in batch["__key__"] for key in row]


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


def test_every_epoch_has_each_row_once_over_the_ranks_in_a_new_order(folder, encoder):
    per_rank = [train_loader(folder, encoder, rank=rank, world_size=2, batch=1) for rank in range(2)]
    epochs = [[numbers([next(loader) for _ in range(12 - rank)]) for rank, loader in enumerate(per_rank)]]
    # rank 0 had the last row of the first epoch, so rank 1 has the first of the second
    epochs.append([numbers([next(loader) for _ in range(11 + rank)]) for rank, loader in enumerate(per_rank)])
    for first, second in epochs:
        assert sorted(first + second) == list(range(ROWS))
    assert epochs[0] != epochs[1]


def test_training_resumes_exactly_across_an_epoch_and_another_number_of_workers(folder, encoder):
    """Saved in the second epoch after workers had read ahead, and again right after the restore."""
    loader = train_loader(folder, encoder, num_workers=2)
    take(loader, 13)
    state = json.dumps(loader.state_dict())
    expected = take(loader, 14)
    loader.close()
    untouched = train_loader(folder, encoder)
    untouched.load_state_dict(json.loads(state))
    resumed = train_loader(folder, encoder)
    resumed.load_state_dict(json.loads(json.dumps(untouched.state_dict())))
    assert take(resumed, 14) == expected


def test_a_drop_between_batches_does_not_move_the_resume(folder, processor, encoder):
    """Rows with two images are dropped; the state counts rows, not samples."""
    lengths = [len(batch["input_ids"][0]) for batch in valid_loader(folder, encoder)]
    short = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=max(lengths) - 1))
    loader = train_loader(folder, short, max_drop_share=1.0)
    take(loader, 4)
    state = loader.state_dict()
    expected = take(loader, 6)
    assert short.drops.summary()["reasons"]["over_length"] > 0
    resumed = train_loader(folder, short, max_drop_share=1.0)
    resumed.load_state_dict(state)
    assert take(resumed, 6) == expected


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


def test_a_state_of_another_dataset_is_refused_by_name(tmp_path, folder, encoder):
    other = write_hf_folder(tmp_path / "rows", write_sharegpt(tmp_path / "source", ROWS, first=1))
    state = train_loader(folder, encoder).state_dict()
    with pytest.raises(ValueError, match=f"dataset: saved '{ROWS} rows, .*', now '{ROWS} rows"):
        train_loader(other, encoder).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_gives_each_row_once_and_equal_batches(folder, encoder, num_workers):
    loaders = [valid_loader(folder, encoder, num_workers, rank, world_size=3, batch=2) for rank in range(3)]
    ranks = [list(loader) for loader in loaders]
    assert [len(rank) for rank in ranks] == [4, 4, 4]
    assert sorted(n for rank in ranks for n in numbers(rank)) == list(range(ROWS))


def test_a_rank_without_rows_trains_nothing_as_often_as_the_others(tmp_path, encoder):
    rows = write_hf_folder(tmp_path / "rows", write_sharegpt(tmp_path / "source", 2))
    (batch,) = valid_loader(rows, encoder, rank=2, world_size=3)
    assert batch["__key__"] == [[]]
    assert (batch["labels"] == IGNORE_INDEX).all()
    assert batch["loss_mask"].sum() == 0


def test_parquet_and_renamed_columns_are_read(tmp_path, folder, encoder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.load_from_disk(str(folder)).rename_columns(
        {"conversations": "chat", "images": "pictures"}
    )
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet/train-00000.parquet")
    columns = {"conversations": "chat", "images": "pictures"}
    renamed = train_loader(tmp_path / "parquet", encoder, columns=columns)
    assert take(renamed, 3) == take(train_loader(folder, encoder), 3)


def test_media_are_read_however_deep_they_lie(tmp_path, encoder):
    """OpenAI's parts with an Image in each, and lists of 64-bit offsets."""
    image = {"bytes": image_bytes(0), "path": None}
    parts = [{"type": "image", "text": None, "image": image}, {"type": "text", "text": "q", "image": None}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": [parts[1]]}]
    text = datasets.Value("string")
    part = {"type": text, "text": text, "image": datasets.Image()}
    messages = [{"role": text, "content": datasets.LargeList(part)}]
    features = datasets.Features({"messages": messages, "speech": datasets.Audio()})
    columns = {"messages": [turns] * 2, "speech": [None] * 2}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "rows")
    batch = next(train_loader(tmp_path / "rows", encoder))
    assert len(batch["visual_inputs"].pixel_values) == 2


def test_a_sample_that_is_dropped_when_it_is_replayed_is_named(tmp_path, encoder):
    lost = {"question": "a", "answer": "b", "image": "gone.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(lost))
    loader = train_loader(tmp_path / "rows.jsonl", encoder, max_drop_share=1.0)
    with pytest.raises(ValueError, match="replay: .'000000000'., once trained on, are dropped"):
        loader.replay([[0]])


def test_a_file_without_rows_is_named(tmp_path, folder, encoder):
    rows = datasets.load_from_disk(str(folder))
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet/full.parquet")
    pq.write_table(rows.data.table.slice(0, 0), tmp_path / "parquet/none.parquet")
    rows.select([]).save_to_disk(tmp_path / "saved")
    for path, name in (
        ("parquet", "none.parquet: has "),
        ("saved", "state.json: names no data file"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*no rows"):
            train_loader(tmp_path / path, encoder)


def test_a_bad_row_is_counted_and_the_others_train(tmp_path, encoder):
    good = record(4)["conversations"]
    rows = datasets.Dataset.from_list(
        [
            {"messages": good, "image": None},
            {"messages": good, "image": "../secret.jpg"},
            {"messages": None, "image": None},
        ]
    )
    rows.save_to_disk(tmp_path / "rows")
    batches = list(valid_loader(tmp_path / "rows", encoder))
    assert numbers(batches) == [0]
    assert encoder.drops.summary()["reasons"] == {"missing_media": 1, "bad_conversation": 1}


def test_loading_leaves_the_random_numbers_of_the_run_alone(folder, encoder):
    before = torch.get_rng_state()
    loader = train_loader(folder, encoder, num_workers=2)
    next(loader)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_fewer_rows_than_ranks_is_refused(folder, encoder):
    with pytest.raises(ValueError, match="23 rows for 24 data-parallel ranks"):
        train_loader(folder, encoder, world_size=24)


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
