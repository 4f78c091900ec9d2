"""Every source that the Hugging Face loaders read: over an epoch, trained and dropped are the dataset."""

import json
import re
from collections import Counter
from pathlib import Path

import datasets
import lmdb
import pytest
from sources import record, write_sharegpt
from transformers import AutoProcessor

from megatron_vlm.data.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.hf import HFProvider

ROWS = 23
BAD = [5, 17]  # records that name an image that is not there
SEED = 3


def records():
    rows = [record(number) for number in range(ROWS)]
    for number in BAD:
        rows[number] = {"images": ["images/none.jpg"], "conversations": rows[number]["conversations"]}
    return rows


def write_images(folder: Path) -> Path:
    write_sharegpt(folder, ROWS)
    return folder


def json_lines(folder):
    write_images(folder)
    lines = [json.dumps(row) for row in records()]
    (folder / "data.jsonl").write_text("\n".join(lines[:7]) + "\n\n" + "\n".join(lines[7:]))
    return {"train_data_path": folder / "data.jsonl"}


def json_array(folder):
    write_images(folder)
    (folder / "array.json").write_text(json.dumps(records(), indent=1, ensure_ascii=False))
    return {"train_data_path": folder / "array.json"}


def openai_messages(folder):
    """Images named by the parts of turns, one of them inline."""
    write_images(folder)
    lines = []
    for row in records():
        parts = [{"type": "image_url", "image_url": {"url": path}} for path in row["images"]]
        user = {"role": "user", "content": [*parts, {"type": "text", "text": "Which number?"}]}
        reply = {"role": "assistant", "content": row["conversations"][1]["value"]}
        lines.append(json.dumps({"messages": [user, reply]}))
    (folder / "openai.jsonl").write_text("\n".join(lines))
    return {"train_data_path": folder / "openai.jsonl"}


def parquet(folder, shards=4):
    """Plain columns under names of their own, in several files."""
    write_images(folder)
    (folder / "parquet").mkdir()
    rows = [
        {
            "picture": [{"path": path, "bytes": _bytes(folder / path)} for path in row["images"]],
            "asked": row["conversations"][0]["value"],
            "said": row["conversations"][1]["value"],
        }
        for row in records()
    ]
    features = datasets.Features(
        {
            "picture": datasets.List(datasets.Image(decode=False)),
            "asked": datasets.Value("string"),
            "said": datasets.Value("string"),
        }
    )
    table = datasets.Dataset.from_list(rows, features=features)
    table = table.cast_column("picture", datasets.List(datasets.Image()))
    for shard in range(shards):
        table.shard(shards, shard).to_parquet(folder / f"parquet/train-{shard}.parquet")
    columns = {"images": "picture", "question": "asked", "answer": "said"}
    return {"train_data_path": folder / "parquet", "columns": columns}


def _bytes(path):
    return path.read_bytes() if path.exists() else b"no image"


def streamed(folder):
    return parquet(folder) | {"streaming": True, "shuffle_buffer_size": 5}


def streamed_shards(folder):
    """As many files as ranks: each rank reads its own."""
    return parquet(folder, shards=3) | {"streaming": True, "shuffle_buffer_size": 5}


def meta(folder):
    """Two files whose rows all come once."""
    rows = records()
    write_images(folder)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    turned = [
        {"pictures": row["images"], "chat": [_tagged(turn) for turn in row["conversations"]]} for row in rows
    ]
    (folder / "b.json").write_text(json.dumps(turned[10:]))
    entries = {
        "a": {"file_name": "a.jsonl", "formatting": "sharegpt"},
        "b": {
            "file_name": "b.json",
            "columns": {"messages": "chat", "images": "pictures"},
            "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "U", "assistant_tag": "A"},
            "media_dir": ".",
            "sample_ratio": 1.0,
        },
    }
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    return {"train_data_path": folder / "dataset_info.json"}


def _tagged(turn):
    return {"who": {"human": "U", "gpt": "A"}[turn["from"]], "what": turn["value"]}


def in_lmdb(folder):
    write_images(folder)
    with lmdb.open(str(folder / "images.lmdb")) as environment, environment.begin(write=True) as transaction:
        for path in (folder / "images").iterdir():
            transaction.put(path.name.encode(), path.read_bytes())
    rows = [
        row | {"images": [f"images.lmdb::{Path(path).name}" for path in row["images"]]} for row in records()
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"train_data_path": folder / "data.jsonl"}


def documents(folder):
    """Text, then images and text in turn, with gaps."""
    write_images(folder)
    rows = []
    for number, row in enumerate(records()):
        texts = [f"number {number} begins.", *[None] * len(row["images"]), "It ends."]
        rows.append({"texts": texts, "images": [None, *row["images"], None]})
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"train_data_path": folder / "documents.jsonl"}


SOURCES = [
    *(json_lines, json_array, openai_messages, parquet, streamed, streamed_shards, meta, in_lmdb, documents)
]


@pytest.fixture(scope="module")
def processor(tiny_gemma3):
    return AutoProcessor.from_pretrained(tiny_gemma3)


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


def open_loader(settings, processor, rank=0, world_size=1, num_workers=0, packing="none"):
    cls = HFEncoderVLMTaskEncoder if packing == "none" else PackingVLMTaskEncoder
    encoder = cls(processor, 256)
    settings = settings | {"train_data_path": str(settings["train_data_path"]), "num_workers": num_workers}
    provider = HFProvider(**settings, max_drop_share=1.0, packing=packing, packing_buffer_size=6)
    return provider.train_loader(
        encoder, micro_batch_size=1, rank=rank, world_size=world_size, seed=SEED
    ), encoder


def take_epoch(loader):
    """The batches of the first epoch; the state after each says which epoch it is of."""
    batches = []
    while loader.state_dict()["place"][0] == 0:
        batches.append(next(loader))
    return batches[:-1]


def take(loader, count):
    return [[batch["__key__"], batch["input_ids"].tolist()] for batch in (next(loader) for _ in range(count))]


def replies(batches, processor):
    """What was trained in each document."""
    found = []
    for batch in batches:
        for labels, numbers in zip(batch["labels"], batch["attention_mask"], strict=True):
            for document in range(1, int(numbers.max()) + 1):
                trained = labels[(numbers == document) & (labels != -100)]
                found.append(processor.tokenizer.decode(trained))
    return found


def numbers_of(batches, processor):
    return Counter(int(re.search(r"number (\d+)", text)[1]) for text in replies(batches, processor))


def dropped(encoder):
    return encoder.drops.summary()["reasons"]


GOOD = Counter(set(range(ROWS)) - set(BAD))


@pytest.mark.parametrize("write", SOURCES)
@pytest.mark.parametrize("world_size, num_workers", [(1, 0), (1, 3), (3, 0), (3, 1)])
def test_trained_and_dropped_are_the_dataset(source, processor, write, world_size, num_workers):
    trained, lost = Counter(), Counter()
    for rank in range(world_size):
        loader, encoder = open_loader(source(write), processor, rank, world_size, num_workers)
        batches = take_epoch(loader)
        trained += numbers_of(batches, processor)
        if num_workers == 0:  # workers read ahead, into the next epoch
            lost += Counter(dropped(encoder))
        loader.close()
    assert trained == GOOD
    assert num_workers or sum(lost.values()) >= len(BAD)


@pytest.mark.parametrize("write", [json_lines, parquet, streamed, streamed_shards, meta])
@pytest.mark.parametrize("packing", ["none", "stream"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_source_resumes_exactly(source, processor, write, packing, num_workers):
    """From three places, the last in a later epoch, into another number of workers."""
    for before in (0, 4, 27):
        loader, _ = open_loader(source(write), processor, 1, 3, num_workers, packing)
        take(loader, before)
        state = json.dumps(loader.state_dict())
        expected = take(loader, 6)
        loader.close()
        resumed, _ = open_loader(source(write), processor, 1, 3, 0, packing)
        resumed.load_state_dict(json.loads(state))
        assert take(resumed, 6) == expected
