"""Preparation: what is written, where every record goes, and what is left when it goes wrong."""

import gc
import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset, stateless
from prepared_shards import add_part, prepare, stored
from programs import ROOT
from samples import clean
from sources import image_bytes, record, write_hf_folder, write_sharegpt

from megatron_vlm.data.prepare import index_shards
from megatron_vlm.data.shard_format import cook_record
from megatron_vlm.files import free_bytes


def numbers(samples):
    return sorted(int(key.rsplit("-", 1)[1]) for key in samples)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """60 good records in shards of 10, written by two workers; (source, output, summary)."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_sharegpt(folder / "source", 60)
    output = folder / "dataset"
    return source, output, prepare(source, output, samples_per_shard=10, workers=2)


def test_every_record_is_in_exactly_one_split(prepared):
    _, output, summary = prepared
    splits = stored(output)
    assert sorted(numbers(splits["train"]) + numbers(splits["val"])) == list(range(60))
    assert summary.samples == {"train": 54, "val": 6}
    assert summary.shards == {"train": 6, "val": 1}


def test_split_sizes_are_exact_and_none_is_empty(tmp_path):
    source = write_sharegpt(tmp_path / "source", 11)
    summary = prepare(source, tmp_path / "out", splits={"train": 98, "val": 1, "test": 1})
    assert summary.samples == {"train": 9, "val": 1, "test": 1}


def test_a_held_out_file_becomes_its_own_split(tmp_path):
    train = write_sharegpt(tmp_path / "source", 8, "train.jsonl")
    val = write_sharegpt(tmp_path / "source", 3, "held_out.jsonl", first=8)
    prepare({"train": train, "val": val}, tmp_path / "out")
    replies = {
        split: [json.loads(parts["json"])["messages"][1]["content"][0]["text"] for parts in samples.values()]
        for split, samples in stored(tmp_path / "out").items()
    }
    assert replies == {
        "train": [f"number {n}" for n in range(8)],
        "val": [f"number {n}" for n in range(8, 11)],
    }


def test_an_hf_source_keeps_splits_of_its_own(tmp_path):
    import datasets

    lines = write_sharegpt(tmp_path / "source", 6)
    rows = datasets.load_from_disk(str(write_hf_folder(tmp_path / "rows", lines)))
    both = datasets.DatasetDict({"train": rows.select(range(4)), "validation": rows.select(range(4, 6))})
    both.save_to_disk(tmp_path / "both")
    assert prepare(tmp_path / "both", tmp_path / "out").samples == {"train": 4, "val": 2}


def test_stock_energon_reads_the_same_samples(prepared):
    _, output, _ = prepared

    class Plain(DefaultTaskEncoder):
        decoder = None
        cookers = [Cooker(cook_record)]

        @stateless
        def batch(self, samples):
            return samples

        @stateless
        def encode_batch(self, batch):
            return batch

    dataset = get_val_dataset(
        output,
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=4,
        task_encoder=Plain(),
    )
    read = {sample.__key__: sample for batch in get_loader(dataset) for sample in batch}
    expected = stored(output)["train"]
    assert sorted(read) == sorted(expected)
    for key, parts in expected.items():
        document = json.loads(parts["json"])
        images = [parts[name] for name in sorted(parts) if name.startswith("img")]
        assert read[key].messages == clean(document, len(images))[0]
        assert (read[key].imgs or []) == images


def test_every_skipped_record_is_named_with_its_reason(tmp_path):
    source = write_sharegpt(tmp_path / "source", 4)
    (tmp_path / "outside.jpg").write_bytes(image_bytes(1))
    (source.parent / "images/broken.jpg").write_bytes(image_bytes(1)[:200])
    turns = record(1)["conversations"]
    bad = {
        "bad_json": "{not json",
        "missing_media": json.dumps({"image": "images/none.jpg", "conversations": turns}),
        "outside": json.dumps({"image": "../outside.jpg", "conversations": turns}),
        "image_truncated": json.dumps({"image": "images/broken.jpg", "conversations": turns}),
        "placeholder_mismatch": json.dumps({"image": ["images/1-0.jpg"] * 2, "conversations": turns}),
        "no_trained_tokens": json.dumps({"image": "images/1-0.jpg", "conversations": turns[:1]}),
    }
    source.write_text(source.read_text() + "\n".join(bad.values()) + "\n")
    summary = prepare(source, tmp_path / "out")
    skipped = [json.loads(line) for line in (tmp_path / "out/skipped.jsonl").read_text().splitlines()]
    skipped.sort(key=lambda entry: entry["record"])
    assert [entry["record"] for entry in skipped] == list(range(4, 10))
    expected = ["missing_media" if name == "outside" else name for name in bad]
    assert [entry["reason"] for entry in skipped] == expected
    assert "outside of" in skipped[2]["detail"]
    assert sum(summary.skipped.values()) == 6
    assert sum(summary.samples.values()) == 4


TOOL = ROOT / "tools/prepare_energon_dataset.py"


def start_tool(*arguments):
    command = [sys.executable, TOOL, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupt_leaves_nothing(tmp_path, stop):
    """As Ctrl-C does it: the signal goes to the whole process group, in the middle of the work."""
    source = write_sharegpt(tmp_path / "source", 40)
    source.write_text(source.read_text() * 500)
    process = start_tool(source, tmp_path / "out", "--workers", "2", "--samples-per-shard", "100")
    deadline = time.monotonic() + 300  # as below, only so that a hang ends
    while not list(tmp_path.glob(".out.*.partial/train-*.tar")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)
    else:
        process.send_signal(stop)
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_leaves_no_half_of_an_index(tmp_path, workers):
    """What stays are whole `.idx` files, which the next start writes again."""
    for shard in range(20):
        with tarfile.open(tmp_path / f"{shard:05d}.tar", "w") as tar:
            for number in range(2000):
                add_part(tar, f"{shard}-{number}.txt", b"a")
    process = start_tool(tmp_path, "--workers", str(workers))
    deadline = time.monotonic() + 300
    while not (indexed := list(tmp_path.glob("*.idx"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode != 0
    left = [path for path in tmp_path.iterdir() if path.suffix != ".tar"]
    assert set(indexed) <= set(left) and {path.stat().st_size for path in left} == {8 * 2001}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("nothing may be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_full_or_read_only_is_named(small_disk, tmp_path):
    source, output = write_sharegpt(tmp_path / "source", 300), small_disk / "dataset"
    with pytest.raises(OSError, match="/disk/dataset: No space left on device; .* free there; make room and"):
        prepare(source, output)
    assert not list(small_disk.iterdir())
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match="/disk/dataset: Read-only file system; give another path"):
        prepare(source, output)


def test_an_index_on_a_disk_that_is_full_or_read_only_names_the_way_out(small_disk, tmp_path):
    with tarfile.open(small_disk / "a.tar", "w") as tar:
        for number in range(40):
            add_part(tar, f"{number}.txt", b"a")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match="/disk/.nv-meta: Read-only file system; give a folder as OUTPUT"):
        index_shards([small_disk], progress=False)
    assert index_shards([small_disk], tmp_path / "dataset", progress=False).samples == {"train": 40}
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    (small_disk / "full").write_bytes(bytes(free_bytes(small_disk)))
    with pytest.raises(OSError, match="No space left on device; .* free there; make room and"):
        index_shards([small_disk], progress=False)
    gc.collect()  # the error holds SQLite's file open
    assert sorted(path.name for path in small_disk.iterdir()) == ["a.tar", "full"]
