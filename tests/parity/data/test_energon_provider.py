"""The Energon loaders: exact resume, equal validation, and what is refused."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from loaders import content, take
from pairs import first_soon
from prepared_shards import prepare
from sources import write_sharegpt
from transformers import AutoProcessor

from megatron_vlm.batch import IGNORE_INDEX
from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider

CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """50 training samples in 5 shards and 10 for validation."""
    folder = tmp_path_factory.mktemp("energon")
    source = write_sharegpt(folder / "source", 60)
    prepare(source, folder / "dataset", splits={"train": 50, "val": 10}, samples_per_shard=10)
    return folder / "dataset"


@pytest.fixture
def encoder(processor):
    return HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))


def provider(dataset, num_workers=0, **kwargs):
    settings = {"shuffle_buffer_size": 8, "max_samples_per_sequence": 5} | kwargs
    return EnergonProvider(DataConfig(train_data_path=str(dataset), num_workers=num_workers, **settings))


def train_loader(dataset, encoder, num_workers=0, rank=0, world_size=1, seed=7, batch=2, **kwargs):
    return provider(dataset, num_workers, **kwargs).train_loader(
        encoder, micro_batch_size=batch, rank=rank, world_size=world_size, seed=seed
    )


# -- resume


def resume_twice(dataset, checkpoint, state, count):
    """Runs in a new process: restore, save at once, restore that, one batch, save, restore, the rest."""
    encoder = HFEncoderVLMTaskEncoder(AutoProcessor.from_pretrained(checkpoint), DataConfig(seq_length=256))
    batches = []
    for steps in (0, 1, count - 1):
        loader = train_loader(dataset, encoder, num_workers=2)
        loader.load_state_dict(json.loads(state))
        batches += take(loader, steps)
        state = json.dumps(loader.state_dict())
        loader.close()
    return batches


@pytest.mark.long
def test_training_resumes_exactly_in_a_new_process(dataset, encoder, tiny_gemma3):
    """In the middle of the second epoch, with two workers, through JSON, and saved again after one batch."""
    loader = train_loader(dataset, encoder, num_workers=2)
    take(loader, 29)
    state = json.dumps(loader.state_dict())
    expected = take(loader, 9)
    loader.close()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        resumed = pool.submit(resume_twice, dataset, tiny_gemma3, state, 9).result()
    assert resumed == expected


class SlowToBegin(threading.Thread):
    """Of a worker: it takes commands, and begins to read a second after the worker before it."""

    def start(self):
        super().start()
        worker = torch.utils.data.get_worker_info()
        time.sleep(worker.id if worker and self.name == "command_thread" else 0)


@pytest.mark.parametrize("restored", first_soon([True, False]))
def test_a_state_saved_before_all_workers_began_is_exact(dataset, encoder, monkeypatch, restored):
    state = None
    if restored:
        loader = train_loader(dataset, encoder, num_workers=3)
        take(loader, 7)
        state = loader.state_dict()
        loader.close()

    def open_loader():
        loader = train_loader(dataset, encoder, num_workers=3)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        return loader

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", SlowToBegin)
        loader = open_loader()
        take(loader, 1)
        state = loader.state_dict()
    expected = take(loader, 6)
    loader.close()
    resumed = open_loader()
    assert take(resumed, 6) == expected
    resumed.close()


@pytest.fixture(scope="module")
def saved_state(dataset, processor):
    loader = train_loader(dataset, HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256)))
    take(loader, 1)
    return loader.state_dict()


@pytest.mark.parametrize(
    "field, change",
    [
        ("world_size: saved 1, now 2", {"world_size": 2}),
        ("seed: saved 7, now 8", {"seed": 8}),
        ("num_workers: saved 0, now 2", {"num_workers": 2}),
        ("micro_batch_size: saved 2, now 1", {"batch": 1}),
        ("shuffle_buffer_size: saved 8, now 4", {"shuffle_buffer_size": 4}),
        ("max_samples_per_sequence: saved 5, now 3", {"max_samples_per_sequence": 3}),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(dataset, encoder, saved_state, field, change):
    with pytest.raises(ValueError, match=field):
        train_loader(dataset, encoder, **change).load_state_dict(saved_state)


@pytest.mark.parametrize("part", ["chat_template", "tokenizer", "processor.image_processor.image_mean"])
def test_a_state_of_another_processor_is_refused_by_name(dataset, tiny_gemma3, saved_state, part):
    processor = AutoProcessor.from_pretrained(tiny_gemma3)
    processor.chat_template += " " if part == "chat_template" else ""
    if part == "tokenizer":
        processor.tokenizer.add_tokens(["another"])
    if part.startswith("processor"):
        processor.image_processor.image_mean = [0.4, 0.5, 0.5]
    loader = train_loader(dataset, HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256)))
    with pytest.raises(ValueError, match=f"configuration: {part}: saved") as refusal:
        loader.load_state_dict(saved_state)
    assert str(refusal.value).count(": saved ") == 1


def test_a_state_fits_the_dataset_after_it_moved(tmp_path, dataset, encoder, saved_state):
    moved = train_loader(shutil.copytree(dataset, tmp_path / "moved"), encoder)
    moved.load_state_dict(saved_state)
    original = train_loader(dataset, encoder)
    original.load_state_dict(saved_state)
    assert take(moved, 3) == take(original, 3)


def test_a_batch_can_be_replayed_by_its_key(dataset, encoder):
    loader = train_loader(dataset, encoder, num_workers=2)
    batch = [next(loader) for _ in range(3)][-1]
    loader.close()
    key = json.loads(json.dumps(batch["__restore_key__"]))
    assert content(train_loader(dataset, encoder, num_workers=2).replay(key)) == content(batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_leaves_the_random_numbers_of_the_run_alone(dataset, encoder, num_workers):
    before = torch.get_rng_state()
    loader = train_loader(dataset, encoder, num_workers=num_workers)
    next(loader)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


# -- training order


def test_close_ends_the_workers_at_once(dataset, encoder):
    loader = train_loader(dataset, encoder, num_workers=2)
    next(loader)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 8  # garbage collection takes 5 s for each
    assert not [p for p in multiprocessing.active_children() if p.is_alive()]


# -- validation


def validation(dataset, encoder, world_size, num_workers=0, batch=1):
    """The batches of each rank, as lists."""
    loaders = [
        provider(dataset, num_workers).valid_loader(
            encoder, micro_batch_size=batch, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    return [list(loader) for loader in loaders]


def all_numbers(batches):
    return [int(key.split("-")[-1]) for batch in batches for row in batch["__key__"] for key in row]


@pytest.mark.parametrize(
    "world_size, num_workers, batch, batches", first_soon([(3, 2, 1, 4), (3, 0, 1, 4), (3, 0, 2, 2)])
)
def test_validation_gives_each_sample_once_and_equal_batches(
    dataset, encoder, world_size, num_workers, batch, batches
):
    ranks = validation(dataset, encoder, world_size, num_workers, batch)
    assert [len(rank) for rank in ranks] == [batches] * world_size
    seen = [n for rank in ranks for n in all_numbers(rank)]
    assert len(seen) == 10
    assert len(set(seen)) == 10


@pytest.mark.long
def test_a_rank_without_samples_trains_nothing_as_often_as_the_others(tmp_path, encoder):
    source = write_sharegpt(tmp_path / "source", 2)
    prepare({"val": source}, tmp_path / "out")
    ranks = validation(tmp_path / "out", encoder, world_size=3)
    assert [len(rank) for rank in ranks] == [1, 1, 1]
    assert sorted(n for rank in ranks for n in all_numbers(rank)) == [0, 1]
    (empty,) = [batch for rank in ranks for batch in rank if batch["__key__"] == [[]]]
    assert (empty["labels"] == IGNORE_INDEX).all()


def test_validation_counts_drops_and_stays_equal(dataset, processor, encoder):
    """Records with two images are longer than the others; drop them."""
    lengths = {len(batch["input_ids"][0]) for batch in validation(dataset, encoder, 1)[0]}
    short = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=max(lengths) - 1))
    ranks = validation(dataset, short, world_size=3)
    dropped = short.drops.summary()["dropped"]
    assert dropped > 0
    assert len({len(rank) for rank in ranks}) == 1
    assert len([n for rank in ranks for n in all_numbers(rank)]) == 10 - dropped


def test_no_validation_split_is_none_and_a_wrong_path_an_error(tmp_path, encoder):
    out = tmp_path / "out"
    source = write_sharegpt(tmp_path / "source", 4)
    prepare(source, out, splits={"train": 1})
    settings = {"micro_batch_size": 1, "rank": 0, "world_size": 1}
    assert provider(out).valid_loader(encoder, **settings) is None
    with pytest.raises(ValueError, match="has no 'val' split"):
        provider(out, valid_data_path=str(out)).valid_loader(encoder, **settings)


@pytest.mark.parametrize("ratio, shards", first_soon([("8,1,1", 3), ("1,0,0", 3), ("0,0,1", 1)]))
def test_a_split_without_shards_that_energon_prepare_wrote_is_no_split(tmp_path, encoder, ratio, shards):
    """`energon prepare` writes `val: []` for a share of 0, and for one that is less than a shard."""
    out = tmp_path / "out"
    prepare(write_sharegpt(tmp_path / "source", 6), out, splits={"train": 6}, samples_per_shard=6 // shards)
    shutil.rmtree(out / ".nv-meta")
    words = ["--non-interactive", "--sample-type=CrudeWebdataset", "--no-progress", f"--split-ratio={ratio}"]
    words = [Path(sys.executable).with_name("energon"), "prepare", out, *words]
    subprocess.run(words, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    splits = yaml.safe_load((out / ".nv-meta/split.yaml").read_text())["split_parts"]
    assert splits["val"] == []
    settings = {"micro_batch_size": 1, "rank": 0, "world_size": 1}
    assert provider(out).valid_loader(encoder, **settings) is None
    with pytest.raises(ValueError, match=r"has no 'val' split, only \['t"):
        provider(out, valid_data_path=str(out)).valid_loader(encoder, **settings)
    meta = tmp_path / "blend.yaml"
    inner = f"{{path: {out}, split_part: SPLIT}}"
    blend = f"train: {inner.replace('SPLIT', 'train')}\n  val: {inner.replace('SPLIT', 'val')}"
    meta.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  {blend}\n")
    assert provider(meta).valid_loader(encoder, **settings) is None
    if splits["train"]:
        assert next(iter(train_loader(out, encoder)))
        assert next(iter(train_loader(meta, encoder)))
    else:
        with pytest.raises(ValueError, match=r"has no 'train' split, only \['test'\]"):
            train_loader(out, encoder)


# -- failures


def damaged(dataset, folder):
    return Path(shutil.copytree(dataset, folder / "damaged"))


def test_a_truncated_shard_is_named(tmp_path, dataset, encoder):
    copy = damaged(dataset, tmp_path)
    with (copy / "train-00002.tar").open("r+b") as shard:
        shard.truncate(2000)
    with pytest.raises(ValueError, match="train-00002.tar: holds 2000 bytes, .* truncated"):
        train_loader(copy, encoder)


def touch(path):
    return f"__module__: subprocess\n{{i}}__function__: getoutput\n{{i}}cmd: touch {path}\n"


@pytest.mark.parametrize(
    "file, text",
    [
        ("dataset.yaml", "sample_loader: sample_loader.py:load\npart_filter: sample_loader.py:part\n"),
        ("dataset.yaml", CRUDE + "part_filter: sample_loader.py:part_filter\n"),
        ("dataset.yaml", CRUDE + '"\\x70art_filter": sample_loader.py:part_filter\n'),
        ("dataset.yaml", "__module__: subprocess\n__class__: Popen\nargs: [touch, {marker}]\n"),
        ("dataset.yaml", "{call}"),
        ("split.yaml", "{call}"),
        (".info.json", '{"__module__": "subprocess", "__function__": "getoutput", "cmd": "touch {marker}"}'),
    ],
)
def test_a_dataset_description_that_names_code_is_refused_unrun(tmp_path, dataset, encoder, file, text):
    copy, marker = damaged(dataset, tmp_path), tmp_path / "executed"
    call = touch(marker)
    text = text.replace("{call}", call.format(i="")).replace("{nested}", call.format(i="    "))
    (copy / ".nv-meta" / file).write_text(text.replace("{marker}", str(marker)))
    with pytest.raises(ValueError, match=f"{file}: (names|sets|its samples are)"):
        train_loader(copy, encoder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "file, text",
    [
        ("dataset.yaml", CRUDE + "subflavors:\n  x:\n    {nested}"),
        ("sample_loader.py", "import os\nos.system('touch {marker}')\n"),
    ],
)
def test_code_that_says_nothing_of_samples_is_not_run(tmp_path, dataset, encoder, file, text):
    copy, marker = damaged(dataset, tmp_path), tmp_path / "executed"
    call = touch(marker)
    text = text.replace("{call}", call.format(i="")).replace("{nested}", call.format(i="    "))
    (copy / ".nv-meta" / file).write_text(text.replace("{marker}", str(marker)))
    assert next(iter(train_loader(copy, encoder)))
    assert not marker.exists()


def metadataset(path, dataset, extra=""):
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - {{weight: 1, path: {os.path.relpath(dataset, path.parent)}}}\n"
        f"      - {{weight: 1, path: {os.path.relpath(dataset, path.parent)}}}\n{extra}"
    )
    return path


@pytest.mark.parametrize("name", ["../other.yaml", "other.txt"])
def test_a_metadataset_that_points_to_an_unchecked_description_is_refused(tmp_path, dataset, encoder, name):
    meta = metadataset(tmp_path / "meta.yaml", dataset)
    meta.write_text(meta.read_text().replace("weight: 1,", f"weight: 1, dataset_config: {name},"))
    with pytest.raises(ValueError, match="meta.yaml: names dataset_config"):
        train_loader(meta, encoder)


def test_what_energon_cannot_open_is_named(tmp_path, dataset, encoder):
    meta = metadataset(tmp_path / "meta.yaml", dataset)
    meta.write_text(meta.read_text().replace("weight: 1,", "weight: many,", 1))
    with pytest.raises(ValueError, match="meta.yaml: cannot be read .*; restore the file or"):
        train_loader(meta, encoder)
