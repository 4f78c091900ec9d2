"""COCO's JSON and records in the manner of RefCOCO: questions about boxes, in training and in `prepare`."""

import json
import time

import datasets
import pytest
from loaders import arguments_of
from PIL import Image

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.chatml.columns import Columns
from megatron_vlm.data.chatml.grounded import ALL, ONE, asking, corners_in
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.on_disk.coco import NOTES, coco_records
from megatron_vlm.data.prepare.prepare import prepare_energon_dataset
from megatron_vlm.data.records.tables import open_table
from tiny.checkpoints import build_tiny_checkpoint

WIDTH, HEIGHT = 128, 96
SHOP = {
    "info": {"year": 2026},
    "images": [
        {"id": 7, "file_name": "a.png", "width": WIDTH, "height": HEIGHT},
        {"id": 3, "file_name": "b.png", "width": WIDTH, "height": HEIGHT},
        {"id": 5, "file_name": "empty.png", "width": WIDTH, "height": HEIGHT},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 18, "bbox": [10, 20, 30, 40], "iscrowd": 0},
        {"id": 2, "image_id": 3, "category_id": 1, "bbox": [0, 0, 64, 48.0], "iscrowd": 0},
        {"id": 3, "image_id": 7, "category_id": 1, "bbox": [100.5, 50, 27.9, 46.3], "iscrowd": 0},
        {"id": 4, "image_id": 7, "category_id": 18, "bbox": [64, 48, 32, 24]},
        {"id": 5, "image_id": 7, "category_id": 18, "bbox": [0, 0, 90, 90], "iscrowd": 1},
        {"id": 6, "image_id": 3, "category_id": 18, "bbox": [5, 5, 0, 9], "iscrowd": 0},
        {"id": 7, "image_id": 4, "category_id": 18, "bbox": [5, 5, 2, 9], "iscrowd": 0},
    ],
    "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
}
LEFT_OUT = (
    "come from a file of which are left out: 1 annotations of crowds (iscrowd), 1 annotations whose box has "
    "no area, 1 annotations without a box, or an image and a category that no other has the id of, 1 images "
    "without boxes"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    folder = tmp_path_factory.mktemp("shop")
    for name in "ab":
        Image.new("RGB", (WIDTH, HEIGHT), "grey").save(folder / f"{name}.png")
    (folder / "shop.json").write_text(json.dumps(SHOP, indent=1))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    arguments = arguments_of("qwen3_vl", build_tiny_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen")))
    return HFEncoderVLMTaskEncoder(data=DataConfig(seq_length=1024), **arguments)


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def said(record):
    """The question and the answers of a conversation."""
    turns = record["messages"]
    return turns[0]["content"], [turn["content"] for turn in turns[1::2]]


# -- COCO


def test_an_image_of_coco_is_a_question_about_all_that_is_in_it(folder):
    table = open_table(folder / "shop.json")
    assert len(table) == 2 and [table.record(row)[1] for row in (0, 1)] == [folder, folder]
    first, second = (table.record(row)[0] for row in (0, 1))
    assert said(first) == ("<image>" + ALL.format("dog, person"), ["<objects>"])
    assert first["images"] == ["a.png"] and second["images"] == ["b.png"]
    # the second box ends at the image's edges, a third of a pixel inside of what is written
    boxes = [[10, 20, 40, 60], [100.5, 50, 128, 96], [64, 48, 96, 72]]
    assert first["objects"] == {"ref": ["dog", "person", "dog"], "bbox": boxes, "size": [128, 96]}
    assert second["objects"] == {"ref": ["person"], "bbox": [[0, 0, 64, 48]], "size": [128, 96]}
    assert first[NOTES] == second[NOTES] == [LEFT_OUT]


def test_a_run_trains_on_coco_and_says_what_is_left_out(folder, encoder):
    data = DataConfig(train_data_path=str(folder / "shop.json"), num_workers=0, box_question="Show me {}!")
    loader = HFProvider(data).train_loader(encoder, micro_batch_size=2, rank=0, world_size=1, seed=0)
    batch = next(loader)
    loader.close()
    text = encoder.processor.tokenizer.batch_decode(batch["input_ids"])
    assert "Show me person!" in "".join(text) and "Show me dog, person!" in "".join(text)
    assert any('{"bbox_2d": [0, 0, 500, 500], "label": "person"}' in row for row in text)  # thousandths
    assert any('{"bbox_2d": [78, 208, 312, 625], "label": "dog"}' in row for row in text)
    assert loader.notes == [f"data: {folder / 'shop.json'}: 2 of 2 records looked at {LEFT_OUT}"]


def test_prepare_reads_coco(folder, encoder, tmp_path):
    (tmp_path / "json").mkdir()
    source = tmp_path / "json" / "shop.json"
    source.write_text(json.dumps(SHOP))
    summary = prepare_energon_dataset(
        source, tmp_path / "out", image_root=folder, splits={"train": 1}, box_question="{}?", progress=False
    )
    assert summary.samples == {"train": 2} and not summary.skipped
    assert any(LEFT_OUT in note for note in summary.notes)


@pytest.mark.parametrize("missing", ["images", "annotations", "categories"])
def test_other_json_is_no_coco(missing):
    assert coco_records(json.dumps(SHOP | {missing: []})) is None
    assert coco_records(json.dumps({"data": [SHOP["annotations"][0]], "images": 1})) is None
    assert len(list(coco_records(json.dumps(SHOP)))) == 2


def test_time_grows_as_the_annotations(tmp_path):
    def seconds(count):
        images = [{"id": n, "file_name": f"{n}.jpg", "width": 640, "height": 480} for n in range(count // 8)]
        marks = [
            {"image_id": n % len(images), "category_id": 1, "bbox": [1, 2, 30, 40]} for n in range(count)
        ]
        text = json.dumps({"images": images, "annotations": marks, "categories": SHOP["categories"]})
        began = time.process_time()
        assert sum(len(record["objects"]["bbox"]) for record in coco_records(text)) == count
        return time.process_time() - began

    assert seconds(64_000) < 8 * 3 * max(seconds(8_000), 0.01)  # quadratic would be 64 times as long


# -- RefCOCO


def referring(count, box, **fields):
    """As many records, of boxes at x, y of width, height: `box` makes of these what a file has."""
    places = [(60 + number % 5, 30, 20, 10 + number % 3) for number in range(count)]
    return [
        {"image": "a.png", "sent": f"the {n}. dog", "bbox": box(*p), **fields} for n, p in enumerate(places)
    ]


def by_corners(x, y, width, height):
    return [x, y, x + width, y + height]


def by_sizes(x, y, width, height):
    return [x, y, width, height]


@pytest.mark.parametrize("box", [by_corners, by_sizes])
def test_the_form_of_a_box_is_found_by_its_numbers(folder, box):
    path = written(folder / f"{box.__name__}.jsonl", referring(12, box))
    record, _ = open_table(path).record(0)
    assert said(record) == ("<image>" + ONE.format("the 0. dog"), ["<bbox>"])
    assert record["images"] == ["a.png"] and record["objects"] == {"bbox": [[60, 30, 80, 40]]}
    assert record[NOTES] == [
        "have a bbox that is read as "
        + ("[x1, y1, x2, y2]" if box is by_corners else "[x, y, width, height]")
    ]


def test_where_numbers_do_not_tell_a_setting_says(folder):
    path = written(folder / "few.jsonl", referring(3, by_corners))
    with pytest.raises(ValueError, match="a bbox may be .*; say so with data.columns.bbox_xyxy=bbox or"):
        open_table(path)
    for name, box in {"bbox_xyxy": [60, 30, 80, 40], "bbox_xywh": [60, 30, 140, 70]}.items():
        record, _ = open_table(path, columns=Columns({name: "bbox"})).record(0)
        assert record["objects"]["bbox"] == [box]
    with pytest.raises(BadSample, match="say so with"):  # as of a stream, whose first records nobody looks at
        Columns()(referring(1, by_sizes)[0])


def test_each_expression_is_asked_for(folder):
    """Records of REFER, whose sentences are objects."""
    sentences = [{"sent": "left dog", "raw": "Left dog!"}, {"sent": "brown dog"}]
    source = {"sentences": sentences, "file_name": "a.png", "bbox": [60, 30, 20, 10], "width": WIDTH}
    path = folder / "refs.json"
    path.write_text(json.dumps([source] * 2))
    record, _ = open_table(path, columns=Columns(question="Where is {}?")).record(1)
    assert [turn["content"] for turn in record["messages"]] == [
        *("<image>Where is left dog?", "<bbox>", "Where is brown dog?", "<bbox>")
    ]
    assert record["images"] == ["a.png"] and record["objects"] == {"bbox": [[60, 30, 80, 40]] * 2}


def test_what_ids_of_coco_leave_open_is_left_out(tmp_path):
    """As where two files were put together. What is no id, or no number, ends nothing."""
    many = {
        "images": [{"id": 1, "file_name": "a.png"}, {"id": 1, "file_name": "b.png"}, {"file_name": "c.png"}],
        "annotations": [
            {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]},
            {"image_id": [1], "category_id": [1], "bbox": [1, 2, 3, 4]},
            {"bbox": [1, 2, 10**400, 4]},
            {"image_id": 2, "category_id": 2, "bbox": [1, 2, 3, 4]},
            {"image_id": 2, "category_id": 3, "bbox": [1, 2, 3, 4]},
            {"image_id": 2, "category_id": 4, "bbox": [1, 2, 3, 4]},
            {"image_id": 2, "category_id": 4, "bbox": [99.2, 2, 0.5, 4]},
        ],
        "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}, {"id": 2, "name": "dog"}],
    }
    many["images"].append({"id": 2, "file_name": "d.png", "width": 99, "height": 99})
    many["categories"] += [{"id": 3, "name": None}, {"id": 4, "name": "hat"}]
    [record] = coco_records(json.dumps(many))
    assert record["objects"] == {"ref": ("hat",), "bbox": ([1, 2, 4, 6],), "size": [99, 99]}
    assert record[NOTES][0].count("5 annotations") == record[NOTES][0].count("1 annotations whose box") == 1


def test_a_unit_beside_a_box_is_heeded():
    record = {"sent": "a dog", "bbox_xyxy": [1, 2, 1000, 1000], "image": "a.png", "bbox_type": "norm1000"}
    beside = {"width": 10, "height": 10}
    asked = asking(record | beside, None, None)["objects"]
    assert asked == {"bbox": [[1, 2, 1000, 1000]], "bbox_type": "norm1000"}
    asked = asking(record | beside | {"bbox_type": None, "bbox_xyxy": [1, 2, 3, 4]}, None, None)["objects"]
    assert asked == {"bbox": [[1, 2, 3, 4]], "size": [10, 10]}


def test_shares_are_not_taken_for_pixels():
    record = {"sent": "a dog", "bbox": [0.1, 0.2, 0.5, 0.6], "image": "a.png"}
    with pytest.raises(ValueError, match="seems to be of shares.*\n?.*bbox_type: norm1"):
        corners_in([record] * 20, "here")
    assert corners_in([record | {"bbox_type": "norm1"}] * 20, "here") is True


def test_records_with_turns_or_without_expressions_stay_as_they_are():
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    for record in (
        {"messages": turns, "bbox": [1, 2, 3, 4], "sent": "a dog", "image": "a.png"},
        {"conversation": turns, "bbox": [1, 2, 3, 4], "sent": "a dog", "image": "a.png"},
        {"question": "a?", "answer": "b", "bbox": [1, 2, 3, 4], "image": "a.png"},
        {"sent": "a dog", "bbox": [1, 2], "image": "a.png"},
        {"messages": turns, "images": ["a.png"], "objects": {"ref": ["dog"], "bbox": [[1, 2, 3, 4]]}},
    ):
        assert Columns()(record) == record


def test_rows_of_datasets_are_read_alike(tmp_path, folder):
    datasets.Dataset.from_list(referring(12, by_sizes)).to_parquet(tmp_path / "rows.parquet")
    record, _ = open_table(tmp_path / "rows.parquet", media_dir=folder).record(0)
    assert record["objects"] == {"bbox": [[60, 30, 80, 40]]}


def test_system_tools_and_other_keys_beside_a_box_are_kept():
    record = {"bbox": [1, 2, 3, 4], "sentence": "the cat", "image": "a.jpg"}
    beside = {"system": "Be brief.", "tools": [{"name": "look"}], "category": 7}
    conversation = parse_record(Columns(has_corners=True)(record | beside))
    assert conversation.messages[0]["content"] == [{"type": "text", "text": "Be brief."}]
    assert conversation.tools == [{"name": "look"}]
    assert conversation.unread == {("record", "category")}
