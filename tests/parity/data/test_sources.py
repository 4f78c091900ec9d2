"""Every source that the Hugging Face loaders read: over an epoch, trained and dropped are the dataset."""

import copy
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest
from loaders import encoder_of, open_loader, take
from pairs import pairs
from places import ROOT
from samples import read_record, sample_of
from sources import image_bytes
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
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, is_trained, load_media, parse_record
from megatron_vlm.data.chatml.sample import place_media
from megatron_vlm.data.encode.encoder import PackingVLMTaskEncoder
from megatron_vlm.data.encode.questions import references_of
from megatron_vlm.data.load.sampler import PackingSampler
from megatron_vlm.data.media.files import read_media
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


# -- media


@pytest.mark.parametrize(
    "name, detail",
    [
        ("../outside.jpg", "outside of"),
        ("../outside.lmdb::a", "outside of"),
        ("images.lmdb::none", "has no key 'none'"),
        ("none.lmdb::a", "there is no database"),
        ("https://example.org/a.jpg", "is an address"),
        ("file:///outside.jpg", "set data.media_dir=/ and give absolute paths"),
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


@pytest.mark.parametrize("write", [Path.as_uri, "FILE://localhost{}".format, "file://{0.name}".format])
@pytest.mark.parametrize(
    "record",
    [
        lambda address: {"images": [address, {"path": address}], "videos": [address, [address]]},
        lambda address: {
            "messages": [
                turn("user", [{"type": kind, kind: address}, {"type": f"{kind}_url", f"{kind}_url": address}])
                for kind in ("image", "video")
            ]
        },
        lambda address: {"images": ["a b.jpg"], "question": f"<img>{address}</img>"},
    ],
)
def test_an_address_of_a_local_file_is_its_path(tmp_path, write, record):
    (tmp_path / "a b.jpg").write_bytes(b"file")
    address = write(tmp_path / "a b.jpg")
    conversation = parse_record({"question": "q", "answer": "a"} | record(address))
    images, videos = load_media(conversation, tmp_path)
    assert images and {*images} == {b"file"}
    assert all(video in (b"file", {"frames": [b"file"]}) for video in videos)


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
        ({"question": "q", "answer": True}, ["q", "true"]),
        ({"question": "q", "answer": float("nan"), "output": "a"}, ["q", "a"]),
        ({"question": "q", "answers": ["b", "a", "a"]}, ["q", "a"]),
        ({"question": 6, "answer": 7}, ["6", "7"]),
        ({"query": "q", "response": 7, "history": [["p", True]]}, ["p", "true", "q", "7"]),
        ({"texts": [{"user": "q", "assistant": 0}]}, ["q", "0"]),
        ({"image": "i.jpg", "caption": 7}, ["", "7"]),
    ],
)
def test_plain_columns_become_turns(stored, turns):
    messages = parse_record(Columns()(stored)).messages
    assert [turn["content"][0]["text"] for turn in messages] == turns
    assert [turn["role"] for turn in messages] == ["user", "assistant"] * (len(turns) // 2)


def test_a_mapped_question_leaves_the_answer_to_be_found():
    stored = {"problem": "q", "question": "other", "instruction": "other", "answer": "a", "difficulty": 3}
    conversation = parse_record(Columns({"question": "problem"})(stored))
    assert [part["content"][0]["text"] for part in conversation.messages] == ["q", "a"]
    assert conversation.unread == {("record", "difficulty")}


def test_the_records_that_the_documentation_shows_are_read():
    page = (ROOT / "docs/reference/records.md").read_text()
    shown = page.partition("## Keys of a record")[2].partition("\n\n    ")[2].partition("\n\n")[0]
    shown, decoder, records = re.sub(" # .*", "", shown).strip(), json.JSONDecoder(), []
    while shown:
        record, end = decoder.raw_decode(shown)
        records.append(record)
        shown = shown[end:].strip()
    assert len(records) == 5
    for record in map(Columns(), records):
        messages = parse_record(parse_record(record).stored()).messages
        assert "A cat." in json.dumps(messages)


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


def test_the_table_of_formats():
    rows = re.findall(
        r"^\| [^|]+ \| `(\{.*\})` \| ([^|]*)\| ([^|]+) \|$",
        (ROOT / "docs/how-to/prepare-data.md").read_text(),
        re.M,
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
