"""Whatever is wrong with a file of a dataset, opening it ends soon, in one message that names the file."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import braceexpand
import datasets
import pytest
from prepared_shards import prepare
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.hf import HFProvider

ROWS = 8
SECONDS = 30
GARBAGE = bytes(range(255, 0, -1)) * 400
ENERGON = [
    *(f"shards/.nv-meta/{name}" for name in ("dataset.yaml", "split.yaml", ".info.json")),
    "shards/train-00001.tar",
    "shards/train-00001.tar.idx",
    "meta.yaml",
]
HF = {  # file: what is opened
    "saved/state.json": "saved",
    "saved/dataset_info.json": "saved",
    "saved/data-00000-of-00001.arrow": "saved",
    "split/dataset_dict.json": "split",
    "split/train/state.json": "split",
    "parquet/b.parquet": "parquet",
    "one.parquet": "one.parquet",
    "data.jsonl": "data.jsonl",
    "array.json": "array.json",
    "dataset_info.json": "dataset_info.json",
}


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 - 3])


def garbage(file):
    file.write_bytes(GARBAGE[: max(1, file.stat().st_size)])


def empty(file):
    file.write_bytes(b"")


def a_list(file):
    file.write_text("[[1, 2]]")


def a_number(file):
    file.write_text("5\n")


def of_wrong_values(file):
    """Every value of the description is a number; of other files, text."""
    if file.suffix == ".json" and not file.read_text().startswith("["):
        file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), 7), indent=1))
    elif file.suffix == ".yaml":
        names = re.findall(r"^(\w+):", file.read_text(), re.M)
        file.write_text("".join(f"{name}: 7\n" for name in names))
    else:
        file.write_text("text\n" * 50)


def a_folder(file):
    file.unlink()
    file.mkdir()


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


def missing(file):
    file.unlink()


STILL_A_DATASET = [
    ("data.jsonl", cut),
    ("dataset_info.json", of_wrong_values),  # one record, without turns
    ("parquet/b.parquet", missing),
    ("parquet/b.parquet", a_folder),
    ("saved/state.json", missing),
    ("saved/state.json", a_folder),
    ("split/dataset_dict.json", missing),
    ("split/dataset_dict.json", a_folder),
]
DAMAGES = [cut, garbage, empty, a_list, a_number, of_wrong_values, a_folder, a_pipe, missing]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One dataset in every form that a run opens."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_sharegpt(folder, ROWS)
    prepare(source, folder / "shards", splits={"train": ROWS}, samples_per_shard=4)
    reference = "splits:\n  train:\n    blend_epochized:\n      - {path: shards}\n"
    (folder / "meta.yaml").write_text("__module__: megatron.energon\n__class__: MetadatasetV2\n" + reference)
    write_hf_folder(folder / "saved", source)
    rows = datasets.load_from_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": rows}).save_to_disk(folder / "split")
    (folder / "parquet").mkdir()
    for path in ("parquet/a.parquet", "parquet/b.parquet", "one.parquet"):
        rows.to_parquet(folder / path)
    records = [json.loads(line) for line in source.read_text().splitlines()]
    (folder / "array.json").write_text(json.dumps(records))
    (folder / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "data.jsonl"}}, indent=1))
    return folder


@pytest.fixture
def encoder(processor):
    return HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))


@pytest.fixture(autouse=True)
def within_time(monkeypatch, tmp_path):
    def late(*_):
        pytest.fail(f"still opening after {SECONDS} s")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def open_and_read(path, encoder, kind):
    if kind == "energon":
        provider = EnergonProvider(
            DataConfig(train_data_path=str(path), num_workers=0, shuffle_buffer_size=1)
        )
    else:
        provider = HFProvider(DataConfig(train_data_path=str(path), num_workers=0, max_drop_share=0.5))
    loader = provider.train_loader(encoder, micro_batch_size=1, rank=0, world_size=1, seed=0)
    return [next(loader)["__key__"][0][0] for _ in range(ROWS)]


def check(refusal, file, opened=None):
    """The message names the file or, where `datasets` does not name it, the folder."""
    said = str(refusal.value)
    assert file.name in said or opened is not None and opened.is_dir() and str(opened) in said
    assert "\n" not in said and said.endswith(".") and ";" in said, said


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ENERGON)
def test_a_damaged_file_of_an_energon_dataset_is_named(whole, encoder, tmp_path, name, damage):
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    damage(copy / name)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{copy}.*; .*[.]$") as refusal:
        open_and_read(copy / "meta.yaml", encoder, "energon")
    if damage is not of_wrong_values:  # of these Energon tells what it cannot open
        check(refusal, copy / name)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", HF)
def test_a_damaged_file_of_a_map_style_dataset_is_named(whole, encoder, tmp_path, name, damage):
    if (name, damage) in STILL_A_DATASET:
        pytest.skip("what is left is a dataset of its own")
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    damage(copy / name)
    with pytest.raises((ValueError, FileNotFoundError)) as refusal:
        open_and_read(copy / HF[name], encoder, "hf")
    check(refusal, copy / name, copy / HF[name])


@pytest.mark.parametrize("path, kind", [("meta.yaml", "energon"), *((path, "hf") for path in HF.values())])
def test_the_whole_files_are_read(whole, encoder, path, kind):
    """Else the refusals above could be of anything."""
    assert len(set(open_and_read(whole / path, encoder, kind))) == ROWS


def test_a_broken_line_is_a_drop_that_names_file_and_record(whole, encoder, tmp_path):
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    lines = (copy / "data.jsonl").read_text().splitlines()
    lines[3] = lines[3][:20]
    (copy / "data.jsonl").write_text("\n".join(lines))
    open_and_read(copy / "data.jsonl", encoder, "hf")
    [drop] = [d for d in encoder.drops.examples() if d["key"] == "000000003"][:1]
    assert drop["reason"] == "bad_json" and f"{copy}/data.jsonl, record 3" in drop["detail"]


@pytest.mark.parametrize("name", ["../shards/train-00000.tar", "{.,}./shards/train-00000.tar", "/etc/x.tar"])
def test_a_split_names_no_file_outside_its_dataset(whole, encoder, tmp_path, name):
    copy = Path(shutil.copytree(whole / "shards", tmp_path / "copy"))
    info = json.loads((copy / ".nv-meta/.info.json").read_text())
    shards = braceexpand.braceexpand(name)
    info["shard_counts"] |= dict.fromkeys(shards, 4)
    (copy / ".nv-meta/.info.json").write_text(json.dumps(info))
    (copy / ".nv-meta/split.yaml").write_text(json.dumps({"split_parts": {"train": [name]}}))
    with pytest.raises(ValueError, match="split.yaml: names .*, which leads out of the dataset"):
        open_and_read(copy, encoder, "energon")
