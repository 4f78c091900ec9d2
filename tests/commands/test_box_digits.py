"""The data of the demo of boxes, and how its answers are judged."""

import json

import pytest
from PIL import Image

from boxes_demo import overlap
from evaluate import OF_BOX, most_tokens, read_questions
from make_boxes import make_boxes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("boxes")
    assert make_boxes(folder, train=60, held_out=20) == {"train": 60, "held_out": 20}
    return folder


def records(folder, side):
    return [json.loads(line) for line in (folder / f"{side}.jsonl").read_text().splitlines()]


def test_boxes_are_squares_in_their_images_with_something_on_them(folder):
    with_boxes = [one for side in ("train", "held_out") for one in records(folder, side) if "objects" in one]
    assert len(with_boxes) > 50
    for one in with_boxes:
        image = Image.open(folder / one["images"][0]).convert("L")
        [[left, top, right, bottom]] = one["objects"]["bbox"]
        assert 0 <= left < right <= image.width and 0 <= top < bottom <= image.height
        assert right - left == bottom - top
        assert image.crop((left, top, right, bottom)).getextrema()[1] > 200


def test_held_out_questions_name_a_digit_and_do_not_say_where_it_is(folder):
    questions = read_questions(folder / "held_out.jsonl")
    assert most_tokens(questions) == OF_BOX
    for question, record in zip(questions, records(folder, "held_out"), strict=True):
        [message] = question["messages"]
        assert message["content"][1]["text"] == f"Where is the {record['objects']['ref'][0]}?"


def test_equal_arguments_give_equal_files(folder, tmp_path):
    make_boxes(tmp_path, train=60, held_out=20)
    for name in ("train.jsonl", "held_out.jsonl", "images/train-00000.jpg"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_overlap_is_what_is_common_of_what_both_cover():
    assert overlap((0, 0, 10, 10), (0, 0, 10, 10)) == 1
    assert overlap((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert overlap((0, 0, 10, 10), (10, 0, 15, 10)) == 0 == overlap(None, (0, 0, 1, 1))
    assert overlap((5, 5, 5, 9), (0, 0, 10, 10)) == 0
