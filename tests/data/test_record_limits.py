"""Pixel and frame limits that a record names, within those of the run."""

import io
from pathlib import Path

import numpy as np
import pytest
from grey_media import steady
from loaders import arguments_of
from PIL import Image
from samples import sample_of

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.conversation.chatml import clean
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.records.normalise import normalise, read_record
from tiny.checkpoints import build_tiny_checkpoint

SMALL, LARGE = 60 * 60, 90 * 90


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return arguments_of("qwen3_vl", build_tiny_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def picture():
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (140, 120, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def encoded(arguments, record, packing=True, **settings):
    """In two steps, which raises unless what is measured is what is encoded."""
    encoder = PackingVLMTaskEncoder if packing else HFEncoderVLMTaskEncoder
    data = DataConfig(seq_length=2048, **settings)
    talk, images, videos = read_record(record, Path())
    sample = sample_of(talk, images, videos=videos)
    return (
        encoder(data=data, **arguments).documents.encode(sample)
        if not packing
        else (encoder(data=data, **arguments).encode_document(sample))
    )


def same(one, other):
    fields = (one.visual_inputs.as_model_kwargs(), other.visual_inputs.as_model_kwargs())
    assert one.input_ids.equal(other.input_ids) and fields[0].keys() == fields[1].keys()
    assert all(value.equal(fields[1][name]) for name, value in fields[0].items())


def turns(question):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "the cat."}]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("limit", ["max_pixels", "min_pixels"])
def test_an_image_has_the_limits_that_its_record_names(arguments, picture, limit, packing):
    pixels = {"max_pixels": SMALL, "min_pixels": 200 * 200}[limit]
    plain = {"images": [picture], "messages": turns("<image>a chart?")}
    expected = encoded(arguments, plain, packing, **{limit: pixels})
    assert not encoded(arguments, plain, packing).input_ids.equal(expected.input_ids)
    entry = plain | {"images": [{"bytes": picture, limit: pixels}]}
    part = plain | {"messages": turns([{"type": "image", limit: float(pixels)}, "a chart?"])}
    unplaced = entry | {"messages": turns("a chart?")}
    for record in (entry, part, unplaced):
        same(encoded(arguments, record, packing), expected)


def test_each_image_has_its_own_and_none_leaves_the_limits_of_the_run(arguments, picture):
    wishes = [{"max_pixels": SMALL}, {}, {"max_pixels": 10**6}, {"min_pixels": 10**6}, {"max_pixels": 1}]
    images = [{"bytes": picture} | wish for wish in wishes]
    run = {"max_pixels": LARGE, "min_pixels": SMALL}
    found = encoded(arguments, {"images": images, "messages": turns("<image>" * 5)}, **run)
    alone = [
        encoded(arguments, {"images": [picture], "messages": turns("<image>")}, max_pixels=pixels)
        for pixels in (SMALL, LARGE, LARGE, LARGE, SMALL)
    ]
    grids = [one.visual_inputs.image_grid_thw[0].tolist() for one in alone]
    assert found.visual_inputs.image_grid_thw.tolist() == grids and grids[0] != grids[1]


@pytest.mark.parametrize("limit", [{"fps": 1}, {"max_frames": 4}, {"max_pixels": SMALL}])
def test_a_video_has_the_limits_that_its_record_names(arguments, limit):
    video = steady(40, size=(96, 80))  # 4 seconds
    plain = {"videos": [video], "messages": turns("<video>a chart?")}
    [(name, value)] = limit.items()
    run = {"video_fps": 2.0, "video_max_pixels": 90 * 80}
    expected = encoded(arguments, plain, **run | {f"video_{name}": value})
    assert not encoded(arguments, plain, **run).input_ids.equal(expected.input_ids)
    for value in (limit, {"type": "video"} | limit):
        record = plain | {"videos": [{"bytes": video} | limit]}
        if "type" in value:
            record = plain | {"messages": turns([value, "a chart?"])}
        same(encoded(arguments, record, **run), expected)
    same(
        encoded(arguments, plain | {"videos": [{"bytes": video, name: 10**6}]}, **run),
        encoded(arguments, plain, **run),
    )


def test_the_fps_of_a_list_of_frames_is_no_limit(picture):
    conversation, _ = normalise({"messages": turns("<video>"), "videos": [{"frames": [picture], "fps": 1}]})
    assert "video_limits" not in conversation


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"max_pixels": "many"}, "image has max_pixels 'many', not a positive whole number"),
        ({"max_pixels": 0}, "max_pixels 0,"),
        ({"max_pixels": True}, "max_pixels True,"),
        ({"min_pixels": 2.5}, "min_pixels 2.5,"),
        ({"max_pixels": float("inf")}, "max_pixels inf,"),
        ({"max_pixels": 5, "min_pixels": 9}, "min_pixels 9 over max_pixels 5"),
    ],
)
def test_limits_that_are_none_are_named(picture, wrong, said):
    entry, _ = normalise({"images": [{"bytes": picture} | wrong], "messages": turns("<image>")})
    for conversation in (entry, turns([{"type": "image"} | wrong])):
        with pytest.raises(BadSample, match="bad_conversation.*" + said):
            clean(conversation, images=1)
    with pytest.raises(BadSample, match="image_limits is no list of an object for each image"):
        clean({"messages": turns("<image>"), "image_limits": [{}, {}]}, images=1)


def test_a_processor_with_one_size_for_all_images_says_so(tiny_gemma3, picture):
    record = {"images": [{"bytes": picture, "max_pixels": SMALL}], "messages": turns("<image>a chart?")}
    with pytest.raises(
        BadSample, match="processor_error: Gemma3Processor makes all images one size: max_pixels"
    ):
        encoded(arguments_of("gemma3", tiny_gemma3), record, packing=False)
