"""M-RoPE positions against numbers written by hand: images, adjacent images, videos with and without time."""

from __future__ import annotations

from functools import partial

import numpy as np
import parity
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.families import load
from megatron_vlm.models.layers.fused import mrope_axes
from megatron_vlm.models.positions import IMAGE, VIDEO, mrope_positions
from tiny.checkpoints import build_tiny_checkpoint

IMG, VID = 8, 9


def kinds_of(ids):
    """The kinds of tokens where placeholders of images and of videos are tokens of their own."""
    return (ids == IMG) * IMAGE + (ids == VID) * VIDEO


by_frame = partial(mrope_positions, kinds=kinds_of, merge_size=2)
by_second = partial(mrope_positions, kinds=kinds_of, merge_size=2, tokens_per_second=2)


def grids(images=(), videos=(), seconds=None) -> GenericVisualInputs:
    return GenericVisualInputs(
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )


def test_time_in_a_video_grows_with_its_seconds_and_text_follows_the_largest_position():
    tokens = torch.tensor([1, VID, VID, VID, VID, VID, VID, 1, 1])
    # 3 steps of 1.25 s at 2 positions a second: 0, 2.5, 5, rounded down; then 1 + 5 + 1
    assert by_second(tokens, grids(videos=[[3, 2, 4]], seconds=[1.25])).tolist() == [
        [0, 1, 1, 3, 3, 6, 6, 7, 8],
        [0, 1, 1, 1, 1, 1, 1, 7, 8],
        [0, 1, 2, 1, 2, 1, 2, 7, 8],
    ]


def test_half_seconds_are_not_rounded_to_whole_ones():
    tokens = torch.tensor([VID, VID, VID, 1])
    assert by_second(tokens, grids(videos=[[3, 2, 2]], seconds=[0.5]))[0].tolist() == [0, 1, 2, 3]


def test_frames_told_apart_by_text_are_placed_like_images():
    tokens = torch.tensor([1, VID, VID, 1, 1, VID, VID, 1])  # <time> frame <time> frame end
    assert by_frame(tokens, grids(videos=[[2, 2, 4]])).tolist() == [
        [0, 1, 1, 3, 4, 5, 5, 7],
        [0, 1, 1, 3, 4, 5, 5, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


def test_images_and_videos_take_their_own_grids_in_turn():
    tokens = torch.tensor([VID, VID, 1, IMG, 1, VID, 1])
    visual = grids([[1, 2, 2]], [[2, 2, 2], [1, 2, 2]], seconds=[2.0, 1.0])
    assert by_second(tokens, visual)[0].tolist() == [0, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("tokens", "images", "message"),
    [
        ([1, IMG, IMG, 1], [[1, 4, 4]], "token 1: 2 placeholders, .* an item of 4 visual tokens"),
        ([IMG, IMG, 1], [[1, 2, 2]], "token 1: 1 placeholders, .* no item left"),
        ([1, 1], [[1, 2, 2]], "1 images or video frames have no placeholders among 2 tokens"),
    ],
)
def test_placeholders_and_grids_that_do_not_match_are_an_error(tokens, images, message):
    with pytest.raises(ValueError, match=message):
        by_frame(torch.tensor(tokens), grids(images))


def test_sections_are_chunks_or_interleaved():
    assert mrope_axes([2, 3, 3], interleaved=False, frequencies=8).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert mrope_axes([4, 2, 2], interleaved=True, frequencies=8).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_sections_of_six_take_the_axes_in_turn_and_interleaved_ones_are_clipped():
    assert mrope_axes([1, 2, 1, 1, 1, 2], interleaved=False, frequencies=8).tolist() == [
        0,
        1,
        1,
        2,
        0,
        1,
        2,
        2,
    ]
    assert mrope_axes([24, 20, 20], interleaved=True, frequencies=4).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        *(("qwen2_5_vl", "iitit"), ("qwen3_vl", "iitit"), ("qwen3_vl", "itvtit")),
        *((family, parts) for family in ("glm4v", "qwen2_vl") for parts in ("iitit", "tvt")),
    ],
)
def test_equal_to_transformers_where_it_is_right(model_type, parts, tmp_path):
    path = build_tiny_checkpoint(model_type, tmp_path / model_type)
    model = AutoModelForImageTextToText.from_pretrained(path)
    conversation = parity.conversation(np.random.default_rng(0), parts)
    outputs = parity.encode_row(AutoProcessor.from_pretrained(path), conversation)
    known = {"input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"}
    expected, _ = model.model.get_rope_index(**{key: outputs[key] for key in known & outputs.keys()})
    visual = {key: outputs[key] for key in load(model_type).visual_keys if key in outputs}
    positions = load(model_type)(model.config).position_ids
    ours = positions(outputs["input_ids"][0], GenericVisualInputs(**visual))
    assert ours.tolist() == expected[:, 0].tolist()
