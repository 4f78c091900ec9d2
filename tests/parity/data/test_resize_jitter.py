"""Images get a new size each epoch: the same after every resume, with every number of workers and ranks."""

import json
import re
from collections import defaultdict

import datasets
import numpy as np
import pytest
from loaders import PROVIDERS, arguments_of, content, take
from pairs import first_soon
from PIL import Image
from prepared_shards import prepare

from megatron_vlm.batch import IGNORE_INDEX
from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.lengths import measure_dataset
from tiny.checkpoints import build_tiny_checkpoint

ROWS, SIZES = 6, 3
LEAST, MOST = 64**2, 128**2
JITTER = {"resize_jitter": SIZES, "min_pixels": LEAST, "max_pixels": MOST}
SIDE, PATCH = 96, 16
SOURCES = {
    "lines": ("hf", "rows.jsonl", {}),
    "stream": ("hf", "parquet", {"streaming": True, "shuffle_buffer_size": 4}),
    "energon": ("energon", "prepared", {"shuffle_buffer_size": 4}),
}
IN_TURN = ("lines", "stream")  # these know the epoch of a row


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return arguments_of("qwen3_vl", build_tiny_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same records as lines, as parquet in two files and as shards; a box is the whole last image."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    records = []
    for number in range(ROWS):
        Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(folder / f"{number}.png")
        images = 1 + number % 2
        turns = [
            {"role": "user", "content": "<image>" * images + "what?"},
            {"role": "assistant", "content": "grey in <bbox>."},
        ]
        objects = {"bbox": [[0, 0, SIDE, SIDE]], "image_id": [images - 1]}
        records.append({"messages": turns, "images": [f"{number}.png"] * images, "objects": objects})
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    with_bytes = [
        one | {"images": [{"path": None, "bytes": (folder / name).read_bytes()} for name in one["images"]]}
        for one in records
    ]
    (folder / "parquet").mkdir()
    for part in (0, 1):
        rows = datasets.Dataset.from_list(with_bytes[part::2])
        rows.to_parquet(folder / f"parquet/train-{part}.parquet")
    prepare(folder / "rows.jsonl", folder / "prepared", splits={"train": 1})
    return folder


@pytest.fixture
def opened(folder, arguments, tmp_path):
    """Opens training loaders and closes them after the test."""
    loaders = []

    def opened(packing="none", source="lines", rank=0, world_size=1, seed=5, **settings):
        kind, path, own = SOURCES[source]
        data = DataConfig(
            dataset_type=kind,
            train_data_path=str(folder / path),
            seq_length=256,
            packing=packing,
            box_format="pixels",
            **{
                "num_workers": 0,
                "packing_buffer_size": 4,
                "lengths_cache": str(tmp_path),
                **JITTER,
                **own,
                **settings,
            },
        )
        encoder = HFEncoderVLMTaskEncoder if packing == "none" else PackingVLMTaskEncoder
        provider, place = PROVIDERS[kind](data), {"rank": rank, "world_size": world_size}
        encoder = encoder(data=data, **arguments)
        loaders.append(provider.train_loader(encoder, micro_batch_size=1, seed=seed, **place))
        return loaders[-1]

    yield opened
    for loader in loaders:
        loader.close()


def patches(batches):
    """key → the patches of its images, each time that it came."""
    found = defaultdict(list)
    for keys, *_, pixels in batches:
        [[key]] = keys
        found[key].append(len(pixels))
    return found


@pytest.mark.parametrize("source", IN_TURN)
def test_each_epoch_has_new_sizes_until_all_have_been(opened, source):
    found = patches(take(opened(source=source), (SIZES + 1) * ROWS))
    assert len(found) == ROWS
    assert sum(len(set(sizes[:SIZES])) > 1 for sizes in found.values()) > ROWS // 2
    assert all(sizes[SIZES] == sizes[0] for sizes in found.values())
    other = patches(take(opened(source=source, seed=6), ROWS))
    assert any(other[key][0] != sizes[0] for key, sizes in found.items())


@pytest.mark.parametrize("source", SOURCES)
def test_boxes_have_the_size_of_their_image(opened, arguments, source):
    loader, seen = opened(source=source), set()
    for batch in (next(loader) for _ in range(2 * ROWS)):
        text = arguments["processor"].decode(batch["labels"][batch["labels"] != IGNORE_INDEX])
        _, rows, columns = batch["visual_inputs"].image_grid_thw[-1].tolist()
        assert re.findall(r"\d+", text) == ["0", "0", str(PATCH * columns), str(PATCH * rows)]
        seen.add(columns)
    assert len(seen) > 1


PACKED = [("lines", "global"), ("stream", "none"), ("energon", "stream"), ("energon", "none")]
PACKED += [("lines", "none"), ("lines", "stream"), ("stream", "stream")]


@pytest.mark.parametrize(("source", "packing"), first_soon(PACKED, 3))
def test_a_resumed_run_goes_on_with_the_same_sizes(opened, source, packing):
    workers = 2 if source == "energon" else 0  # there they decide what is read
    loader = opened(packing, source, num_workers=workers)
    expected, states = [], []
    for _ in range(14):
        states.append(loader.state_dict())
        expected.append(content(next(loader)))
    resumed = opened(packing, source, num_workers=2)
    resumed.load_state_dict(json.loads(json.dumps(states[5])))
    assert take(resumed, 8) == expected[5:13]
    again = opened(packing, source, num_workers=2)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    batch = next(again)
    assert content(batch) == expected[13]
    key = json.loads(json.dumps(batch["__restore_key__"]))
    assert content(opened(packing, source).replay(key)) == expected[13]


@pytest.mark.parametrize("source", IN_TURN)
def test_ranks_share_the_sizes_of_one(opened, source):
    alone = patches(take(opened(source=source), 3 * ROWS))
    ranks = [patches(take(opened(source=source, rank=rank, world_size=2), 3 * ROWS // 2)) for rank in (0, 1)]
    pairs = {(key, size) for found in ranks for key, sizes in found.items() for size in sizes}
    assert pairs == {(key, size) for key, sizes in alone.items() for size in sizes}


def test_lengths_are_those_of_each_size(opened, tmp_path):
    loader = opened("global")
    tokens, _ = measure_dataset(loader._rows, tmp_path)
    assert len(tokens) == SIZES * ROWS
    for index in range(SIZES * ROWS):
        _, row, _ = loader._rows[None, [index]]
        assert len(row.input_ids) == tokens[index]
    assert len({*tokens.reshape(SIZES, ROWS)[:, 0].tolist()}) > 1
