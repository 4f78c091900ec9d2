"""A run goes on only with the data that it began with: what changes a sample changes the fingerprint."""

import json
from copy import copy, deepcopy

import pytest
import torch
from megatron.energon.errors import SkipSample
from noisy_media import picture
from transformers import AutoConfig, AutoProcessor
from transformers.image_utils import SizeDict

from megatron_vlm.config import ConfigError, DataConfig
from megatron_vlm.data.accounts.fingerprint import check_fingerprint, encoder_settings
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.chatml.sample import make_sample
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.models.families import FAMILIES, describe
from tiny.checkpoints import build_tiny_checkpoint

TURNS = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]


def other_values(value):
    """Values that a person could have written in the place of this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float) and value > 0:
        return [2 * value, value // 2 or value / 2]
    if isinstance(value, dict):
        changes = [{key: other} for key, old in value.items() for other in other_values(old)]
        return [SizeDict(**value | change) for change in changes]
    if isinstance(value, list | tuple) and value and isinstance(value[0], float):
        return [[x / 2 for x in value]]
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        return [value[:1]]
    return []


def encoded(processor, needs, images):
    """(fingerprint, samples); a sample that is refused is None, and so are all of a refused processor."""
    try:
        encoder = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=4096), needs)
    except ConfigError:
        return None, None
    samples = []
    for number, image in enumerate(images):
        sample = make_sample(parse_record(TURNS), [image], [], __key__=str(number), __restore_key__=(number,))
        try:
            made = encoder.encode_sample(sample)
            visual = made.visual_inputs.as_model_kwargs()
            samples.append({"ids": made.input_ids, **visual})
        except SkipSample:
            samples.append(None)
    return json.dumps(encoder_settings(encoder), sort_keys=True), samples


def differ(ones, others):
    def same(one, other):
        if one is None or other is None:
            return one is other
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    return not all(map(same, ones, others))


FIRST = ("gemma3", "gemma4", "lfm2_vl", "internvl", "qwen3_vl")  # a family of each kind but two


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FIRST else pytest.mark.soak) for name in FAMILIES]
)
def test_a_setting_that_changes_a_sample_changes_the_fingerprint(family, tmp_path):
    folder = build_tiny_checkpoint(family, tmp_path)
    processor = AutoProcessor.from_pretrained(folder)
    needs = describe(AutoConfig.from_pretrained(folder)).data_needs
    images = [picture(size, "RGB", "PNG", {}) for size in ((64, 48), (300, 200))]
    fingerprint, samples = encoded(processor, needs, images)
    assert any(samples)
    settings = processor.to_dict()
    named = [("image_processor", *setting) for setting in settings["image_processor"].items()]
    named += [("itself", *setting) for setting in settings.items() if not isinstance(setting[1], dict)]
    changing, silent = set(), []
    for part, name, value in named:
        for other in other_values(value):
            changed = copy(processor)
            changed.image_processor = deepcopy(processor.image_processor)
            setattr(getattr(changed, part, changed), name, other)
            now, others = encoded(changed, needs, images)
            if others is not None and any(others) and differ(samples, others):
                changing.add(name)
                if now == fingerprint:
                    silent.append(f"{name}={other}")
    assert len(changing) >= 2
    assert not silent


def test_a_setting_that_was_not_there_is_another_one_unless_transformers_is():
    saved = {"transformers": "6", "processor.image_processor.a": 1}
    now = saved | {"processor.image_processor.b": 2}
    with pytest.raises(ValueError, match="processor.image_processor.b: saved None, now 2. Resume"):
        check_fingerprint(saved, now)
    with pytest.raises(ValueError, match="processor.image_processor.b: saved 2, now None. Resume"):
        check_fingerprint(now, saved)
    check_fingerprint(saved | {"transformers": "5"}, now)
