"""What is the composed model's alone: images of any size without padding, images in tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import parity
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.image_processors.grid import NaFlex
from megatron_vlm.models.families.lfm2_vl import Lfm2VL
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

SIZES = [(200, 60), (60, 200), (90, 90), (30, 30), (190, 150)]  # width, height

# ---- images of any size -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return build_tiny_checkpoint("lfm2_vl", tmp_path_factory.mktemp("tiny") / "lfm2_vl")


def picture(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(size).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def outputs(tiny) -> dict[str, torch.Tensor]:
    """What the processor makes of images of all SIZES, padded to 96 patches each."""
    text = "<image>" * len(SIZES)
    processor = AutoProcessor.from_pretrained(tiny)
    return dict(processor(text=[text], images=list(map(picture, SIZES)), return_tensors="pt"))


@pytest.fixture(scope="module")
def vision(tiny):
    torch.manual_seed(0)
    return Lfm2VL(AutoConfig.from_pretrained(tiny)).build_vision()


def visual_of(outputs: dict[str, torch.Tensor]) -> GenericVisualInputs:
    ready = NaFlex.unpad(None, outputs)
    return GenericVisualInputs(**{key: ready[key] for key in Lfm2VL.visual_keys})


def test_the_tower_computes_no_padding(outputs, vision):
    """Neither does a batch carry any; the processor's own is a third of all patches here."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].shape[:2]))
        for layer in vision.vision_tower.encoder.layers
    ]
    visual = visual_of(outputs)
    vision(**visual.as_model_kwargs())
    for hook in hooks:
        hook.remove()
    real, padded = int(outputs["spatial_shapes"].prod(-1).sum()), outputs["pixel_attention_mask"].numel()
    assert seen == [(1, real)] * 2 and len(visual.pixel_values) == real
    assert real < 0.7 * padded


def test_position_embeddings_are_those_of_transformers(outputs, vision):
    embeddings, shapes = vision.vision_tower.embeddings, outputs["spatial_shapes"]
    side = embeddings.position_embedding_size
    table = embeddings.position_embedding.weight.reshape(side, side, -1)
    padded = embeddings.resize_positional_embeddings(table, shapes, outputs["pixel_values"].shape[1])
    expected = padded[outputs["pixel_attention_mask"].bool()]
    assert torch.equal(vision._positions(list(map(tuple, shapes.tolist()))), expected)


def test_features_do_not_depend_on_other_images(outputs, vision):
    visual = visual_of(outputs)
    together = vision(**visual.as_model_kwargs())
    apart = torch.cat([vision(**item.as_model_kwargs()) for item in visual.items()])
    assert len(visual.items()) == len(SIZES) and len(together) == len(apart)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


# ---- images in tiles --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cutting(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiles") / "lfm2_vl"
    return build_tiny_checkpoint("lfm2_vl", folder, image_tokens=8, splitting=True)


def compared(path: str, case: dict) -> dict:
    from megatron_vlm.parallel import setup

    layout = parity.LAYOUTS["1 process"][1]
    setup.init_distributed(layout, seed=1)
    return parity.compare(layout, path, case)


def test_images_in_tiles_equal_transformers(cutting):
    case = parity.case_for(cutting, ["it", "ititit"])
    items = len(case["batch"]["visual_inputs"].items())
    assert items > 4  # images
    found = run_distributed(1, compared, str(cutting), case)[0]
    assert found["passed"], found
