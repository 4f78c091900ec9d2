"""Plain WebDataset shards: they are indexed as by `energon prepare`, where they lie or as links, and read."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sqlite3
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from megatron.energon.flavors import BaseWebdatasetFactory
from prepared_shards import add_part
from sources import image_bytes

from megatron_vlm.config import DataConfig
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.load.energon import EnergonSamples
from megatron_vlm.data.on_disk.paths import sources_of
from megatron_vlm.data.prepare import index_shards
from megatron_vlm.data.shard_format import cook_record, read_parts

REPLY = {"role": "assistant", "content": "a"}


def img2dataset(key: str) -> dict[str, bytes]:
    caption = f"caption {key}"
    document = {"caption": caption, "url": "http://a/b.jpg", "key": key, "status": "success", "exif": "{}"}
    return {
        "jpg": image_bytes(int(key[-1])),
        "txt": caption.encode(),
        "json": json.dumps(document).encode(),
    }


def write_shards(folder: Path, count: int, parts=img2dataset) -> Path:
    """Shards of three samples each, and what img2dataset writes beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(count):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for key in (f"{shard:05d}{n:04d}" for n in range(3)):
                for name, content in parts(key).items():
                    add_part(tar, f"{key}.{name}", content)
        (folder / f"{shard:05d}_stats.json").write_text("{}")
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1")
    return folder


def index(*sources, output=None, **options):
    return index_shards(sources, output, progress=False, **options)


def samples_of(folder: Path, split: str = "train", **settings) -> dict[str, tuple]:
    """key -> (problem or trained text, images)"""
    data = DataConfig(train_data_path=str(folder), num_workers=0, **settings)
    samples = EnergonSamples(data, sources_of(str(folder)), SimpleNamespace(decoder=None), split)
    known = {}
    for sample in map(samples.sample, range(len(samples))):
        problem = sample.problem and sample.problem.reason
        known[sample.__key__] = (problem or sample.messages[-1]["content"][0]["text"], sample.imgs)
    return known


def files_in(folder: Path) -> dict[str, tuple]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def expected(shards: int) -> dict[str, tuple]:
    keys = [f"{shard:05d}{n:04d}" for shard in range(shards) for n in range(3)]
    return {key: (f"caption {key}", [image_bytes(int(key[-1]))]) for key in keys}


def test_shards_are_indexed_where_they_are_as_by_energon(tmp_path):
    folder = write_shards(tmp_path / "shards/part", 2).parent
    before = files_in(folder)
    shutil.copytree(folder, tmp_path / "energon")
    names = [f"part/{shard:05d}.tar" for shard in range(2)]
    BaseWebdatasetFactory.prepare_dataset(
        tmp_path / "energon", names, split_parts_ratio=[("train", 1.0)], workers=1
    )
    summary = index(folder)
    assert (summary.samples, summary.shards, summary.notes) == ({"train": 6}, {"train": 2}, [])
    after = files_in(folder)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {
        *(f"{name}.idx" for name in names),
        *(f".nv-meta/{name}" for name in (".info.json", "dataset.yaml", "split.yaml")),
        *(f".nv-meta/index.{name}" for name in ("sqlite", "uuid")),
    }
    for name in (".nv-meta/.info.json", *(f"{name}.idx" for name in names)):
        assert after[name][0] == (tmp_path / "energon" / name).read_bytes()
    for table, count in (("samples", 6), ("sample_parts", 18)):
        ours, energons = (
            sorted(sqlite3.connect(root / ".nv-meta/index.sqlite").execute(f"SELECT * FROM {table}"))
            for root in (folder, tmp_path / "energon")
        )
        assert ours == energons and len(ours) == count
    assert samples_of(folder) == expected(2)
    with pytest.raises(FileExistsError, match="shards/.nv-meta exists"):
        index(folder)


def test_an_index_in_another_folder_leads_to_the_shards_by_links(tmp_path):
    folder = write_shards(tmp_path / "shards", 2)
    before = files_in(folder)
    index(folder, output=tmp_path / "dataset")
    assert files_in(folder) == before
    links = [path for path in (tmp_path / "dataset").iterdir() if path.is_symlink()]
    assert sorted(links) == [tmp_path / f"dataset/{shard:05d}.tar" for shard in range(2)]
    assert all(link.samefile(folder / link.name) for link in links)
    assert samples_of(tmp_path / "dataset") == expected(2)


def test_splits_are_of_whole_shards_and_the_names_decide_which(tmp_path):
    folder = write_shards(tmp_path / "shards", 4)
    (folder / ".hidden.tar").write_bytes(b"left by a file system")
    summary = index(folder / "0000[12]*.tar", folder / "00003.tar", splits={"train": 2, "val": 1})
    assert summary.samples == {"train": 6, "val": 3}
    splits = yaml.safe_load((folder / ".nv-meta/split.yaml").read_text())["split_parts"]
    assert sorted(splits["train"] + splits["val"]) == ["00001.tar", "00002.tar", "00003.tar"]
    assert len(samples_of(folder, "val")) == 3
    alone = index(folder / "00000.tar", output=tmp_path / "one", splits={"train": 9, "val": 1})
    assert alone.shards == {"train": 1, "val": 0}
    index(folder / "00000.tar", output=tmp_path / "held_out", splits={"val": 1})
    assert samples_of(tmp_path / "held_out", "val") == expected(1)


def test_all_bad_shards_are_named_and_nothing_is_indexed(tmp_path):
    folder = write_shards(tmp_path / "shards", 2)
    good = (folder / "00001.tar").read_bytes()
    bad = {
        "cut_in_a_file": (good[:700], r"is cut short, damaged or compressed \(unexpected end of data\)"),
        "cut_in_a_header": (good[:1800], "it is damaged or cut short after the sample 000010000"),
        "empty": (b"", "is an empty file"),
        "gzip": (gzip.compress(good), r"is cut short, damaged or compressed"),
        "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        "no_names": (bytes(10240), r"it holds no file whose name is KEY\.PART"),
    }
    for name, (content, _) in bad.items():
        (folder / f"{name}.tar").write_bytes(content)
    os.mkfifo(folder / "pipe.tar")
    with pytest.raises(ValueError, match="7 of 9 shards of .*/shards cannot be read; restore") as caught:
        index(folder)
    lines = str(caught.value).splitlines()
    for name, (_, reason) in bad.items():
        [line] = [line for line in lines if line.startswith(f"{name}.tar: ")]
        assert re.search(reason, line), line
    assert "pipe.tar is a folder, a pipe or a device" in str(caught.value)
    assert not [path for path in folder.iterdir() if "nv-meta" in path.name]
    assert index(folder / "0*.tar").samples == {"train": 6}


def test_a_key_that_comes_twice_is_named(tmp_path):
    folder = write_shards(tmp_path / "shards", 1)
    shutil.copy(folder / "00000.tar", folder / "copy.tar")
    with pytest.raises(ValueError, match=r"(copy|00000)\.tar: the key 000000000 comes twice"):
        index(folder)


@pytest.mark.parametrize(
    "parts, message",
    [
        (
            lambda key: {"jpg": b"x", "cls": b"3"},
            r"no part json among \['cls', 'jpg'\]; .*data\.columns\.NAME=PART",
        ),
        (lambda key: {"jpg": b"x", "json": b'{"url": "a"}'}, r"no turns: .* data\.cooker=FILE\.py:NAME"),
    ],
)
def test_samples_that_make_no_record_are_named_with_the_way_out(tmp_path, parts, message):
    [note] = index(write_shards(tmp_path / "shards", 2, parts)).notes
    assert re.search("^train: 6 of 6 samples looked at cannot be read: " + message, note)


def test_columns_read_what_was_named(tmp_path):
    def parts(key):
        return {"jpg": image_bytes(int(key[-1])), "note.txt": f"caption {key}".encode()}

    folder = write_shards(tmp_path / "shards", 2, parts)
    assert "no part json among ['jpg', 'note.txt']" in index(folder).notes[0]
    assert samples_of(folder, columns={"images": "jpg", "caption": "note.txt"}) == expected(2)


def image_parts(*names):
    return [*({"type": "image", "image": name} for name in names), {"type": "text", "text": "q"}]


REVERSED = ["img2.jpg", "img1.jpg"]


@pytest.mark.parametrize(
    ("document", "trained"),
    [
        ({"image": REVERSED, "question": "q", "answer": "a"}, REVERSED),
        ({"images": REVERSED, "question": "q", "answer": "a"}, REVERSED),
        ({"image": ["o/2.jpg", "o/1.jpg"], "question": "q", "answer": "a"}, REVERSED[::-1]),  # once theirs
        ({"messages": [{"role": "user", "content": image_parts(*REVERSED[::-1])}, REPLY]}, REVERSED[::-1]),
        ({"messages": [{"role": "user", "content": image_parts(*REVERSED)}, REPLY]}, None),
        ({"messages": [{"role": "user", "content": "q", "images": REVERSED}, REPLY]}, None),
        ({"question": "<img>img2.jpg</img><img>img1.jpg</img>", "answer": "a"}, None),
    ],
)
def test_images_of_a_shard_have_the_order_that_its_records_say(document, trained):
    files = {"img1.jpg": image_bytes(1), "img2.jpg": image_bytes(2)}
    sample = cook_record(
        {"__key__": "a", "__restore_key__": (), "json": json.dumps(document).encode()} | files
    )
    assert sample.imgs == (trained and [files[name] for name in trained])
    assert trained or "name others, or in another order" in str(sample.problem)


def test_a_part_that_is_not_read_is_named():
    parts = {"json": b'{"question": "q", "answer": "a"}', "wav": b"", "txt": b"words", "jpg": image_bytes(1)}
    assert parse_record(read_parts(parts)).unread == {("record", "part txt"), ("record", "part wav")}


def test_a_strangers_shard_leads_nowhere_and_runs_nothing(tmp_path):
    (tmp_path / "secret.jpg").write_bytes(image_bytes(1))
    (tmp_path / "shards").mkdir()
    evil = f"cos\nsystem\n(S'touch {tmp_path}/executed'\ntR.".encode()
    with tarfile.open(tmp_path / "shards/a.tar", "w") as tar:
        link = tarfile.TarInfo("../../a.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.jpg")
        tar.addfile(link)
        add_part(tar, "../../a.json", b'{"caption": "a"}')
        add_part(tar, "b.jpgs", evil)
        add_part(tar, "b.json", b'[{"role": "user", "content": "?"}]')
    index(tmp_path / "shards")
    samples = samples_of(tmp_path / "shards")
    assert samples == {"../../a": ("missing_media", None), "b": ("unsafe_pickle", None)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.jpg", "shards"]


def test_a_name_that_energon_would_expand_is_refused(tmp_path):
    folder = write_shards(tmp_path / "shards", 1)
    (folder / "00000.tar").rename(folder / "{0..1000000000}.tar")
    with pytest.raises(ValueError, match=r"1000000000}.tar: to Energon this is a pattern; rename it"):
        index(folder)
