"""The examples that write COCO's JSON, and records in the manner of RefCOCO, as conversations about boxes."""

import sys

import pytest
from places import ROOT

sys.path.append(str(ROOT / "examples"))
from convert_coco import QUESTION, conversations  # noqa: E402
from convert_refcoco import conversation  # noqa: E402

WIDTH, HEIGHT = 128, 96
SIZE = {"width": WIDTH, "height": HEIGHT}
SHOP = {
    "images": [
        {"id": 7, "file_name": "a.png", **SIZE},
        {"id": 3, "file_name": "b.png", **SIZE},
        {"id": 5, "file_name": "empty.png", **SIZE},
    ],
    "annotations": [
        {"image_id": 7, "category_id": 18, "bbox": [10, 20, 30, 40], "iscrowd": 0},
        {"image_id": 3, "category_id": 1, "bbox": [0, 0, 64, 48.0], "iscrowd": 0},
        {"image_id": 7, "category_id": 1, "bbox": [100.5, 50, 27.9, 46.3], "iscrowd": 0},
        {"image_id": 7, "category_id": 18, "bbox": [64, 48, 32, 24]},
        {"image_id": 7, "category_id": 18, "bbox": [0, 0, 90, 90], "iscrowd": 1},
        {"image_id": 3, "category_id": 18, "bbox": [5, 5, 0, 9], "iscrowd": 0},
    ],
    "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
}


def turns(record):
    return [turn["content"] for turn in record["messages"]]


def test_an_image_of_coco_is_a_question_about_all_that_is_in_it():
    (first, second), left_out = conversations(SHOP)
    assert turns(first) == ["<image>" + QUESTION.format("dog, person"), "<objects>"]
    assert first["images"] == ["a.png"] and second["images"] == ["b.png"]
    # The second box ends at the image's edges, a third of a pixel inside of what is written.
    boxes = [[10, 20, 40, 60], [100.5, 50, 128, 96], [64, 48, 96, 72]]
    assert first["objects"] == {"ref": ["dog", "person", "dog"], "bbox": boxes, "size": [WIDTH, HEIGHT]}
    assert second["objects"] == {"ref": ["person"], "bbox": [[0, 0, 64, 48]], "size": [WIDTH, HEIGHT]}
    assert left_out == {
        "annotations of crowds (iscrowd)": 1,
        "annotations whose box has no area": 1,
        "images without boxes": 1,
    }


@pytest.mark.parametrize("boxes, box", [("xyxy", [60, 30, 80, 40]), ("xywh", [60, 30, 20, 10])])
def test_each_expression_of_a_record_of_refcoco_is_asked_for(boxes, box):
    """Records of REFER have sentences that are objects."""
    sentences = [{"sent": "left dog", "raw": "Left dog!"}, {"sent": "brown dog"}]
    record = conversation({"sentences": sentences, "file_name": "a.png", "bbox": box}, boxes, "Where is {}?")
    assert turns(record) == ["<image>Where is left dog?", "<bbox>", "Where is brown dog?", "<bbox>"]
    assert record["images"] == ["a.png"] and record["objects"] == {"bbox": [[60, 30, 80, 40]] * 2}
