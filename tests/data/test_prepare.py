"""Preparation: what is written, where every record goes, and what is left when it goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import datasets
import pytest
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset, stateless
from prepared_shards import prepare, stored
from programs import ROOT, run_program
from samples import clean
from sources import image_bytes, record, write_hf_folder, write_sharegpt

from megatron_vlm.data.shard_format import cook_record


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


def test_images_are_the_source_files_in_order(prepared):
    source, output, _ = prepared
    for samples in stored(output).values():
        for key, parts in samples.items():
            paths = record(int(key.rsplit("-", 1)[1]))["images"]
            images = [parts[name] for name in json.loads(parts["json"]).get("images", [])]
            assert images == [(source.parent / path).read_bytes() for path in paths]


def test_the_same_seed_gives_the_same_splits_and_another_seed_others(tmp_path):
    source = write_sharegpt(tmp_path / "source", 30)
    val = [set(_val_keys(source, tmp_path / f"out{i}", seed)) for i, seed in enumerate((1, 1, 2))]
    assert val[0] == val[1] != val[2]


def _val_keys(source, output, seed):
    prepare(source, output, seed=seed, splits={"train": 0.7, "val": 0.3})
    return stored(output)["val"]


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


def test_json_array_jsonl_and_hf_folder_give_the_same_samples(tmp_path):
    lines = write_sharegpt(tmp_path / "source", 12)
    array = lines.with_name("array.json")
    array.write_text(json.dumps([json.loads(line) for line in lines.read_text().splitlines()]))
    rows = write_hf_folder(tmp_path / "rows", lines)
    results = []
    for index, source in enumerate((lines, array, rows)):
        prepare(source, tmp_path / f"out{index}")
        results.append(stored(tmp_path / f"out{index}"))
    assert results[0] == results[1] == results[2]
    assert len(results[0]["train"]) == 11


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


def test_a_link_cannot_lead_out_of_the_image_root(tmp_path):
    source = write_sharegpt(tmp_path / "source", 2)
    (tmp_path / "outside.jpg").write_bytes(image_bytes(1))
    (source.parent / "images/1-0.jpg").unlink()
    (source.parent / "images/1-0.jpg").symlink_to(tmp_path / "outside.jpg")
    assert prepare(source, tmp_path / "out").skipped == {"missing_media": 1}


def test_no_split_is_lost_to_another_of_the_same_name(tmp_path):
    rows = datasets.Dataset.from_dict({"question": ["a"], "answer": ["b"]})
    datasets.DatasetDict({"train": rows, "val": rows, "validation": rows}).save_to_disk(tmp_path / "rows")
    summary = prepare(tmp_path / "rows", tmp_path / "out")
    assert summary.samples == {"train": 1, "val": 1, "validation": 1}


def test_an_output_may_be_a_link_to_an_empty_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    prepare(write_sharegpt(tmp_path / "source", 3), tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "elsewhere/.nv-meta").is_dir()


def test_refuses_an_output_that_holds_anything(tmp_path):
    source = write_sharegpt(tmp_path / "source", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists; give a new name or remove it"):
        prepare(source, tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


TOOL = ROOT / "tools/prepare_energon_dataset.py"


def start_tool(*arguments):
    command = [sys.executable, TOOL, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)


def test_nothing_to_write_exits_non_zero_and_leaves_nothing(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"conversations": 1}\n')
    ended = run_program(TOOL, tmp_path / "data.jsonl", tmp_path / "out", "--workers", "1")
    assert ended.returncode == 2
    assert "nothing to write; skipped {'bad_conversation': 1}" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_most_records_skipped_exits_non_zero_and_says_what_helps(tmp_path):
    source = write_sharegpt(tmp_path / "in", 10)
    (tmp_path / "in/images").rename(tmp_path / "images")
    (tmp_path / "in/images").mkdir()
    last = sorted((tmp_path / "images").iterdir())[-1]
    last.rename(tmp_path / "in/images" / last.name)
    ended = run_program(TOOL, source, tmp_path / "out", "--workers", "1")
    assert ended.returncode == 1 and (tmp_path / "out/.nv-meta").is_dir()
    assert "missing_media: 7" in ended.stdout and "--image-root" in ended.stdout
    assert "7 of 10 records were skipped, over --max-skip-share 0.5" in ended.stderr
    detail = json.loads((tmp_path / "out/skipped.jsonl").read_text().splitlines()[0])["detail"]
    assert f"images/0-0.jpg under {tmp_path / 'in'}" in detail
    (tmp_path / "in/data.jsonl").write_text("".join(source.read_text().splitlines(True)[:2]))


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
