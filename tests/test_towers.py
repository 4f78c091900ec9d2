"""Towers alone: devices, images spread over ranks, and what an image costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.families import FAMILIES, load
from megatron_vlm.models.vision_parallel import balanced_shares

CONFIGS = Path(__file__).parent / "hf_configs"
REAL = {
    "gemma3": "gemma3_vl_4b",
    "mistral3": "ministral3_3b",
    "glm4v_moe": "glm_45v",
    "qwen2_5_vl": "qwen25_vl_3b",
    "qwen3_vl": "qwen3_vl_2b",
    "qwen3_vl_moe": "qwen3_vl_30b_a3b",
}


@pytest.fixture(scope="module", params=FAMILIES)
def family_and_config(request):
    return load(request.param), AutoConfig.from_pretrained(CONFIGS / f"{REAL[request.param]}.json")


def test_towers_put_everything_on_their_device_but_what_the_host_reads(family_and_config):
    """The meta device stands for a GPU: an operation on tensors of two devices fails on either."""
    family, hf_config = family_and_config
    image = GenericVisualInputs(**family.blank_image(hf_config, 64**2))
    with torch.device("meta"):
        vision = family.build_vision(hf_config)
    two = GenericVisualInputs.cat([image, image]).to("meta")
    features = vision(**two.as_model_kwargs())
    assert features.device.type == "meta"
    assert features.shape[-2] == sum(family.visual_tokens(hf_config, two))


def test_images_are_spread_evenly_and_each_once():
    assert balanced_shares([9, 1, 1, 4, 4], 2) == [[0, 2], [1, 3, 4]]
    assert balanced_shares([5], 2) == [[0], []]


def test_items_are_the_inverse_of_cat():
    visual = GenericVisualInputs(
        pixel_values=torch.arange(10.0)[:, None],
        image_grid_thw=torch.tensor([[1, 2, 3], [1, 2, 2]]),
        pixel_values_videos=torch.arange(8.0)[:, None],
        video_grid_thw=torch.tensor([[2, 2, 2]]),
        second_per_grid_ts=torch.tensor([0.5]),
    )
    items = visual.items()
    assert [len(item.as_model_kwargs()) for item in items] == [2, 2, 3]
    assert items[1].pixel_values.flatten().tolist() == [6, 7, 8, 9]
    joined = GenericVisualInputs.cat(items).as_model_kwargs()
    assert joined.keys() == visual.as_model_kwargs().keys()
    assert all(value.equal(getattr(visual, name)) for name, value in joined.items())
