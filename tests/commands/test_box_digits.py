"""The data of the demo of boxes, the tower that it starts from, and how its answers are judged."""

import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import train_tower
from evaluate import OF_BOX, most_tokens, read_questions
from make_boxes import CELL, make_boxes, scans
from make_checkpoint import FOR_BOXES
from tiny.checkpoints import build_tiny_checkpoint

SIDES = ("train", "held_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("boxes")
    counts = make_boxes(folder, train=60, held_out=20)
    assert counts["train"] > 60 and counts["held_out"] == 20
    return folder


def records(folder, side):
    return [json.loads(line) for line in (folder / f"{side}.jsonl").read_text().splitlines()]


def test_boxes_are_squares_in_cells_of_their_own_with_something_on_them(folder):
    with_boxes = [one for side in SIDES for one in records(folder, side) if "objects" in one]
    assert len(with_boxes) > 50
    for one in with_boxes:
        image = Image.open(folder / one["images"][0]).convert("L")
        boxes = [*one["objects"]["bbox"], *one["others"]]
        cells = set()
        for left, top, right, bottom in boxes:
            assert 0 <= left < right <= image.width and 0 <= top < bottom <= image.height
            assert right - left == bottom - top
            assert image.crop((left, top, right, bottom)).getextrema()[1] > 200
            places = [number // CELL for number in (left, top, right - 1, bottom - 1)]
            assert places[:2] == places[2:]
            cells.add((places[0], places[1]))
        assert len(cells) == len(boxes) in (2, 3)


def test_held_out_questions_name_a_digit_and_do_not_say_where_it_is(folder):
    questions = read_questions(folder / "held_out.jsonl")
    assert most_tokens(questions) == OF_BOX
    for question, record in zip(questions, records(folder, "held_out"), strict=True):
        [message] = question["messages"]
        assert [part["type"] for part in message["content"]] == ["text", "image"]
        assert message["content"][0]["text"] == f"Where is the {record['objects']['ref'][0]}?"


def test_a_tower_learns_from_training_scans_and_the_language_model_stays(tmp_path, monkeypatch):
    """Held-out scans are out of reach, and no scan is on both sides."""
    sides = {side: {scan.tobytes() for digit in scans(side) for scan in digit} for side in SIDES}
    assert len(sides["train"]) == 1500 and len(sides["held_out"]) == 297
    assert not sides["train"] & sides["held_out"]
    monkeypatch.setattr(train_tower, "scans", {"train": scans("train")}.__getitem__)
    build_tiny_checkpoint("qwen3_vl", tmp_path, **FOR_BOXES)
    before = AutoModelForImageTextToText.from_pretrained(tmp_path).state_dict()
    losses = train_tower.train_tower(tmp_path, steps=12)
    after = AutoModelForImageTextToText.from_pretrained(tmp_path).state_dict()
    assert max(losses[-3:]) < 0.7 * losses[0]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("model.visual.")}
