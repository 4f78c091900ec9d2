"""What is Ministral3's alone: images of any size, YaRN, queries that grow with their position."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from samples import sample_of
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from megatron_vlm.batch import DataNeeds, GenericVisualInputs
from megatron_vlm.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.models.families.mistral3 import Mistral3
from megatron_vlm.models.vlm import PixelNormalizer
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

SIZES = [(60, 40), (28, 100)]  # width, height


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny_checkpoint("mistral3", tmp_path_factory.mktemp("tiny") / "mistral3")


@pytest.fixture(scope="module")
def hf_config(tiny):
    return AutoConfig.from_pretrained(tiny)


@pytest.fixture(scope="module")
def encoded(tiny):
    """Two images of different sizes side by side in one conversation, encoded as for training."""
    turns = [{"role": "user", "content": "<image><image>Which digit?"}, {"role": "assistant", "content": "7"}]
    sample = sample_of(turns, [jpeg(size) for size in SIZES], key="a")
    return HFEncoderVLMTaskEncoder(
        AutoProcessor.from_pretrained(tiny), DataConfig(seq_length=256), DataNeeds(Mistral3.visual_keys)
    ).encode_sample(sample)


def jpeg(size: tuple[int, int]) -> bytes:
    width, height = size
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def test_queries_grow_with_the_position_in_their_document(hf_config):
    position_ids = torch.tensor([[0, 63, 64, 191, 192, 0, 70]])
    queries, keys = Mistral3(hf_config).rotary()(position_ids)[0]
    once, twice, thrice = (1 + 0.1 * math.log(n) for n in (2, 3, 4))
    expected = torch.tensor([1, 1, once, twice, thrice, 1, once])
    torch.testing.assert_close(queries, keys * expected[:, None, None, None])


def test_rotary_tables_are_those_of_transformers(tiny, hf_config):
    position_ids = torch.arange(1000)[None]
    model = AutoModelForImageTextToText.from_pretrained(tiny).model.language_model
    expected = model.rotary_emb(torch.zeros(1), position_ids)
    keys = Mistral3(hf_config).rotary()(position_ids)[0, -1, :, :, :, 0].transpose(1, 2)
    assert model.rotary_emb.attention_scaling != 1
    for ours, theirs in zip(keys, expected, strict=True):
        assert torch.equal(torch.cat((ours, ours), dim=-1), theirs)  # two channels turn by one angle


def test_image_tokens_stand_in_rows_with_breaks(encoded, tiny):
    tokenizer = AutoProcessor.from_pretrained(tiny).tokenizer
    prompt = tokenizer.decode(encoded.input_ids)
    wide = "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    tall = "[IMG][IMG_BREAK]" * 3 + "[IMG][IMG_END]"
    assert f"[INST]{wide}{tall}Which digit?[/INST]" in prompt
    assert encoded.visual_inputs.image_sizes.tolist() == [[56, 84], [112, 28]]


def test_features_do_not_depend_on_the_padding_or_on_other_images(encoded, tiny, hf_config):
    torch.manual_seed(0)
    vision = Mistral3(hf_config).build_vision()
    normalize = PixelNormalizer(AutoProcessor.from_pretrained(tiny))
    both = GenericVisualInputs(**normalize(encoded.visual_inputs.as_model_kwargs(), torch.float32))
    alone = [
        GenericVisualInputs(
            both.pixel_values[n : n + 1, :, :height, :width], image_sizes=both.image_sizes[n : n + 1]
        )
        for n, (height, width) in enumerate(both.image_sizes.tolist())
    ]
    together = vision(**GenericVisualInputs.cat(alone).as_model_kwargs())
    assert torch.equal(GenericVisualInputs.cat(alone).pixel_values, both.pixel_values)
    apart = torch.cat([vision(**one.as_model_kwargs()) for one in alone])
    assert len(together) == 2 * 3 + 4 * 1
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


def dtypes_in_bf16(path: str) -> list[torch.dtype]:
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    config = AutoConfig.from_pretrained(path)
    [model] = build_model(RunConfig(model=ModelConfig(dtype="bf16")), Mistral3(config), setup.device())
    tower = model.vision.vision_tower
    return [next(tower.parameters()).dtype, tower.patch_positional_embedding.inv_freq.dtype]


def test_the_towers_rotary_frequencies_stay_fp32_in_bf16(tiny):
    assert run_distributed(1, dtypes_in_bf16, str(tiny))[0] == [torch.bfloat16, torch.float32]
