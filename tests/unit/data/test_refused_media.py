"""Images that a processor or a tower cannot take are dropped with the reason, however they are encoded."""

from __future__ import annotations

import io

import numpy as np
import pytest
from megatron.energon.errors import SkipSample
from pairs import first_soon
from PIL import Image
from samples import sample_of
from transformers import PretrainedConfig, ProcessorMixin
from transformers.image_utils import SizeDict

from megatron_vlm.config import DataConfig
from megatron_vlm.data.chatml.sample import ChatMLSample
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.models.families import load
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus

WAYS = {
    "known": (HFEncoderVLMTaskEncoder, True),
    "by the processor": (HFEncoderVLMTaskEncoder, False),
    "measured first": (PackingVLMTaskEncoder, True),
    "measured first, by the processor": (PackingVLMTaskEncoder, False),
}
# of a picture that any processor takes, and of the longest that data takes at all, in both directions
PLAIN, EXTREME = (90, 60), [(1, 1), (1, 200), (200, 1), (3000, 15), (15, 3000), (2000, 40), (55, 2700)]


def sample(*sizes: tuple[int, int]) -> ChatMLSample:
    files = []
    for width, height in sizes:
        pixels = np.random.default_rng(width + height).integers(0, 255, (height, width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        files.append(file.getvalue())
    turns = [{"role": "user", "content": "<image>" * len(sizes) + "Which?"}]
    turns.append({"role": "assistant", "content": "7"})
    return sample_of(turns, files, key="a")


def made(family: str, settings: dict | None = None, **sizes) -> tuple[ProcessorMixin, PretrainedConfig]:
    """The tiny processor and config of a family; `settings` then change the image processor."""
    parts = TINY_FAMILIES[family]
    processor = parts.processor(default_corpus(100), parts.template, **sizes)
    config = parts.config(processor, {}, {})
    for name, value in (settings or {}).items():
        setattr(processor.image_processor, name, value)
    return processor, config


def outcome(way: str, processor: ProcessorMixin, config: PretrainedConfig, given: ChatMLSample):
    """The encoded sample; or the reason why it was dropped, with its detail."""
    kind, fast = WAYS[way]
    needs = load(config.model_type)(config).data_needs
    encoder = kind(processor, DataConfig(seq_length=100_000), needs, fast=fast)
    try:
        return (
            encoder.encode_document(given) if kind is PackingVLMTaskEncoder else encoder.encode_sample(given)
        )
    except SkipSample:
        (drop,) = encoder.drops.examples()
        assert drop["key"] == "a"
        return drop["reason"], drop["detail"]


# ---- odd but legal settings -------------------------------------------------------------------------------

TILES = {"image_size": 27, "patch_size": 9, "most_a_side": 5, "most_tiles": 1}
SMALL = {"size": SizeDict(shortest_edge=1, longest_edge=4 * 28**2)}
ODD = {
    "features of many tiles resized to those of one": ("llava_onevision", {}, TILES),
    "a longest edge that leaves no pixel of the other": ("mistral3", {}, {"image_size": 28}),
    "multiples of half an image token": ("lighton_ocr", {}, {"multiple": 14}),
    "that edge of LLaVA's Pixtral": ("llava", {}, {"tower": "pixtral", "image_size": 28}),
    "few pixels": ("qwen2_vl", SMALL, {}),
    "few pixels of GLM": ("glm4v", SMALL, {}),
    "pooled patches": ("gemma4", {}, {"pooled": 3, "patch_size": 16}),
    "joined patches": ("gemma4_unified", {}, {"pooled": 3, "patch_size": 16}),
    "few more tokens than the fewest": ("lfm2_vl", {}, {"image_tokens": 8}),
    "tiles of long images": ("lfm2_vl", {}, {"image_tokens": 8, "splitting": True}),
    "many tiles at least": ("internvl", {"min_patches": 3}, {}),
    "crops wider than the image": ("llava", {"size": SizeDict(shortest_edge=20)}, {}),
}
NEVER_DROPS = ("few pixels", "few pixels of GLM", "pooled patches", "many tiles at least")
NEVER_DROPS += ("joined patches", "crops wider than the image")


@pytest.mark.parametrize("name", first_soon(ODD, 4))
def test_every_way_takes_the_same_images(name):
    family, settings, sizes = ODD[name]
    processor, config = made(family, settings, **sizes)
    dropped = 0
    for size in (PLAIN, *EXTREME):
        found = {}
        for way in WAYS:
            if sizes.get("splitting") and "measured" in way:  # refused as a whole: see test_lfm2_vl.py
                continue
            found[way] = outcome(way, processor, config, sample(size))
        reasons = {each[0] for each in found.values() if isinstance(each, tuple)}
        assert reasons <= {"processor_error", "model_refuses"}, (size, found)
        if reasons:
            assert all(isinstance(each, tuple) for each in found.values()) and size != PLAIN, (size, found)
        else:
            ids = [each.input_ids for each in found.values()]
            assert all(each.equal(ids[0]) for each in ids), size
        dropped += bool(reasons)
    assert (dropped == 0) == (name in NEVER_DROPS)


READ_AT_ANY_LENGTH = {"gemma3": True, "llava": True, "smolvlm": True, "gemma4": True, "internvl": True}
READ_AT_ANY_LENGTH |= {"qwen3_vl": False, "glm4v": False}


@pytest.mark.parametrize("family", READ_AT_ANY_LENGTH)
def test_images_over_200_to_1_are_read_unless_the_processor_refuses_them(family):
    processor, config = made(family)
    for size in [(1, 201), (603, 3), (3000, 2)]:
        encoded = [outcome(way, processor, config, sample(size)) for way in WAYS]
        if READ_AT_ANY_LENGTH[family]:
            assert all(each.input_ids.equal(encoded[1].input_ids) for each in encoded)
            continue
        for reason, detail in encoded:
            assert reason == "processor_error" and "aspect ratio must be smaller than 200" in detail


# ---- a processor of another model -------------------------------------------------------------------------


# ---- images in their own size -----------------------------------------------------------------------------
