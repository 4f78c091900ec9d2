"""`data.image_processor_kwargs`: Gemma 3's pan and scan, equal to its processor's."""

import io

import pytest
import torch
from PIL import Image
from samples import sample_of
from sources import image
from transformers import AutoConfig

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.generation.prompt import processor_outputs
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_processor

OPTIONS = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 3}
WORDS = {"type": "text", "text": "Which?"}
REPLY = {"role": "assistant", "content": [{"type": "text", "text": "7"}]}


def encoder_of(folder, kind=HFEncoderVLMTaskEncoder, **options):
    data = DataConfig(seq_length=4096, image_processor_kwargs=options)
    return kind(load_processor(folder, data), data, describe(AutoConfig.from_pretrained(folder)).data_needs)


@pytest.mark.parametrize(
    ("sizes", "pictures"), [([(200, 60)], 4), ([(90, 90), (60, 200)], 5), ([(90, 90)], 1), ([], 0)]
)
def test_crops_are_those_of_the_processor(tiny_gemma3, sizes, pictures):
    files = [image(size) for size in sizes]
    encoder = encoder_of(tiny_gemma3, **OPTIONS)
    processor = load_processor(tiny_gemma3)
    asked = {"role": "user", "content": [*[{"type": "image"} for _ in files], WORDS]}
    encoded = encoder.encode_sample(sample_of([asked, REPLY], files))
    shown = [{"type": "image", "image": Image.open(io.BytesIO(file))} for file in files]
    turns = [asked | {"content": [*shown, WORDS]}, REPLY]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    called = {"processor_kwargs": {"images_kwargs": OPTIONS}} if files else {}
    expected = processor.apply_chat_template(turns, **how, **called)
    assert encoded.input_ids.equal(expected["input_ids"][0])
    prompt = processor_outputs(encoder.processor, [asked], files)
    told = processor.apply_chat_template(turns[:1], add_generation_prompt=True, **how, **called)
    assert prompt["input_ids"].equal(told["input_ids"])
    if files:
        assert len(expected["pixel_values"]) == pictures
        assert torch.equal(encoded.visual_inputs.pixel_values, expected["pixel_values"])
