"""Every source that the loaders read, of the same records, written to disk by a function each."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import datasets
import pytest
from sources import record, write_sharegpt

ROWS = 24  # whole buffers on 1 and on 3 ranks
BAD = [5, 17]  # records that name an image that is not there


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


def packed_object(folder):
    """An object with an array of records, in gzip, under a name that says nothing."""
    write_images(folder)
    text = json.dumps({"version": 1, "data": records()}, indent=1)
    (folder / "packed").write_bytes(gzip.compress(text.encode()))
    return {"train_data_path": folder / "packed"}


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


COLUMNS_OF_PARQUET = {"images": "picture", "question": "asked", "answer": "said"}


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
    return {"train_data_path": folder / "parquet", "columns": COLUMNS_OF_PARQUET}


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
    lmdb = pytest.importorskip("lmdb")
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


def saved(folder):
    """A folder as `datasets` saves it."""
    loaded = datasets.load_dataset(
        "parquet", data_files=str(parquet(folder)["train_data_path"] / "*.parquet")
    )
    loaded["train"].save_to_disk(folder / "saved")
    return {"train_data_path": folder / "saved", "columns": COLUMNS_OF_PARQUET}


SOURCES = [
    *(json_lines, json_array, openai_messages, parquet, saved, streamed, streamed_shards, meta, in_lmdb),
    *(documents, packed_object),
]


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


GOOD = Counter(set(range(ROWS)) - set(BAD))


def write_meta(folder, **entries):
    """Ten records under each name, told apart by their numbers."""
    write_sharegpt(folder, 40)
    for number, name in enumerate(entries):
        rows = [record(10 * number + row) for row in range(10)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = {name: {"file_name": f"{name}.jsonl"} | entry for name, entry in entries.items()}
    (folder / "dataset_info.json").write_text(json.dumps(written))
    return {"train_data_path": folder / "dataset_info.json"}
