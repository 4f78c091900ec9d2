"""Preparation from every source, on Ray too; blends and object stores as Energon reads them."""

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import datasets
import pytest
import written_sources
from loaders import take
from prepared_shards import prepare, stored
from sources import write_sharegpt

from megatron_vlm.checks.paths import data_problems
from megatron_vlm.config import DataConfig, RunConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.records import hub
from megatron_vlm.data.records.tables import open_table
from megatron_vlm.overrides import apply_overrides

METADATASET = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


@pytest.fixture
def encoder(processor):
    return HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))


@pytest.mark.parametrize("write", [s for s in written_sources.SOURCES if "streamed" not in s.__name__])
def test_every_source_is_prepared_and_trains_the_same(tmp_path, write, processor, encoder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "source").mkdir()
    settings = write(tmp_path / "source")
    source = settings.pop("train_data_path")
    summary = prepare({"val": source} if source.is_file() else source, tmp_path / "out", **settings)
    assert sum(summary.samples.values()) == len(written_sources.GOOD)
    assert sum(summary.skipped.values()) == len(written_sources.BAD)
    if source.is_dir():
        return
    loader = EnergonProvider(
        DataConfig(train_data_path="", valid_data_path=str(tmp_path / "out"), num_workers=0)
    ).valid_loader(encoder, micro_batch_size=1, rank=0, world_size=1)
    assert written_sources.numbers_of(loader, processor) == written_sources.GOOD


def test_a_meta_file_is_prepared_in_its_shares(tmp_path):
    settings = written_sources.write_meta(tmp_path, a={"sample_ratio": 0.4}, b={"sample_ratio": 1.5})
    prepare({"train": settings["train_data_path"]}, tmp_path / "out")
    replies = [
        json.loads(parts["json"])["messages"][1] for parts in stored(tmp_path / "out")["train"].values()
    ]
    per_dataset = Counter(int(reply["content"][0]["text"].split()[1]) // 10 for reply in replies)
    assert per_dataset == {0: 4, 1: 15}


@pytest.mark.long
def test_ray_writes_the_same_bytes(tmp_path):
    source = write_sharegpt(tmp_path / "source", 30)
    source.write_text(source.read_text() + "{broken\n")
    local = prepare(source, tmp_path / "local", samples_per_shard=5)
    ray = prepare(source, tmp_path / "ray", samples_per_shard=5, engine="ray", workers=2)
    assert files(tmp_path / "local") == files(tmp_path / "ray")
    assert len(files(tmp_path / "local")) > 6
    assert (local.samples, local.skipped) == (ray.samples, ray.skipped)


def files(folder: Path):
    """Energon numbers each index anew, and its database holds the order of writing."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("index.")
    }


def test_ray_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="megatron-vlm\\[ray\\]"):
        prepare(write_sharegpt(tmp_path / "source", 3), tmp_path / "out", engine="ray")
    assert not (tmp_path / "out").exists()


# -- what Energon reads


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    """Two prepared datasets of 20 records and a metadataset that draws from them 3 to 1."""
    folder = tmp_path_factory.mktemp("blend")
    for number, name in enumerate(("a", "b")):
        source = write_sharegpt(folder / f"source_{name}", 20, first=20 * number)
        prepare({"train": source}, folder / name, samples_per_shard=5)
    (folder / "blend.yaml").write_text(
        METADATASET + "splits: {train: {blend: [{weight: 3, path: ./a}, {weight: 1, path: ./b}]}}\n"
    )
    return folder


def train_loader(path, encoder, num_workers=0):
    provider = EnergonProvider(
        DataConfig(
            train_data_path=str(path),
            num_workers=num_workers,
            shuffle_buffer_size=4,
            max_samples_per_sequence=4,
        )
    )
    return provider.train_loader(encoder, micro_batch_size=1, rank=0, world_size=1, seed=7)


@pytest.mark.long
def test_a_weighted_blend_draws_by_its_weights(blend, processor, encoder):
    loader = train_loader(blend / "blend.yaml", encoder)
    numbers = written_sources.numbers_of([next(loader) for _ in range(400)], processor)
    from_a = sum(count for number, count in numbers.items() if number < 20)
    assert 270 < from_a < 330  # 300 expected, standard deviation 8.7
    assert set(numbers) == set(range(40))
    assert max(numbers[n] for n in range(20)) - min(numbers[n] for n in range(20)) <= 2  # epoch after epoch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_weighted_blend_resumes_exactly(blend, encoder, num_workers):
    loader = train_loader(blend / "blend.yaml", encoder, num_workers)
    take(loader, 33)
    state = json.dumps(loader.state_dict())
    expected = take(loader, 12)
    loader.close()
    resumed = train_loader(blend / "blend.yaml", encoder, num_workers)
    resumed.load_state_dict(json.loads(state))
    assert take(resumed, 12) == expected
    resumed.close()


@pytest.fixture
def store(blend, tmp_path, monkeypatch):
    """The blend's folder as a store of multi-storage-client."""
    profile = {"storage_provider": {"type": "file", "options": {"base_path": str(blend)}}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"store": profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    return "msc://store"


@pytest.mark.parametrize("name", ["a", "blend.yaml"])
def test_an_object_store_gives_the_batches_of_the_folder(store, blend, encoder, name):
    remote, local = (train_loader(f"{root}/{name}", encoder) for root in (store, blend))
    assert take(remote, 30) == take(local, 30)
    state = json.loads(json.dumps(local.state_dict()))
    resumed = train_loader(f"{store}/{name}", encoder)
    resumed.load_state_dict(state)
    assert take(resumed, 5) == take(local, 5)


def test_a_description_in_an_object_store_is_checked_too(store, blend, tmp_path, encoder):
    (blend / "evil.yaml").write_text("__module__: os\n__function__: getcwd\n")
    with pytest.raises(ValueError, match="names the function os.getcwd"):
        train_loader(f"{store}/evil.yaml", encoder)


def test_the_address_of_an_object_store_is_a_path(store):
    assert not list(data_problems("energon", "data.train_data_path", f"{store}/a"))


def test_columns_are_settings(tmp_path):
    config = apply_overrides(
        RunConfig(), ["data.columns={conversations: chat}", "data.columns.images=pictures"]
    )
    assert config.data.columns == {"conversations": "chat", "images": "pictures"}


@pytest.mark.parametrize(
    "files",
    [("rows.jsonl", "1.jpg", "2.jpg"), ("rows.json", "images/1.jpg", "images/2.jpg", "metadata.jsonl")],
)
def test_a_folder_of_images_names_the_file_of_rows_that_is_not_read(tmp_path, files):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=f"is read as images, without {files[0]}; give .*{files[0]}"):
        open_table(tmp_path)


CARDS = {  # what a dataset's card says -> how it is refused
    "configs: [{config_name: default, data_files: 'http://127.0.0.1:9/x.jsonl'}]": "names the data http://127",
    "configs: [{config_name: a, data_files: [{split: a, path: [rows.jsonl, ../x.jsonl]}]}]": "leads to",
    "configs: [{config_name: a, data_files: 'zip://rows.jsonl::rows.zip'}]": "names the data zip://",
    "configs: [{config_name: a, data_files: /etc/passwd}]": "leads to /etc/passwd, outside of",
    "configs: [{config_name: a, data_dir: ../other}]": "leads to ../other, outside of",
    "configs: [{config_name: a, data_files: link.jsonl}]": "leads to link.jsonl, outside of",
    "configs: [{config_name: a, data_files: 'l*.jsonl'}]": "leads to .*link.jsonl, outside of",
    "a: &a [x, x]\nb: [*a, *a]": "aliases are not read",
    "configs: [{config_name: a, data_files: [{split: train, path: 'rows*'}, "
    "{split: val, path: more/**}]}]": None,
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("card", CARDS)
def test_the_card_of_a_dataset_names_its_own_data(tmp_path, monkeypatch, card, streaming):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    (folder / "more").mkdir(parents=True)
    (folder / "README.md").write_text(f"---\n{card}\n---\nWords.\n")
    for file in (folder / "rows.jsonl", folder / "more/rows.jsonl", tmp_path / "x.jsonl"):
        file.write_text('{"messages": "x"}\n')
    if "l" in card.partition("data_files: ")[2][:2]:
        (folder / "link.jsonl").symlink_to(tmp_path / "x.jsonl")
    split = {} if streaming or CARDS[card] else {"split": "val"}
    opened = partial(hub.open_stream if streaming else hub.open_rows, folder, **split)
    if CARDS[card]:
        with pytest.raises(ValueError, match=CARDS[card]):
            opened()
    else:
        assert [row["messages"] for row in opened()] == ["x"]


def test_a_snapshot_in_the_cache_of_the_hub_is_links_to_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    snapshot, blobs = tmp_path / "datasets--a--b/snapshots/0123", tmp_path / "datasets--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "4567").write_text('{"messages": "x"}\n')
    (snapshot / "train.jsonl").symlink_to(blobs / "4567")
    assert len(hub.open_rows(snapshot)) == 1


def test_a_saved_dataset_reads_no_other(tmp_path):
    rows = datasets.Dataset.from_dict({"a": [1]})
    rows.save_to_disk(tmp_path / "other")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["../other"]}')
    with pytest.raises(ValueError, match="dataset_dict.json: leads to ../other, outside of"):
        hub.open_rows(tmp_path / "saved")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    state = tmp_path / "saved/train/state.json"
    state.write_text(state.read_text().replace("data-00000", "../../other/data-00000"))
    with pytest.raises(ValueError, match="state.json: leads to .*, outside of"):
        hub.open_rows(tmp_path / "saved")
