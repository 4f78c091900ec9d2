"""A dataset of which nothing can be trained ends the run, whatever is allowed to be dropped; few drops of a
small one count as what they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import pytest
from loaders import encoder_of, open_loader
from pairs import pairwise
from prepared_shards import add_part
from sources import write_sharegpt

from megatron_vlm.data.accounts.drops import TooManyDrops
from megatron_vlm.data.prepare import META, _write_index

ROWS = 30
SMALL = {"packing_buffer_size": 8, "shuffle_buffer_size": 8}
HF = {
    "plain": {},
    "stream": {"packing": "stream"},
    "global": {"packing": "global"},
    "by_length": {"group_by_length": True},
    "streaming": {"streaming": True},
    "streaming packed": {"streaming": True, "packing": "stream"},
}
ENERGON = {"energon": {}, "energon packed": {"packing": "stream"}}


def spoil(record: dict, folder, how: str) -> dict:
    """Dropped when it is measured, or only when its image is decoded."""
    if how == "no reply":
        return record | {"conversations": [record["conversations"][0], {"from": "gpt", "value": ""}]}
    name = "images/half.jpg"
    if not (folder / name).exists():
        whole = (folder / "images/0-0.jpg").read_bytes()
        (folder / name).write_bytes(whole[: len(whole) - 60])
    turns = [{"from": "human", "value": "<image>What?"}, record["conversations"][1]]
    return {"images": [name], "conversations": turns}


def write(folder, how: str, good: Sequence[int] = (), rows: int = ROWS):
    """JSON Lines, of parquet for streams, and shards; all spoilt but the good ones."""
    import tarfile

    import datasets

    source = write_sharegpt(folder, rows)
    records = [json.loads(line) for line in source.read_text().splitlines()]
    records = [r if n in good else spoil(r, folder, how) for n, r in enumerate(records)]
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    columns = {key: [r[key] for r in records] for key in ("images", "conversations")}
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Value("string")),
            "conversations": datasets.List({k: datasets.Value("string") for k in ("from", "value")}),
        }
    )
    datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / "rows.parquet")
    shards = folder / "shards"
    shards.mkdir()
    with tarfile.open(shards / "train-0.tar", "w") as tar:
        for number, record in enumerate(records):
            names = [f"img{n:03d}.jpg" for n in range(len(record["images"]))]
            add_part(tar, f"{number:06d}.json", json.dumps(record | {"images": names}).encode())
            for name, image in zip(names, record["images"], strict=True):
                add_part(tar, f"{number:06d}.{name}", (folder / image).read_bytes())
    _write_index(shards, shards / META, {"train": ["train-0.tar"]})
    return folder


def loader_of(folder, kind: str, processor, num_workers=0, max_drop_share=1.0, **place):
    settings = SMALL | (HF | ENERGON)[kind]
    settings |= {"num_workers": num_workers, "max_drop_share": max_drop_share}
    encoder = encoder_of(processor, 256, settings.get("packing", "none"))
    if kind in ENERGON:
        return open_loader("energon", folder / "shards", encoder, batch=2, seed=1, **settings, **place)
    path = folder / ("rows.parquet" if settings.get("streaming") else "data.jsonl")
    settings |= {"media_dir": str(folder), "lengths_cache": str(folder / "lengths")}
    return open_loader("hf", path, encoder, batch=2, seed=1, **settings, **place)


@pytest.fixture(scope="module")
def spoilt(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("spoilt"), request.param), request.param


@pytest.mark.parametrize(
    "spoilt, kind, num_workers",
    pairwise(["no reply", "half an image"], [*HF, *ENERGON], [0, 2]),
    indirect=["spoilt"],
)
def test_an_epoch_without_a_trainable_sample_ends_the_run(spoilt, processor, kind, num_workers):
    folder, how = spoilt
    loader = loader_of(folder, kind, processor, num_workers)
    with pytest.raises(TooManyDrops, match="a whole epoch of this rank has nothing to train on") as ended:
        next(loader)
    loader.close()
    reason = "no_trained_tokens" if how == "no reply" else "image_truncated"
    assert "0 were encoded and these dropped" in str(ended.value)
    assert reason in str(ended.value).splitlines()[-1]
    assert loader._drops.counted()[1] < 50 * ROWS


def in_turn(others: Sequence) -> list:
    """Each kind with all of the others: every second kind with the first of them in `make test`."""
    return [
        pytest.param(other, kind, marks=() if place == 0 == number % 2 else pytest.mark.soak)
        for number, kind in enumerate([*HF, *ENERGON])
        for place, other in enumerate(others)
    ]


@pytest.fixture(scope="module")
def with_good(tmp_path_factory):
    """A function (numbers of good samples) -> the folder in which all others are spoilt."""
    return cache(lambda *good: write(tmp_path_factory.mktemp("good"), "half an image", good))


@pytest.mark.parametrize("num_workers, kind", in_turn([0, 2]))
def test_one_good_sample_in_an_epoch_is_enough(with_good, processor, kind, num_workers):
    """Through several epochs, resumed within one; with Energon, each worker needs one."""
    good = [3] if kind not in ENERGON else [3, 27]
    folder = with_good(*good)
    loader = loader_of(folder, kind, processor, num_workers)
    batches = [next(loader) for _ in range(4)]
    assert {int(key) % 100 for batch in batches for row in batch["__key__"] for key in row_keys(row)} <= {
        *good
    }
    state = loader.state_dict()
    loader.close()
    if kind not in ENERGON:
        resumed = loader_of(folder, kind, processor, num_workers)
        resumed.load_state_dict(state)
        next(resumed)
        resumed.close()


def row_keys(row: list[str]) -> list[str]:
    return [key.split("-")[-1] for key in row]


@pytest.mark.parametrize("spoilt_rows", [1, 3])
def test_fewer_samples_than_a_hundred_are_judged_by_whole_epochs(tmp_path, processor, spoilt_rows):
    """Of 30 samples 1 is 3 %, also where it comes late in one epoch and early in the next; 3 are 10 %."""
    folder = write(tmp_path, "no reply", good=list(range(spoilt_rows, ROWS)))
    loader = loader_of(folder, "plain", processor, max_drop_share=0.05)
    if spoilt_rows == 1:
        for _ in range(2 * ROWS):  # four epochs
            next(loader)
        return
    with pytest.raises(TooManyDrops, match="samples read so far, also ahead of training, were dropped"):
        for _ in range(ROWS):
            next(loader)
