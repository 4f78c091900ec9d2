"""Records with boxes have the same tokens and labels by every loader, and go on where a run stopped."""

import json

import datasets
import numpy as np
import pytest
from loaders import arguments_of, take
from PIL import Image

from megatron_vlm.batch import document_spans
from megatron_vlm.config import DataConfig, RunConfig
from megatron_vlm.data.prepare import prepare_energon_dataset
from megatron_vlm.data.run_data import RunData
from tiny.checkpoints import build_tiny_checkpoint

ROWS, SEQ_LENGTH = 12, 448
PATHS = {
    "lines": ("hf", "rows.jsonl", {}),
    "stream": ("hf", "parquet", {"streaming": True, "shuffle_buffer_size": 4}),
    "prepared": ("energon", "prepared", {"shuffle_buffer_size": 4}),
}
PACKED = [(name, packing) for name in PATHS for packing in ("none", "stream")] + [("lines", "global")]


def record(number):
    """A label and a box in the question, two boxes in the reply; of one image or of the second of two."""
    images = 1 + number % 2
    boxes = [[number, 5, number + 20, 40], [30, 2 * number, 64, 48], [1, 2, 3 + number, 4]]
    turns = [
        {"role": "user", "content": "<image>" * images + f"{number}: <ref-object> at <bbox>?"},
        {"role": "assistant", "content": "No, at <bbox> and <bbox>."},
    ]
    objects = {"ref": [f"thing {number}"], "bbox": boxes, "image_id": [images - 1] * 3}
    return {"messages": turns, "images": [f"{number}.png", "last.png"][:images], "objects": objects}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same records as lines of JSON, as parquet and as shards."""
    folder = tmp_path_factory.mktemp("boxes")
    for name, size in [("last", (128, 64)), *((str(number), (64, 48)) for number in range(ROWS))]:
        pixels = np.random.default_rng(len(name)).integers(0, 255, (*reversed(size), 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    records = [record(number) for number in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    with_bytes = [
        one | {"images": [{"path": None, "bytes": (folder / name).read_bytes()} for name in one["images"]]}
        for one in records
    ]
    (folder / "parquet").mkdir()
    datasets.Dataset.from_list(with_bytes).to_parquet(folder / "parquet/train.parquet")
    prepare_energon_dataset(folder / "rows.jsonl", folder / "prepared", splits={"train": 1}, progress=False)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_tiny_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def arguments(checkpoint):
    return arguments_of("qwen3_vl", checkpoint)


@pytest.fixture
def opened(folder, arguments, tmp_path):
    """Opens training loaders as a run does and closes them after the test."""
    all_data = []

    def opened(name, packing):
        kind, path, settings = PATHS[name]
        packed = {"packing": packing, "packing_buffer_size": 4, "lengths_cache": str(tmp_path)}
        settings = {"num_workers": 0, "seq_length": SEQ_LENGTH, **packed, **settings}
        data = DataConfig(dataset_type=kind, train_data_path=str(folder / path), **settings)
        run = RunConfig(run_dir=str(tmp_path), data=data)
        all_data.append(RunData(run, **arguments, rank=0, world_size=1))
        return all_data[-1].train_loader

    yield opened
    for data in all_data:
        data.close()


def documents(batch):
    """The tokens and labels of each document."""
    ids, labels = (batch[name].flatten().tolist() for name in ("input_ids", "labels"))
    return [(tuple(ids[span]), tuple(labels[span])) for span in document_spans(batch["attention_mask"])]


def until_all_came(loader):
    found = set()
    while len(found) < ROWS:
        found |= set(documents(next(loader)))
    return found


@pytest.fixture
def alone(opened):
    """Each record's tokens and labels, from lines of JSON, one record a row."""
    return until_all_came(opened("lines", "none"))


def test_the_boxes_are_trained_and_those_of_the_question_are_not(alone, arguments):
    tokenizer = arguments["processor"].tokenizer
    trained = {tokenizer.decode([label for label in labels if label >= 0]) for _, labels in alone}
    # of number 1, the second image is twice as wide as its 64 pixels
    assert "No, at [234, 31, 500, 750] and [8, 31, 31, 62].<|im_end|>" in trained
    assert len(trained) == ROWS
    assert any("thing 0 at [0, 104, 312, 833]?" in tokenizer.decode(ids) for ids, _ in alone)


@pytest.mark.parametrize(("name", "packing"), PACKED)
def test_every_loader_has_the_same_tokens_and_labels(opened, alone, name, packing):
    loader = opened(name, packing)
    first = [documents(next(loader)) for _ in range(4)]
    assert packing == "none" or max(map(len, first)) > 1
    assert {one for row in first for one in row} | until_all_came(loader) == alone


@pytest.mark.parametrize(("name", "packing"), PACKED)
def test_a_resume_in_the_middle_has_the_same_batches(opened, name, packing):
    loader = opened(name, packing)
    take(loader, 3)
    state = json.dumps(loader.state_dict())
    resumed = opened(name, packing)
    resumed.load_state_dict(json.loads(state))
    assert take(resumed, 5) == take(loader, 5)
