"""What the preview shows is what the model will see; the page opens in a browser."""

from __future__ import annotations

import html
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from prepared_shards import prepare
from samples import sample_of
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.batch import DataNeeds
from megatron_vlm.commands.runs import draw_answer
from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.extras.preview.preview import preview_page, training_data
from megatron_vlm.extras.preview.rows import TRAINED, VISUAL, pictures_of
from megatron_vlm.models.families import load
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes import load_recipe
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.corpus import default_corpus

FAMILIES = ["gemma3", "mistral3", "qwen3_vl", "lfm2_vl"]  # one of each way to store pixels
ATTACK = "<script>document.title = 'run'</script>"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """20 records; the fifth has no image, one has two, one types HTML, one an image too few."""
    source = write_sharegpt(tmp_path_factory.mktemp("views"), 20)
    records = [json.loads(line) for line in source.read_text().splitlines()]
    records[4]["conversations"][1]["value"] += ATTACK
    records[7]["images"] = []
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    return write_hf_folder(source.parent / "rows", source)


def config_of(family, dataset, tmp_path_factory, **settings):
    path = build_tiny_checkpoint(family, tmp_path_factory.mktemp(family))
    run = load_recipe("qwen3_vl_2b")(dataset_type="hf", train_data_path=str(dataset), hf_path=str(path))
    return apply_overrides(run, {"data.max_drop_share": 0.5, "data.max_pixels": None, **settings})


@pytest.fixture(scope="module", params=FAMILIES)
def config(request, dataset, tmp_path_factory):
    return config_of(request.param, dataset, tmp_path_factory)


@pytest.mark.parametrize("fast", [True, False])
def test_every_frame_of_a_video_is_shown(fast):
    parts, colours = TINY_FAMILIES["qwen3_vl"], [(200, 0, 0), (0, 90, 0), (0, 0, 250), (40, 40, 40)]
    processor = parts.processor(default_corpus(100), parts.template)
    encoder = HFEncoderVLMTaskEncoder(
        processor, DataConfig(seq_length=4096), DataNeeds(load("qwen3_vl").visual_keys), fast=fast
    )
    turns = [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "a"}]
    frames = []
    for colour in colours:
        out = io.BytesIO()
        Image.new("RGB", (64, 96), colour).save(out, "PNG")
        frames.append(out.getvalue())
    sample = sample_of(turns, videos=[frames], key="0")
    pictures = pictures_of(encoder.encode_sample(sample).visual_inputs, get_image_spec(processor))
    assert [picture.getpixel((5, 70)) for picture in pictures] == colours
    assert {picture.size for picture in pictures} == {(64, 96)}


def test_rows_show_replies_as_trained_and_images_in_their_place(config):
    with training_data(config) as (data, read):
        rows = [row for _ in range(19) for row in read(next(data.train_loader))]
    assert len({row.documents[0].key for row in rows}) == 19
    images = 0
    for row in rows:
        (document,) = row.documents
        number = int(document.key.split("-")[-1])
        (reply,) = [run.text for run in document.runs if run.kind == TRAINED]
        assert f"number {number}" in reply
        assert "Which number?" in "".join(
            run.text for run in document.runs if run.kind not in (TRAINED, VISUAL)
        )
        assert sum(run.tokens for run in document.runs) == document.tokens == row.tokens
        shown = [run for run in document.runs if run.kind == VISUAL]
        assert len(shown) == (0 if number % 5 == 4 else 2 if number % 3 == 0 else 1)
        images += len(shown)
        for i, run in enumerate(shown):
            picture = run.pictures[0]
            other = number + 50 * i
            expected = (other * 7 % 256, other * 13 % 256, 90)  # the whole image has one colour
            assert np.abs(np.asarray(picture).astype(int) - expected).max() < 12
    assert images > 10


def test_boxes_are_drawn_where_the_model_is_told_they_are(tmp_path_factory):
    """A white square on grey gets an edge of another colour all around it, and no other colour elsewhere."""
    folder = tmp_path_factory.mktemp("boxes")
    picture = Image.new("RGB", (640, 428), (60, 60, 60))
    picture.paste("white", (146, 137, 615, 415))
    picture.save(folder / "a.png")
    turns = [{"role": "user", "content": "<image>Where?"}, {"role": "assistant", "content": "<objects>"}]
    record = {"messages": turns, "images": ["a.png"], "objects": {"bbox": [[146, 137, 615, 415]]}}
    (folder / "rows.jsonl").write_text(json.dumps(record) + "\n")
    run = config_of("qwen2_5_vl", folder / "rows.jsonl", tmp_path_factory, **{"data.max_pixels": 100_000})
    with training_data(run) as (data, read):
        (row,) = read(next(data.train_loader))
    (shown,) = [run.pictures[0] for run in row.documents[0].runs if run.kind == VISUAL]
    colours = np.asarray(shown).astype(int)
    drawn = np.ptp(colours, axis=2) > 50  # neither grey nor white
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    width, height = shown.size
    edges = np.array([146 * width / 640, 137 * height / 428, 615 * width / 640, 415 * height / 428])
    assert np.abs([columns[0], rows[0], columns[-1], rows[-1]] - edges).max() < 3 < width < 640

    # by the processor's own limits the image is 112 x 84
    answer = '```json\n[\n\t{"bbox_2d": [20, 20, 60, 50], "label": "it"}\n]\n```'
    lines = draw_answer(run, answer, (folder / "a.png").read_bytes(), folder / "drawn.png")
    assert lines == ["[114.3, 101.9, 342.9, 254.8] it"]
    plain = draw_answer(run, "?", (folder / "a.png").read_bytes(), folder / "plain.png")
    assert plain == ["the answer has no box"]
    assert np.ptp(np.asarray(Image.open(folder / "drawn.png")).astype(int)[102, 200]) > 50


@pytest.fixture(scope="module")
def packed_page(dataset, tmp_path_factory):
    settings = {"data.packing": "stream", "data.packing_buffer_size": 19, "data.seq_length": 512}
    run = config_of("gemma3", dataset, tmp_path_factory, **settings)
    path = tmp_path_factory.mktemp("page") / "preview.html"
    page, *_ = preview_page(run, count=100, rows_shown=100)
    path.write_text(page, encoding="utf-8")
    return path


def test_the_page_has_every_sample_and_the_dropped_one(packed_page):
    text = packed_page.read_text(encoding="utf-8")
    assert len(set(re.findall(r"<header>\S*?(\d+): \d+ tokens", text))) == 19
    assert "placeholder_mismatch" in text
    assert ATTACK not in text and html.escape(ATTACK) in text.replace("&#39;", "&#x27;")
    assert not re.search(r'(src|href)="(?!data:)', text)  # nothing from elsewhere


def test_data_that_no_run_would_take_has_a_page(tmp_path, tmp_path_factory):
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "y"}]
    records = [{"images": [f"no_{number}.png"], "messages": turns} for number in range(3)]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = config_of("gemma3", tmp_path / "bad.jsonl", tmp_path_factory, **{"data.max_drop_share": 0.05})
    page, figures, notes = preview_page(run, count=4, rows_shown=4)
    assert page.count("<td>missing_media</td>") == 3 and len(figures) == 1
    assert notes[-1] == "dropped samples: {'missing_media': 3}"


@pytest.mark.parametrize("kind", ["jsonl", "energon"])
def test_ids_of_records_and_what_images_were_are_shown(kind, tmp_path_factory):
    """Also the id of a record that is dropped before its conversation is read, or after."""
    folder = tmp_path_factory.mktemp("ids")
    Image.new("RGB", (640, 428), "white").save(folder / "a.png")
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "a wall"}]
    records = [{"id": f"wall_{number}", "messages": turns, "images": ["a.png"]} for number in range(4)]
    records[1]["messages"] = [turns[0], {"role": "assistant", "content": "long " * 500}]
    path = folder / "rows.jsonl"
    if kind == "jsonl":
        del records[2]["messages"]
        records[2] = {"sample_id": 2} | records[2]
        records[0]["note"] = "nothing reads it"
        del records[2]["id"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    if kind == "energon":
        prepare({"train": path}, folder / "shards")
        path = folder / "shards"
    settings = {"data.dataset_type": kind.replace("jsonl", "hf"), "data.seq_length": 200}
    settings |= {"data.shuffle_buffer_size": 1}
    run = config_of("qwen2_5_vl", path, tmp_path_factory, **settings, **{"data.max_pixels": 100_000})
    page, _, notes = preview_page(run, count=4, rows_shown=4)
    assert set(re.findall(r" · id (\w+)</header>", page)) == {"wall_0", "wall_3"} | (
        {"wall_2"} if kind == "energon" else set()
    )
    assert ("a.png, 640 × 428" if kind == "jsonl" else "image, 640 × 428") in page
    dropped = re.findall(r"<td>[^<]*</td><td>(\w+)</td><td>[a-z]+_\w+</td><td>", page)
    assert sorted(dropped) == (["2", "wall_1"] if kind == "jsonl" else ["wall_1"])
    # the lines of a run's start, and what was dropped
    unread = [note for note in notes if ": not read in a record: " in note]
    assert len(unread) == (kind == "jsonl") and all(note.endswith(": note") for note in unread)
    assert notes[-1].startswith("dropped samples: {") and "'over_length': 1" in notes[-1]
