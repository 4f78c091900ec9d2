"""Every source that the Hugging Face loaders read: over an epoch, trained and dropped are the dataset."""

import copy
import itertools
import json
import os
import re
import sys
from collections import Counter

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from loaders import encoder_of, open_loader, take
from pairs import pairs
from places import ROOT
from samples import clean, read_record, sample_of
from sources import image_bytes, write_hf_folder, write_sharegpt
from transformers import AutoConfig, AutoProcessor
from written_sources import (
    BAD,
    GOOD,
    SOURCES,
    in_lmdb,
    json_lines,
    numbers_of,
    parquet,
    streamed,
    streamed_shards,
    write_meta,
)

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.chatml.columns import Columns
from megatron_vlm.data.chatml.limits import limits_of_media
from megatron_vlm.data.chatml.record import load_media, parse_record
from megatron_vlm.data.chatml.sample import place_media
from megatron_vlm.data.chatml.turns import is_trained
from megatron_vlm.data.encode.encoder import PackingVLMTaskEncoder
from megatron_vlm.data.encode.questions import references_of
from megatron_vlm.data.load.sampler import PackingSampler
from megatron_vlm.data.media.files import read_media
from megatron_vlm.data.on_disk.fields import FIELDS
from megatron_vlm.data.on_disk.paths import DataSource
from megatron_vlm.data.records import hub
from megatron_vlm.data.records.blends import blend_tables
from megatron_vlm.data.records.tables import open_table
from megatron_vlm.data.records.unread import first_notes, sample_sources
from megatron_vlm.extras.evaluate.metrics import Judged, anls
from megatron_vlm.models.families import load
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint

BUFFER = 4
SEED = 3


def turn(role, content):
    return {"role": role, "content": content}


PACKED = ["none", "stream", "global"]
UNKNOWN = [(write, "global") for write in (streamed, streamed_shards)]  # a stream has no lengths


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Settings of a source by its function, written once."""
    written = {}

    def settings(write):
        if write not in written:
            written[write] = write(tmp_path_factory.mktemp(write.__name__))
        return written[write]

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    return settings


def opened(settings, processor, rank=0, world_size=1, num_workers=0, packing="none"):
    """A loader with its encoder."""
    encoder = encoder_of(processor, 256 if packing == "none" else 100, packing)
    path = settings["train_data_path"]
    more = {"lengths_cache": str(path.parent / "lengths"), "num_workers": num_workers} | settings
    more |= {"packing_buffer_size": BUFFER, "max_drop_share": 1.0, "packing": packing}
    del more["train_data_path"]
    place = {"rank": rank, "world_size": world_size}
    return open_loader("hf", path, encoder, seed=SEED, **place, **more), encoder


def take_epoch(loader):
    """The batches of the first epoch; the state after each says which epoch it is of."""
    batches, sampler = [], loader._sampler
    if isinstance(sampler, PackingSampler):  # its buffers end with the epoch, and begin in it
        places = (place for place, _ in copy.copy(sampler.sampler))
        *_, end = itertools.takewhile(lambda place: place[0] == 0, places)
        while loader.state_dict()["place"] != [*end, 0]:
            batches.append(next(loader))
        return batches
    while loader.state_dict()["place"][0] == 0:
        batches.append(next(loader))
    return batches[:-1]


@pytest.mark.parametrize(
    "write, packing, world_size, num_workers",
    list(pairs(SOURCES, PACKED, [(1, 0), (3, 3), (1, 3), (3, 0), (1, 1), (3, 1)], UNKNOWN)),
)
def test_trained_and_dropped_are_the_dataset(source, processor, write, packing, world_size, num_workers):
    trained, lost = Counter(), Counter()
    for rank in range(world_size):
        loader, encoder = opened(source(write), processor, rank, world_size, num_workers, packing)
        batches = take_epoch(loader)
        trained += numbers_of(batches, processor)
        loader.close()
        lost.update(example["key"] for example in encoder.drops.examples())
    assert trained == GOOD
    assert len(lost) == len(BAD)  # keys; workers read ahead, into the next epoch


@pytest.mark.parametrize("write, packing, num_workers", list(pairs(SOURCES, PACKED, [(0,), (3,)], UNKNOWN)))
def test_every_source_resumes_exactly(source, processor, write, packing, num_workers):
    """At the beginning, amid an epoch, at its end and in the next; saved again at once, and after a batch."""

    def open_rank(workers):
        return opened(source(write), processor, 1, 3, workers, packing)[0]

    reference, states, expected = open_rank(num_workers), [], []
    for _ in range(20):
        states.append(json.dumps(reference.state_dict()))
        expected += take(reference, 1)
    reference.close()
    epochs = [json.loads(state)["place"][0] for state in states]
    end = epochs.index(1)
    assert 3 < end < 13
    for at in (0, 2, end - 1, end, end + 2):
        state, resumed = states[at], []
        for count, workers in ((0, 0), (1, num_workers), (3, 0)):
            loader = open_rank(workers)
            loader.load_state_dict(json.loads(state))
            resumed += take(loader, count)
            state = json.dumps(loader.state_dict())
            loader.close()
        assert resumed == expected[at : at + 4]


# -- meta files


def read_epochs(settings, processor, epochs, world_size=1):
    """How often each number came, in each epoch, over all ranks."""
    counts = [Counter() for _ in range(epochs)]
    for rank in range(world_size):
        loader, _ = opened(settings, processor, rank, world_size)
        while True:
            batch = next(loader)
            if (epoch := loader.state_dict()["place"][0]) == epochs:
                break
            counts[epoch] += numbers_of([batch], processor)
    return counts


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_meta_file_gives_each_dataset_its_share_and_every_row_its_turn(tmp_path, processor, world_size):
    """Shares 0.4, 1 and 2.5 over five epochs: 4, 10 and 25 rows each time, all rows as often."""
    settings = write_meta(
        tmp_path, a={"sample_ratio": 0.4}, b={}, c={"sample_ratio": 2.5}, d={"num_samples": 3}
    )
    epochs = read_epochs(settings, processor, 5, world_size)
    for counts in epochs:
        per_dataset = Counter()
        for number, count in counts.items():
            per_dataset[number // 10] += count
        assert per_dataset == {0: 4, 1: 10, 2: 25, 3: 3}
    assert epochs[0] != epochs[1]
    total = sum(epochs, Counter())
    assert [total[number] for number in range(20)] == [2] * 10 + [5] * 10
    assert {total[number] for number in range(20, 30)} == {12, 13}
    assert {total[number] for number in range(30, 40)} == {1, 2}


def test_a_meta_file_is_packed_globally_by_epoch(tmp_path, processor):
    settings = write_meta(tmp_path, a={"sample_ratio": 0.5}, b={"sample_ratio": 2}) | {
        "lengths_cache": str(tmp_path / "lengths")
    }
    loader, _ = opened(settings, processor, packing="global")
    keys = Counter(key for batch in take_epoch(loader) for row in batch["__key__"] for key in row)
    assert sum(count for key, count in keys.items() if key.startswith("a-")) == 5
    assert all(keys[f"b-{row:09d}"] == 2 for row in range(10))


def test_some_datasets_of_a_meta_file(tmp_path, processor):
    settings = write_meta(tmp_path, a={}, b={}, c={}) | {"datasets": ["c", "a"]}
    assert read_epochs(settings, processor, 1) == [Counter([*range(10), *range(20, 30)])]


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"file_name": "none.jsonl"}, "dataset a: .*none.jsonl does not exist"),
        ({"sample_ratio": -1}, "dataset a: sample_ratio is -1; give one of .*, above 0"),
        ({"sample_ratio": "half"}, "dataset a: sample_ratio is 'half'; give one of .*, above 0"),
        ({"sample_ratio": 1, "num_samples": 2}, "sample_ratio is 1; give one of "),
        ({"num_samples": 0.5}, "dataset a: num_samples 0.5 is no whole number; a share is a sample_ratio"),
        ({"colums": {}}, "colums is no setting that is read; did you mean columns"),
        ({"columns": {"pictures": "images"}}, "dataset a: data.columns: pictures is no column that is read"),
        ({"columns": {"images": "imgs"}}, "a.jsonl has no column imgs to read as images"),
        ({"tags": {"user": "U"}}, "dataset a: tags: user is no tag"),
    ],
)
def test_a_bad_entry_of_a_meta_file_is_named(tmp_path, processor, entry, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        opened(write_meta(tmp_path, a=entry), processor)


# -- media


@pytest.mark.parametrize(
    "name, detail",
    [
        ("../outside.jpg", "outside of"),
        ("/etc/hostname", "outside of"),
        ("../outside.lmdb::a", "outside of"),
        ("link.jpg", "outside of"),
        ("images.lmdb::none", "has no key 'none'"),
        ("images.lmdb::", "images.lmdb::"),
        ("none.lmdb::a", "there is no database"),
        ("junk.lmdb::a", "junk.lmdb::a"),
        ("https://example.org/a.jpg", "is an address"),
        ("data:image/jpeg;base64,%%%", "data:image/jpeg"),
        ("a\0b", "null"),
    ],
)
def test_media_that_cannot_be_had_are_a_bad_record(tmp_path, name, detail):
    root = tmp_path / "root"
    in_lmdb(root)
    for outside in ("outside.jpg", "root/junk.lmdb"):
        (tmp_path / outside).write_bytes(image_bytes(1))
    (root / "link.jpg").symlink_to(tmp_path / "outside.jpg")
    with pytest.raises(BadSample, match="missing_media") as bad:
        read_media(name, root)
    assert detail in bad.value.detail


def test_an_lmdb_that_was_cut_short_is_refused_and_not_mapped(tmp_path):
    in_lmdb(tmp_path)
    file = tmp_path / "images.lmdb/data.mdb"
    size = file.stat().st_size
    os.truncate(file, size // 2)
    with pytest.raises(BadSample, match=f"data.mdb is cut short, {size // 2} of {size} bytes; copy it again"):
        read_media("images.lmdb::1-0.jpg", tmp_path)


def test_lmdb_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    in_lmdb(tmp_path)
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ImportError, match="megatron-vlm\\[lmdb\\]"):
        read_media("images.lmdb::1-0.jpg", tmp_path)


def test_media_lie_under_media_dir(tmp_path, processor):
    settings = json_lines(tmp_path / "source")
    moved = tmp_path / "elsewhere/data.jsonl"
    moved.parent.mkdir()
    settings["train_data_path"].rename(moved)
    loader, _ = opened({"train_data_path": moved, "media_dir": str(tmp_path / "source")}, processor)
    assert numbers_of(take_epoch(loader), processor) == GOOD


# -- layouts


@pytest.mark.parametrize(
    "stored, turns",
    [
        ({"question": "q", "answer": "a"}, ["q", "a"]),
        ({"instruction": "q", "input": "x", "output": "a"}, ["q\nx", "a"]),
        ({"prompt": "q", "completion": "a"}, ["q", "a"]),
        ({"prompt": "q", "response": "a", "history": [["p", "b"]]}, ["p", "b", "q", "a"]),
        ({"texts": [{"user": "q", "assistant": "a"}, {"user": "r", "assistant": "b"}]}, ["q", "a", "r", "b"]),
        ({"image": "i.jpg", "caption": "a"}, ["", "a"]),
        ({"query": "q", "response": "a", "history": [["p", "b"]]}, ["p", "b", "q", "a"]),
        ({"prompt": [turn("user", "q")], "completion": [turn("assistant", "a")]}, ["q", "a"]),
        ({"prompt": [turn("user", "q")], "completion": "a"}, ["q", "a"]),
        ({"prompt": [turn("user", "q")], "reward_model": {"ground_truth": "a"}}, ["q", "a"]),
        ({"question": "q", "answer": 7}, ["q", "7"]),
        ({"question": "q", "answer": True}, ["q", "True"]),
        ({"question": "q", "answer": float("nan"), "output": "a"}, ["q", "a"]),
        ({"question": "q", "answers": ["b", "a", "a"]}, ["q", "a"]),
    ],
)
def test_plain_columns_become_turns(stored, turns):
    messages = parse_record(Columns()(stored)).messages
    assert [turn["content"][0]["text"] for turn in messages] == turns
    assert [turn["role"] for turn in messages] == ["user", "assistant"] * (len(turns) // 2)


def test_the_records_that_the_documentation_shows_are_read():
    page = (ROOT / "docs/data.md").read_text()
    shown = page.partition("## Records")[2].partition("\n\n    ")[2].partition("\n\n")[0]
    shown, decoder, records = re.sub(" # .*", "", shown).strip(), json.JSONDecoder(), []
    while shown:
        record, end = decoder.raw_decode(shown)
        records.append(record)
        shown = shown[end:].strip()
    assert len(records) == 5
    for record in map(Columns(), records):
        messages = parse_record(parse_record(record).stored()).messages
        assert "A cat." in json.dumps(messages)


def test_pictures_in_a_column_that_is_not_read_are_told(tmp_path):
    """But only where records have no others."""
    turns = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It."}]}

    def told(name: str, rows: list[dict], **columns: str) -> list[str]:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(turns | row) + "\n" for row in rows))
        notes = first_notes(sample_sources(open_table(path, columns=Columns(columns))))
        return [note for note in notes if "not read in a record" not in note]

    [said] = told("a", [{"id": 1}, {"img": ["a.JPG", "b.png"], "source": "web"}])
    assert said.endswith("img, which looks like them, is not read; data.columns.images=img reads it")
    [said] = told("b", [{"clip": "a.mp4"}])
    assert "data.columns.videos=clip" in said
    assert told("c", [{"img": "a.jpg"}], images="img") == []
    assert told("d", [{"img": "a.jpg", "image": "b.jpg"}]) == told("e", [{"name": "jpg"}, {"of": []}]) == []
    parts = [{"type": "image_url", "image_url": {"url": "a.jpg"}}, {"type": "text", "text": "What?"}]
    question = {"messages": [{"role": "user", "content": parts}, turns["messages"][1]]}
    assert told("f", [question | {"thumbnail": "a.jpg"}]) == []
    twice = {"messages": [{"role": "user", "content": [parts[0] | {"path": "b.jpg"}]}, turns["messages"][1]]}
    assert told("g", [twice | {"thumbnail": "a.jpg"}]) == []  # what is wrong with it is said when it is read
    rows = {"messages": [turns["messages"]], "picture": [{"path": None, "bytes": image_bytes(1)}]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    names = "a.jsonl", "rows.parquet"
    two = blend_tables({name: open_table(tmp_path / name) for name in names}, list(map(DataSource, names)))
    assert sum("and picture, which" in said for said in first_notes(sample_sources(two))) == 1


def test_a_mapped_column_hides_others_of_its_kind():
    stored = {"messages": ["not these"], "chat": ["turns"], "image": "thumb.jpg", "pictures": ["p.jpg"]}
    columns = Columns({"conversations": "chat", "images": "pictures"})
    assert columns(stored) == {"conversations": ["turns"], "images": ["p.jpg"]}


@pytest.mark.parametrize(
    "stored",
    [
        7,
        {"question": "q"},
        {"question": "q", "answer": ["a", "b"]},
        {"question": "q", "answer": [10, 20, 30, 40]},
        {"image": "i.jpg", "text": "a"},
        {"caption": "a"},
        {"texts": ["a", None], "images": ["i.jpg"]},
        {"texts": ["a", 7]},
        {"prompt": "q", "response": "a", "history": "none"},
    ],
)
def test_a_record_in_no_known_layout_is_bad(stored):
    with pytest.raises(BadSample):
        parse_record(Columns()(stored))


@pytest.mark.parametrize(
    ("stored", "names"),
    [
        ({"question": "q", "prompt": "p", "answer": "a"}, "question and prompt"),
        ({"question": "q", "answer": "a", "output": "b"}, "answer and output"),
        ({"question": "q", "query": "x", "input": "y", "answer": "a"}, "query and input"),
        (
            {"messages": [{"role": "user"}], "conversations": [{"role": "assistant"}]},
            "conversations and messages",
        ),
        (
            {"messages": [{"role": "user", "content": "q"}], "images": ["a.jpg"], "image": "b.jpg"},
            "images and image",
        ),
        (
            {"messages": [{"role": "user", "content": "q"}], "videos": ["a.mp4", "b.mp4"], "video": "a.mp4"},
            "videos and video",
        ),
    ],
)
def test_two_columns_of_one_field_that_differ_are_bad(stored, names):
    with pytest.raises(BadSample, match=f"{names} are two names of one field, and differ; leave one out"):
        parse_record(Columns()(stored))
    first, second = names.split(" and ")
    parse_record(stored | {second: stored[first]})
    parse_record(stored | {second: None})
    chosen = {name: name for name in stored if name != second}
    assert second not in Columns(chosen)(stored) and first in Columns(chosen)(stored)


@pytest.mark.parametrize(
    ("media", "named"),
    [
        ({"images": '["a.png", "b.png"]'}, ["a.png", "b.png"]),
        ({"image": {"<image_00>": "a.png", "<image_01>": "b.png"}}, ["a.png", "b.png"]),
        ({"video": ["1.jpg", "2.jpg"]}, [["1.jpg", "2.jpg"]]),
        ({"videos": [["1.jpg", "2.jpg"]]}, [["1.jpg", "2.jpg"]]),
        ({"videos": ["a.mp4", "b.mp4"]}, ["a.mp4", "b.mp4"]),
    ],
)
def test_ways_to_name_media(media, named):
    kind = "video" if next(iter(media)).startswith("video") else "image"
    assert parse_record({"question": "q", "answer": "a"} | media).media[kind] == named


def test_numbered_images_are_in_the_order_of_their_numbers():
    images = {f"<image_{number}>": f"{number}.png" for number in (11, 2, 0)}
    record = {"image": images, "question": "q", "answer": "a"}
    assert parse_record(record).media["image"] == ["0.png", "2.png", "11.png"]


def test_a_caption_beside_a_question_and_its_answer_is_not_trained():
    record = {"image": "i.jpg", "caption": "c", "question": "q", "answer": "a"}
    assert parse_record(record).messages[1]["content"] == [{"type": "text", "text": "a"}]


def test_a_box_beside_a_question_and_its_answer_asks_nothing():
    record = {"image": "i.jpg", "bbox_xyxy": [1, 2, 3, 4], "phrase": "car", "question": "q", "answer": "a"}
    assert Columns()(record) == record


def test_turns_in_cells_of_csv_are_turns():
    prompt = json.dumps([turn("user", "q")])
    record = {"prompt": prompt, "chosen": json.dumps([turn("assistant", "a")]), "rejected": "b"}
    conversation = parse_record(record)
    assert [message["content"][0]["text"] for message in conversation.messages] == ["q", "a"]
    assert [message["content"][0]["text"] for message in conversation.rejected] == ["q", "b"]


def test_a_huge_limit_is_a_drop():
    with pytest.raises(BadSample, match="max_pixels"):
        clean({"question": "q", "answer": "a", "max_pixels": 10**400}, images=1)


def test_a_text_alone_is_a_document():
    [message] = parse_record({"text": "Once."}).messages
    assert message == {"role": "document", "content": [{"type": "text", "text": "Once."}]}


def test_a_mapped_question_leaves_the_answer_to_be_found():
    record = {"problem": "q", "prompt": "p", "answer": "a", "messages": [turn("user", "m")]}
    assert Columns({"question": "problem"})(record) == {"question": "q", "answer": "a"}
    assert Columns({"messages": "messages"})(record) == {"messages": [turn("user", "m")], "problem": "q"}


def test_keys_that_nothing_reads_are_kept_for_a_line():
    part = {"type": "image", "image": "a.png", "detail": "low"}
    record = {
        "source": 7,
        "messages": [{"role": "user", "content": [part], "mood": "odd"}, turn("assistant", "a")],
    }
    assert parse_record(record).unread == {("record", "source"), ("turn", "mood"), ("part", "detail")}


def test_the_table_of_formats():
    rows = re.findall(
        r"^\| [^|]+ \| `(\{.*\})` \| ([^|]*)\| ([^|]+) \|$", (ROOT / "docs/data.md").read_text(), re.M
    )
    assert len(rows) > 12
    for example, media, trained in rows:
        conversation = parse_record(json.loads(example))
        named = re.findall(r"\w+\.jpg", json.dumps(conversation.media))
        assert named == media.strip().split(", ") if media.strip() else not named, example
        counts = [len(conversation.media[kind]) for kind in ("image", "video")]
        messages = [message for message in place_media(conversation.messages, *counts) if is_trained(message)]
        texts = [part["text"] for message in messages for part in message["content"] if "text" in part]
        assert texts == trained.split(", "), example


def test_two_forms_of_one_conversation_are_one():
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    openai = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    record = Columns()({"conversations": sharegpt, "messages": openai, "images": ["a"], "image": "a"})
    assert parse_record(record).stored() == parse_record(openai).stored()


def test_a_part_names_one_image(tmp_path):
    part = {"type": "image_url", "image_url": {"url": "a.jpg"}, "url": "b.jpg"}
    with pytest.raises(BadSample, match="image_url and url are two names"):
        parse_record({"messages": [{"role": "user", "content": [part]}]})


@pytest.mark.parametrize(
    "images, first, second",
    [
        (["b.jpg", "a.jpg"], {"image": "a.jpg"}, {"image": "b.jpg"}),
        (["x/a.jpg", {"path": "c.jpg"}], {"image": "a.jpg"}, {"image": "b.jpg"}),
        ([{"bytes": b"1"}, {"bytes": b"2"}], {"index": 1}, {"index": 0}),
    ],
)
def test_images_in_another_order_than_the_parts_that_name_them_are_bad(images, first, second):
    def row(*parts):
        return {
            "images": images,
            "messages": [{"role": "user", "content": [{"type": "image"} | p for p in parts]}],
        }

    with pytest.raises(BadSample, match="its images and its parts name others, or in another order"):
        parse_record(row(first, second))
    assert parse_record(row(first | {"image": None, "index": 0}, {})).media["image"] == images


def test_turns_in_json_may_have_parts_that_name_media():
    turns = [{"role": "user", "content": [{"type": "image", "image": "a.jpg"}]}]
    assert parse_record({"messages": json.dumps(turns)}) == parse_record({"messages": turns})
    assert parse_record({"messages": turns}).media["image"] == ["a.jpg"]


def test_parts_name_videos_as_qwen_writes_them(tmp_path):
    files = {"a.mp4": b"film", "1.jpg": b"one", "2.jpg": b"two"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    question = {"type": "text", "text": "What?"}
    parts = [
        {"type": "video", "video": "a.mp4", "max_frames": 4, "fps": 1.0},
        {"type": "video", "video": ["1.jpg", "2.jpg"], "fps": 2},
        {"type": "video_url", "video_url": {"url": "a.mp4"}},
    ]
    turns = [{"role": "user", "content": [*parts, question]}, {"role": "assistant", "content": "A cat."}]
    for row in map(Columns(), ({"messages": turns}, turns)):
        conversation, images, videos = read_record(row, tmp_path)
        assert videos == [b"film", {"frames": [b"one", b"two"], "fps": 2}, b"film"]
        assert images == []
        limits = {"max_frames": 4, "fps": 1.0}
        places = [{"type": "video"} | limits, {"type": "video"}, {"type": "video"}, question]
        assert conversation["messages"][0]["content"] == places
    assert read_record({"messages": turns, "videos": ["a.mp4"]}, tmp_path)[2] == [b"film"]


def random_value(rng, depth=0):
    """JSON of any shape, made of the words that records are made of."""
    kind = rng.integers(9 if depth < 3 else 5)
    if kind < 5:
        return [None, 7, "text", "../a.jpg", "images.lmdb::a"][kind]
    if kind < 7:
        return [random_value(rng, depth + 1) for _ in range(rng.integers(3))]
    words = [
        *FIELDS,
        "role",
        "from",
        "content",
        "value",
        "type",
        "image_url",
        "video",
        "url",
        "user",
        "assistant",
    ]
    return {str(rng.choice(words)): random_value(rng, depth + 1) for _ in range(rng.integers(4))}


def test_no_record_whatever_its_shape_ends_the_run(tmp_path):
    """Of 3000 made-up records each is read or bad; some of them are read."""
    rng, outcomes = np.random.default_rng(0), Counter()
    tagged = Columns({"messages": "messages"}, {"role_tag": "role", "user_tag": "user"})
    for number in range(3000):
        record = random_value(rng)
        try:
            record = (tagged if number % 2 else Columns())(record)
            conversation, _, _ = read_record(record, tmp_path)
            json.dumps(conversation)
            outcomes["read"] += 1
        except BadSample as bad:
            outcomes[bad.reason] += 1
    assert set(outcomes) >= {"read", "bad_conversation", "missing_media"}


def test_a_damaged_array_names_the_place(tmp_path, processor):
    path = tmp_path / "array.json"
    path.write_text('[{"messages": []},\n {"messages": ]}]')
    with pytest.raises(ValueError, match=r"array.json: cannot be read as records \(.*line 2"):
        opened({"train_data_path": path}, processor)


def test_records_of_an_array_are_found_whatever_their_text(tmp_path):
    rows = [{"question": text, "answer": "a"} for text in ("ä€😀", "],[{", '\\"', "", "\u2028")]
    for name, text in (
        ("a", json.dumps(rows)),
        ("b", "\ufeff " + json.dumps(rows, ensure_ascii=False, indent=2)),
    ):
        (tmp_path / f"{name}.json").write_text(text)
        table = open_table(tmp_path / f"{name}.json")
        assert [table.record(index)[0]["question"] for index in range(len(table))] == [
            row["question"] for row in rows
        ]


def test_a_file_that_is_rewritten_while_it_is_read_is_named(tmp_path, processor):
    """Also where each row stays JSON; a file that only takes its name is another file."""
    path = json_lines(tmp_path)["train_data_path"]
    loader, _ = opened({"train_data_path": path}, processor)
    next(loader)
    (tmp_path / "other").write_text("{}\n")
    (tmp_path / "other").replace(path)
    next(loader)

    path = json_lines(tmp_path)["train_data_path"]
    loader, _ = opened({"train_data_path": path}, processor)
    next(loader)
    path.write_text(path.read_text().replace("number", "Number"))
    with pytest.raises(RuntimeError, match="data.jsonl: was changed while it was read; start again"):
        next(loader)


# -- streams


def test_a_stream_that_got_shorter_is_not_resumed(tmp_path, processor, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    settings = parquet(tmp_path, shards=1) | {"streaming": True, "shuffle_buffer_size": 4}
    loader, _ = opened(settings, processor)
    take(loader, 18)
    state = loader.state_dict()
    file = tmp_path / "parquet/train-0.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(0, 9), file)
    loader, _ = opened(settings, processor)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="has 9 rows, the state continues after"):
        next(loader)


def test_what_lies_on_disk_is_not_streamed(tmp_path, processor):
    with pytest.raises(ValueError, match="is read where it lies; drop data.streaming"):
        opened(json_lines(tmp_path / "a") | {"streaming": True}, processor)
    rows = write_hf_folder(tmp_path / "rows", write_sharegpt(tmp_path / "b", 3))
    with pytest.raises(ValueError, match="is read where it lies"):
        opened({"train_data_path": rows, "streaming": True}, processor)


def test_a_stream_that_ends_in_a_damaged_file_names_it(tmp_path, processor, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    settings = parquet(tmp_path, shards=2) | {"streaming": True, "shuffle_buffer_size": 4}
    file = tmp_path / "parquet/train-1.parquet"
    file.write_bytes(file.read_bytes()[:-9])
    loader, _ = opened(settings, processor)
    with pytest.raises(ValueError, match="train-1.parquet: cannot be read .*; restore the file"):
        take(loader, 100)
    file.write_bytes(b"<!doctype html>")
    with pytest.raises(ValueError, match="train-1.parquet: is an HTML or XML page; download"):
        take(opened(settings, processor)[0], 100)


def test_a_stream_without_rows_is_named(tmp_path, processor):
    table = pyarrow.table({"messages": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="none.parquet: has no rows; take it out"):
        opened({"train_data_path": tmp_path / "none.parquet", "streaming": True}, processor)


# -- documents


def test_all_text_of_a_document_is_trained_and_no_image_token(tmp_path, processor):
    """Against a count by hand: the text's own tokens and the end, and neither BOS nor images."""
    (tmp_path / "a.jpg").write_bytes(image_bytes(1))
    row = {"texts": ["the cat", None, "a dog", "the chart"], "images": [None, "a.jpg", None, None]}
    (tmp_path / "documents.jsonl").write_text(json.dumps(row))
    (batch,) = [next(opened({"train_data_path": tmp_path / "documents.jsonl"}, processor)[0])]
    tokenizer, [ids], [labels] = processor.tokenizer, batch["input_ids"], batch["labels"]
    assert ids[0] == tokenizer.bos_token_id and (ids == tokenizer.bos_token_id).sum() == 1
    assert ids[-1] == tokenizer.eos_token_id
    images = (ids == tokenizer.image_token_id).sum()
    assert images == processor.image_seq_length
    trained = labels[labels != -100]
    assert tokenizer.image_token_id not in trained.tolist()
    assert tokenizer.decode(trained) == "the cata dog\n\nthe chart" + tokenizer.eos_token
    assert tokenizer.decode(ids, skip_special_tokens=False).count("the cat") == 1


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_document_is_measured_and_placed_in_every_family(tmp_path, family):
    """Ends of the text stick to images as they may; the measured lengths are those of the encoding."""
    path = build_tiny_checkpoint(family, tmp_path / "tiny")
    processor = AutoProcessor.from_pretrained(path)
    (tmp_path / "a.jpg").write_bytes(image_bytes(1))
    texts = ["\nthe cat\n", None, None, " sits on", "", "<image> a table\n"]
    record = Columns()({"texts": texts, "images": [None, "a.jpg", "a.jpg", None, "a.jpg", None]})
    talk, images, _ = read_record(record, tmp_path)
    sample = sample_of(talk, images, key="document")
    needs = load(family)(AutoConfig.from_pretrained(path)).data_needs
    encoder = PackingVLMTaskEncoder(processor, DataConfig(seq_length=512), needs)
    encoded = encoder.postencode_sample(encoder.preencode_sample(sample))  # raises where lengths differ
    trained = encoded.labels[encoded.labels != -100]
    written = processor.tokenizer.decode(trained)
    eos = processor.tokenizer.eos_token
    assert written.endswith("a table\n" + eos)
    assert [word in written for word in ("the cat", " sits on")] == [True, True]
    assert processor.tokenizer.convert_tokens_to_ids(processor.image_token) not in trained.tolist()


def test_rows_of_another_kind_in_a_folder_are_not_left_out(tmp_path):
    """`datasets` reads the kind of which there are more files."""
    rows = [{"question": f"q{number}", "answer": "a"} for number in range(4)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(hub.open_rows(tmp_path)) == 8
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(
        ValueError, match="c.parquet: would be left out.*2 other files.*as a list, or move it"
    ):
        hub.open_rows(tmp_path)
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: '*.jsonl'\n---\n"
    )
    assert len(hub.open_rows(tmp_path)) == 8


@pytest.mark.parametrize(
    ("answers", "reply", "references"),
    [
        ({"answers": ["cat", "a cat", "cat"]}, "cat", ["cat", "a cat", "cat"]),
        ({"answers": [{"answer": "cat", "answer_confidence": "yes"}] * 2}, "cat", ["cat", "cat"]),
        ({"answer": "cat", "answers": ["a cat", "cat", "a cat"]}, "cat", ["a cat", "cat", "a cat"]),
        ({"answers": [7, 8.5]}, "7", ["7", "8.5"]),
    ],
)
def test_evaluation_compares_with_all_answers(answers, reply, references):
    """Also after they were stored in a shard."""
    conversation = parse_record({"question": "What?", "image": "a.jpg"} | answers)
    assert conversation.messages[-1]["content"] == [{"type": "text", "text": reply}]
    for message in (conversation.messages[-1], parse_record(conversation.stored()).messages[-1]):
        assert references_of(message) == references
    assert all(anls(Judged("", answer, references, None)) == 1 for answer in references)


@pytest.mark.parametrize(
    ("field", "entry"),
    [
        ("images", {"image_url": {"url": "1-0.jpg"}}),
        ("images", {"image_url": "1-0.jpg"}),
        ("images", {"type": "image", "image": "1-0.jpg"}),
        ("image", "[1] cat.jpg"),
        ("videos", {"video": ["1-0.jpg", "1-0.jpg"], "fps": 2}),
        ("videos", {"type": "video_url", "video_url": {"url": "1-0.jpg"}}),
    ],
)
def test_entries_of_media_as_parts_are_written(tmp_path, field, entry):
    for name in ("1-0.jpg", "[1] cat.jpg"):
        (tmp_path / name).write_bytes(image_bytes(1))
    record = {"messages": [turn("user", "q"), turn("assistant", "a")], field: entry}
    conversation = parse_record(record if isinstance(entry, str) else record | {field: [entry]})
    images, videos = load_media(conversation, tmp_path)
    frames = {"frames": [image_bytes(1)] * 2, "fps": 2}
    assert images == [image_bytes(1)] * field.startswith("image")
    assert videos in ([], [image_bytes(1)], [frames]) and conversation.unread == set()


def test_an_entry_without_a_medium_says_what_it_has(tmp_path):
    record = {"messages": [turn("user", "q"), turn("assistant", "a")], "images": [{"file": "a.png"}]}
    with pytest.raises(BadSample, match="a medium has none of bytes, path, .*; it has file"):
        load_media(parse_record(record), tmp_path)


def test_values_of_numpy_and_numbers_in_text():
    """As pandas reads them from parquet, and from CSV."""
    turns = np.array([turn("user", "q"), turn("assistant", "a")], dtype=object)
    record = {"messages": turns, "images": np.array(["a.png"], dtype=object), "max_pixels": np.int64(50_000)}
    written = {"messages": list(turns), "images": '["a.png"]', "max_pixels": "50000"}
    for one in (record, written):
        conversation = parse_record(one)
        assert conversation.media["image"] == ["a.png"]
        messages = place_media(conversation.messages, 1)
        assert limits_of_media(messages, conversation.limits)["image"] == [{"max_pixels": 50_000}]


def test_two_lists_of_frames_are_two_videos():
    record = {"messages": [turn("user", "<video><video>q"), turn("assistant", "a")]}
    clips = [["1.jpg", "2.jpg"], ["3.jpg"]]
    for written in (clips, json.dumps(clips), [{"frames": clip} for clip in clips]):
        conversation = parse_record(record | {"videos": written})
        assert len(conversation.media["video"]) == 2
        place_media(conversation.messages, 0, 2)
