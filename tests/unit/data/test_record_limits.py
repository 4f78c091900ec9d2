"""Pixel and frame limits that a record names, within those of the run."""

import io
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from grey_media import steady
from loaders import arguments_of
from PIL import Image
from samples import read_record, sample_of

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import limits_of
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.media.videos import VideoRules, choose_clip, plan_video, rules_of_video
from megatron_vlm.data.run_data import RunData
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes import load_recipe
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


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_limit_of_the_run_without_effect_is_named_at_the_start(tmp_path, picture, family):
    """Where it has none, the tokens and the pixels are those of a run without it."""
    arguments = arguments_of(family, build_tiny_checkpoint(family, tmp_path / "checkpoint"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns("Which?")}) + "\n")
    recipe = load_recipe("gemma3_tiny_digits")(
        dataset_type="hf", train_data_path=str(tmp_path / "rows.jsonl"), run_dir=str(tmp_path / "run")
    )
    notes = []
    for limits in ({}, {"data.max_pixels": SMALL}, {"data.min_pixels": 4, "data.max_pixels": SMALL}):
        config = apply_overrides(recipe, limits | {"data.num_workers": 0})
        data = RunData(config, arguments["processor"], arguments["needs"], 0, 1)
        notes.append([note for note in data.notes if "no effect" in note])
        data.close()
    record = {"images": [picture], "messages": turns("<image>a chart?")}
    limited = encoded(arguments, record, max_pixels=SMALL)
    if family == "qwen3_vl":
        assert notes == [[], [], []]
        assert not encoded(arguments, record).input_ids.equal(limited.input_ids)
        return
    ending = "no effect, as Gemma3Processor makes all images one size; remove it."
    names = ("data.max_pixels", "data.min_pixels and data.max_pixels")
    assert notes == [[], *([f"{name}: {ending}"] for name in names)]
    same(encoded(arguments, record), limited)


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


@pytest.mark.parametrize(
    "limit, frames",
    [
        ({"fps": 1}, [0, 13, 26, 39]),
        ({"max_frames": 4}, [0, 13, 26, 39]),
        ({"fps": 10**6}, range(40)),
        ({"nframes": 6}, [0, 8, 16, 23, 31, 39]),
        ({"num_frames": 6}, [0, 8, 16, 23, 31, 39]),
        ({"video_start": 1, "video_end": 3.0, "nframes": 4}, [10, 17, 23, 30]),
        ({"video_start": 2.05, "min_frames": 6, "fps": 0.1}, [21, 25, 28, 32, 35, 39]),
    ],
)
def test_a_video_has_the_frames_that_its_record_names(arguments, limit, frames):
    """The frames are those of qwen-vl-utils; the run limits their number and pixels."""
    video = steady(40, size=(96, 80))  # 4 seconds
    plain = {"videos": [video], "messages": turns("<video>a chart?")}
    rules = rules_of_video(limits_of("video", limit), VideoRules(), is_list=False)
    expected = plan_video(video, rules)
    assert expected.times == pytest.approx([frame / 10 for frame in frames])
    part = plain | {"messages": turns([{"type": "video"} | limit, "a chart?"])}
    named = encoded(arguments, part)
    same(encoded(arguments, plain | {"videos": [{"bytes": video} | limit]}), named)
    if "fps" not in limit:  # beside the turns that is a fact about the file
        same(encoded(arguments, plain | limit), named)
        same(encoded(arguments, {"videos": [], **part, "video": video}), named)
    if len(frames) > 4:
        few = encoded(arguments, part, video_max_frames=4).visual_inputs.video_grid_thw
        assert few[0, 0] == 2


def test_frames_are_chosen_as_qwen_vl_utils_chooses_them():
    """Its two functions, on 4,000 random clips; where it raises, the clip is dropped."""
    from qwen_vl_utils.vision_process import calculate_video_frame_range, smart_nframes

    random = Random(5)
    kept = 0
    for _ in range(4000):
        count, rate = random.randint(2, 400), random.choice([1, 10, 24, 25, 29.97, 30, 59.94])
        named = {}
        if random.random() < 0.7:
            named["video_start"] = round(random.uniform(0, count / rate), random.choice([0, 1, 3]))
        if random.random() < 0.7:
            named["video_end"] = round(random.uniform(0, 1.2 * count / rate), random.choice([0, 1, 3]))
        if random.random() < 0.5:
            named["nframes"] = random.randint(1, 60)
        else:
            named |= {"fps": random.choice([0.5, 1, 2, 4.0]), "max_frames": random.randint(4, 40)}
            named |= random.choice([{}, {"min_frames": 2}, {"min_frames": 4}])
        try:
            first, last, length = calculate_video_frame_range(named, count, rate)
            wanted = torch.linspace(first, last, smart_nframes(named, length, rate)).round().long().tolist()
        except (ValueError, UnboundLocalError):
            wanted = None
        try:
            limits = limits_of("video", named)
            rules = rules_of_video(limits | {"nframes": limits.get("nframes")}, VideoRules(), is_list=False)
            chosen, _ = choose_clip(count, rate, rules)
        except BadSample:
            chosen = None
        kept += chosen is not None
        if wanted is not None or chosen is None:
            assert chosen == wanted, (named, count, rate)
    assert kept > 1000
