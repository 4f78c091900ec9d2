"""Images in tiles, and frames that are images of one tile: LLaVA-OneVision's and InternVL's."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from grey_media import frame_list, picture
from PIL import Image
from samples import sample_of
from sources import image
from transformers import AutoConfig, AutoProcessor

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.models.families import describe
from megatron_vlm.models.vlm import PixelNormalizer
from tiny.checkpoints import build_tiny_checkpoint

FAMILIES = ["internvl", "llava_onevision"]
LENGTH = 4096


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return build_tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)


def encoder_of(folder: Path, packing: bool = False, seq_length: int = LENGTH, fast: bool = True, **options):
    needs = describe(AutoConfig.from_pretrained(folder)).data_needs
    kind = PackingVLMTaskEncoder if packing else HFEncoderVLMTaskEncoder
    data = DataConfig(seq_length=seq_length, video_fps=2.0, **options)
    return kind(AutoProcessor.from_pretrained(folder), data, needs, fast=fast)


def visual_of(folder: Path, outputs: dict) -> dict[str, torch.Tensor]:
    made = get_image_spec(AutoProcessor.from_pretrained(folder)).unpad(outputs)
    visual_keys = describe(AutoConfig.from_pretrained(folder)).visual_keys
    return {key: made[key] for key in visual_keys if key in made}


def check_visual(encoder, encoded, expected: dict[str, torch.Tensor]) -> None:
    raw = encoded.visual_inputs.as_model_kwargs()
    found = PixelNormalizer(encoder.processor)(raw, torch.float32)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("sizes", [[(200, 60)], [(90, 90), (60, 200)], [(44, 44)]])
def test_images_are_those_of_apply_chat_template(folder, sizes):
    """It hands the processor all images of a conversation together: OneVision's are in tiles only alone."""
    files = [image(size) for size in sizes]
    words = {"type": "text", "text": "Which?"}
    asked = {"role": "user", "content": [{"type": "image"} for _ in files] + [words]}
    turns = [asked, {"role": "assistant", "content": [{"type": "text", "text": "7"}]}]
    given = sample_of(turns, files, key="a")
    encoder = encoder_of(folder)
    encoded = encoder.encode_sample(given)
    pictures = ({"type": "image", "image": Image.open(io.BytesIO(file))} for file in files)
    turns[0]["content"] = [*pictures, words]
    expected = encoder.processor.apply_chat_template(
        turns, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert encoded.input_ids.equal(expected["input_ids"][0])
    check_visual(encoder, encoded, visual_of(folder, dict(expected)))
    if folder.name == "llava_onevision":
        tiles = encoded.visual_inputs.image_tiles.tolist()
        assert (tiles == [1, 1]) if len(sizes) > 1 else (tiles[0] > 1)


def test_truncation_keeps_whole_images_and_videos_at_every_length(folder):
    turns = [
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "<video>Which one?<image>And this?<video>"},
        {"role": "assistant", "content": "A cat jumps."},
    ]
    given = sample_of(turns, [picture(3)], videos=[frame_list(3), frame_list(3)], key="a")
    whole = encoder_of(folder).encode_sample(given)
    encoder, kept = encoder_of(folder), set()
    hf_config = AutoConfig.from_pretrained(folder)
    count = describe(hf_config).visual_tokens
    for length in range(4, len(whole.input_ids) + 1, 5):
        encoder = encoder_of(folder, seq_length=length, over_length="truncate", packing=True)
        cut = encoder.postencode_sample(encoder.preencode_sample(given))
        assert cut.input_ids.equal(whole.input_ids[: len(cut.input_ids)]) and len(cut.input_ids) <= length
        placed = sum(int((cut.input_ids == token).sum()) for token in tokens_of(hf_config))
        features = 0 if cut.visual_inputs is None else sum(count(cut.visual_inputs))
        assert placed == features
        kept.add(features)
    assert len(kept) == 4  # nothing, the first video, and the image, and the second video


def tokens_of(hf_config) -> set[int]:
    return {hf_config.image_token_id, getattr(hf_config, "video_token_id", hf_config.image_token_id)}
