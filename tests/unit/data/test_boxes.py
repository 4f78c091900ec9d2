"""Boxes are written as each family writes them, where they are in the image as the model sees it."""

import functools
import io
import random
from dataclasses import replace

import numpy as np
import pytest
from pairs import first_soon
from PIL import Image, ImageDraw
from samples import sample_of

from megatron_vlm.batch import GenericVisualInputs, count_up
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, parse_record
from megatron_vlm.data.encode.encoder import DocumentEncoder
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.media.images import decode_pixels, target_size
from megatron_vlm.extras.grounding.boxes import Boxes
from megatron_vlm.extras.grounding.convention import CONVENTIONS
from megatron_vlm.models.families import load
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus

OF_CONFIG = {"gemma4": {"position_embedding_size": 10_240}}
FORMATS = {name: load(name).box_format for name in TINY_FAMILIES}
WITH_BOXES = [name for name, box_format in FORMATS.items() if box_format]
SIZES = [(1, 1), (640, 428), (4000, 30), (30, 4000), (333, 1000), (2000, 1500)]  # (width, height)
LIMITS = [(None, None), (20_000, None), (None, 1_500_000)]  # most and fewest pixels


@functools.cache
def processor_of(family):
    """A processor with the image settings of the published checkpoint."""
    parts = TINY_FAMILIES[family]
    return parts.processor(default_corpus(), parts.template, **(parts.published or {}))


@functools.cache
def needs_of(family):
    config = TINY_FAMILIES[family].config(processor_of(family), {}, OF_CONFIG.get(family, {}))
    return replace(load(family)(config).data_needs, position_ids=count_up)


def encoder_of(family, **settings):
    data = DataConfig(seq_length=100_000, **settings)
    return DocumentEncoder(processor_of(family), data, needs_of(family))


@functools.cache
def png(size, colour=(90, 90, 90)):
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def said(reply):
    return {"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": reply}]}


def record_of(reply, objects, question="<image>Where?", images=1):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"messages": turns, "images": [""] * images, "objects": objects}


def written(encoder, record, *sizes, images=()):
    """The reply of a record as it is trained, without what the template writes around it."""
    sample = sample_of(parse_record(Columns()(record)).stored(), images or [png(size) for size in sizes])
    prompt = encoder._prompt(sample)
    start, stop = prompt.replies[-1]
    # what the template writes for any reply, here and for another
    text, around = prompt.text[start:stop], encoder.chat(SAID, None, 0)
    before, after = around.text[slice(*around.replies[-1])].split("said")
    return text.removeprefix(before).removesuffix(after)


SAID = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "said"}]},
]


# -- where


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("family", [name for name in TINY_FAMILIES if not name.endswith("_moe")])
def test_a_box_is_where_the_model_sees_it(family, alone):
    """A white square is found in the processed pixels, at most a pixel from where its frame puts it."""
    kind = get_image_spec(processor_of(family))
    for width, height in ((640, 428), (300, 500), (900, 900)):
        box = (0.4 * width, 0.45 * height, 0.6 * width, 0.7 * height)
        picture = Image.new("RGB", (width, height))
        ImageDraw.Draw(picture).rectangle((*map(round, box[:2]), *(round(x) - 1 for x in box[2:])), "white")
        item = GenericVisualInputs(**kind.tensors(np.asarray(picture), alone))
        shown = kind.frames(item.items()[kind.overview_index])
        seen = (
            shown[kind.overview_index].float().mean(0).numpy()
        )  # InternVL's items are tiles, OneVision's frames
        frame = kind.frame(width, height, alone)
        assert seen.shape == (frame.height, frame.width)
        bright = seen > 0.75 * seen.max()  # padding may be grey
        rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
        found = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        scale = (frame.image_width / width, frame.image_height / height) * 2
        expected = np.array([round(x) for x in box]) * scale + (frame.left, frame.top) * 2
        assert np.abs(found - expected).max() <= 1, (width, height)


FURTHER = [family for family in WITH_BOXES if family != "qwen3_vl"]
PLAIN = [("mistral3", "pixels"), ("mistral3", "thousandths")]  # as `data.box_format` says


@pytest.mark.parametrize(
    ("family", "named"), first_soon([("qwen3_vl", None), *PLAIN, *((family, None) for family in FURTHER)], 3)
)
def test_boxes_come_back_within_half_a_unit(family, named):
    """Half a pixel of the resized image where these are counted, half a thousandth or hundredth elsewhere."""
    processor, rng, compared = processor_of(family), random.Random(0), 0
    convention, kind = CONVENTIONS[named or FORMATS[family]], get_image_spec(processor)
    for size in SIZES:
        for most, least in LIMITS:
            encoder = encoder_of(family, max_pixels=most, min_pixels=least, box_format=named)
            limited = size if kind.makes_one_size else target_size(size, most, least)
            frame = kind.frame(*limited, True)
            # the part of the image that is seen, in shares
            lower = [max(0, -frame.left / frame.image_width), max(0, -frame.top / frame.image_height)]
            edges = zip(frame[:2], frame[2:4], frame[4:], strict=True)
            upper = [min(1, (end - start) / length) for end, start, length in edges]
            boxes = []
            for _ in range(20):
                shares = [sorted(rng.uniform(*ends) for _ in "ab") for ends in zip(lower, upper, strict=True)]
                boxes.append(
                    [
                        share * side
                        for pair in zip(*shares, strict=True)
                        for share, side in zip(pair, size, strict=True)
                    ]
                )
            text = written(encoder, record_of("<objects>", {"bbox": boxes, "bbox_type": "real"}), size)
            back = encoder.boxes.parse(text, size, max_pixels=most, min_pixels=least)
            ends = frame[:2] if convention.unit is None else [convention.unit * 10**convention.decimals] * 2
            units = [
                end * length / whole / side
                for end, length, whole, side in zip(ends, frame[4:], frame[:2], size, strict=True)
            ]
            assert len(back) == len(boxes)
            for box, found in zip(boxes, back, strict=True):
                away = (np.array(found.numbers) - box) * (units * 2)
                assert np.abs(away).max() <= 0.5 + 1e-6, (size, most, least, box)
                compared += 1
    assert compared == 20 * len(SIZES) * len(LIMITS)


# -- words


MS_SWIFT = [  # docs/source_en/Customization/Custom-dataset.md: both ways to write a record; a size that fits
    (
        "<ref-object><bbox> and <ref-object><bbox> are playing on the beach",
        {
            "ref": ["a dog", "a woman"],
            "bbox": [[331.5, 761.4, 853.5, 1594.8], [676.5, 685.8, 1099.5, 1427.4]],
        },
        (1500, 1800),
        "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>"
        " and <|object_ref_start|>a woman<|object_ref_end|><|box_start|>(451,381),(733,793)<|box_end|>"
        " are playing on the beach",
    ),
    (
        "<bbox><bbox>",
        {"ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8], [360.9, 480.8, 495, 532.8]]},
        (900, 800),
        "<|box_start|>(101,201),(150,266)<|box_end|><|box_start|>(401,601),(550,666)<|box_end|>",
    ),
    (
        "Action: click(start_box='<bbox>')",
        {"ref": [], "bbox": [[615, 226]]},
        (2500, 2000),
        "Action: click(start_box='<|box_start|>(246,113)<|box_end|>')",
    ),
]


@pytest.mark.parametrize(("reply", "objects", "size", "expected"), MS_SWIFT)
def test_records_of_ms_swift_become_what_it_writes_for_qwen2_vl(reply, objects, size, expected):
    question = "<image>Find the <ref-object> in the image" if objects["ref"] == ["sheep"] else "<image>Look."
    encoder = encoder_of("qwen2_vl")
    assert written(encoder, record_of(reply, objects, question), size) == expected
    # its other way, the family's own words in the record, is the same
    assert written(encoder, {**record_of(expected, None), "objects": None}, size) == expected


PUBLISHED = {  # what each source shows, as what a record of thousandths becomes
    # QwenLM/Qwen3-VL, cookbooks/spatial_understanding.ipynb
    "qwen3_vl": ([925, 618], "point_1", '```json\n[\n\t{"point_2d": [925, 618], "label": "point_1"}\n]\n```'),
    # Qwen2-VL's report, arXiv 2409.12191, section 2.2
    "qwen2_vl": (
        [176, 106, 232, 160],
        "the eyes on a giraffe",
        "<|object_ref_start|>the eyes on a giraffe<|object_ref_end|>"
        "<|box_start|>(176,106),(232,160)<|box_end|>",
    ),
    # the scene graph of OpenGVLab/all-seeing, whose words InternVL has
    "internvl": ([290, 202, 835, 851], "bus", "<ref>bus</ref><box>[[290, 202, 835, 851]]</box>"),
    # a record of LLaVA's mix665k, in issue 623 of haotian-liu/LLaVA
    "llava_onevision": ([610, 360, 920, 830], None, "[0.61, 0.36, 0.92, 0.83]"),
    # README.md of zai-org/GLM-V: the quadruple [x1,y1,x2,y2] between both tokens
    "glm4v": ([94, 598, 177, 991], None, "<|begin_of_box|>[94,598,177,991]<|end_of_box|>"),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_words_are_those_that_families_publish(family):
    numbers, label, expected = PUBLISHED[family]
    objects = {"bbox": [numbers], "bbox_type": "norm1000"} | ({"ref": [label]} if label else {})
    assert written(encoder_of(family), record_of("<objects>", objects), (640, 428)) == expected


SEVERAL = {
    "ref": ["cat", "cat", 'a "dog"'],
    "bbox": [[0, 0, 500, 500], [500, 0, 1000, 500], [20, 600, 30, 900]],
}


@pytest.mark.parametrize("family", WITH_BOXES)
def test_an_answer_of_several_boxes_is_read_back(family):
    convention = CONVENTIONS[FORMATS[family]]
    record = record_of("<objects>", SEVERAL | {"bbox_type": "norm1000"})
    text = written(encoder_of(family), record, (500, 500))
    end = 500 if convention.unit is None else 1000
    shares = [[number / 1000 for number in box] for box in SEVERAL["bbox"]]
    found = encoder_of(family).boxes.seen(
        text, get_image_spec(processor_of(family)).frame(500, 500, True)[:2]
    )
    assert np.abs(np.array([each.numbers for each in found]) - shares).max() <= 0.5 / min(end, 100)
    has_labels = convention.keys or convention.label != "{}"
    assert [each.label for each in found] == (SEVERAL["ref"] if has_labels else [None] * 3)


def test_each_image_has_its_own_size_and_limits():
    encoder = encoder_of("qwen2_5_vl", max_pixels=200_000)
    objects = {"bbox": [[0, 0, 2000, 1000]] * 2, "image_id": [1, 0]}
    record = record_of("<bbox> <bbox>", objects, "<image><image>", images=2)
    record["images"] = [{"max_pixels": 5_000}, ""]
    first, second = CONVENTIONS["bbox_2d_pixels"].read(written(encoder, record, (2000, 1000), (2000, 1000)))
    assert (first[0], second[0]) == ([0, 0, 644, 308], [0, 0, 112, 56])


def test_exif_turns_boxes_with_their_image():
    out, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (400, 200)).save(out, "JPEG", exif=turned)
    assert decode_pixels(out.getvalue()).shape == (400, 200, 3)
    record = record_of("<bbox>", {"bbox": [[0, 0, 200, 400]]})
    assert written(encoder_of("qwen3_vl"), record, images=[out.getvalue()]) == "[0, 0, 1000, 1000]"


# -- tokens


# -- nothing wrong in silence

BOX = [1, 2, 30, 40]
WRONG = {
    "a box outside its image": (
        {"bbox": [[1, 2, 65, 40]]},
        "not inside the 64 x 64, in bbox_type real, of image 0",
    ),
    "inverted": ({"bbox": [[30, 2, 1, 40]]}, "x1 < x2"),
    "an image that is not there": ({"bbox": [BOX], "image_id": [1]}, "image 1 of 1"),
    "no placeholder for a box": ({"bbox": [BOX, BOX]}, "no placeholder takes 1 of the bbox and 0 of the ref"),
    "an unknown key": ({"bbox": [BOX], "image_ids": [0]}, "'image_ids' is unknown"),
    "no size": ({"bbox": [BOX], "size": 64}, r"not \[width, height\]"),
    "no name": ({"bbox": [BOX], "name": [["a"]]}, "texts that differ"),
    "a polygon": ({"bbox": [[1, 2, 30, 4, 5, 60]]}, "no list of two or four numbers"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_is_dropped_with_the_reason(wrong):
    objects, detail = WRONG[wrong]
    with pytest.raises(BadSample, match=detail) as caught:
        written(encoder_of("qwen3_vl"), record_of("<bbox>", objects), (64, 64))
    assert caught.value.reason in ("bad_objects", "bad_json")


@pytest.mark.parametrize(
    "objects",
    [
        {"bbox": [[0.1, 0.2, 0.5, 0.6]]},
        {"bbox": [[0, 0, 1, 1], [0.5, 0, 1, 0.25]]},
        {"bbox": [[0.4, 0.4]]},
        [{"box": [0.1, 0.1, 0.9, 0.5]}],
    ],
)
def test_shares_without_a_unit_are_not_taken_for_pixels(objects):
    text = "<bbox>" * len(objects["bbox"] if isinstance(objects, dict) else objects)
    with pytest.raises(BadSample, match="bad_objects.* from 0 to 1.*without a bbox_type.*norm1 .*or real"):
        written(encoder_of("qwen3_vl"), record_of(text, objects), (64, 64))
    named = [one | {"bbox_type": "real"} for one in objects] if isinstance(objects, list) else None
    written(encoder_of("qwen3_vl"), record_of(text, named or objects | {"bbox_type": "real"}), (64, 64))


def test_a_family_without_a_convention_takes_the_setting():
    record = record_of("<bbox>", {"bbox": [BOX]})
    with pytest.raises(BadSample, match="no_box_format: this family publishes no way"):
        written(encoder_of("mistral3"), record, (64, 64))
    assert written(encoder_of("mistral3", box_format="bbox_2d"), record, (64, 64)) == "[16, 31, 469, 625]"


def test_pixels_are_refused_where_the_resize_is_not_known():
    processor = TINY_FAMILIES["qwen3_vl"].processor(default_corpus(), TINY_FAMILIES["qwen3_vl"].template)
    processor.image_processor.do_resize = False
    boxes = Boxes(processor, DataConfig(box_format="pixels"), None)
    with pytest.raises(BadSample, match="no_box_format.*do_resize"):
        boxes.parse("[1, 2, 3, 4]", (64, 64))


# -- every way to a sample
