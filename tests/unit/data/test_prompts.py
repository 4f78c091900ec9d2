"""Records as prompts for GRPO: what is asked, what rewards get, and that other runs still drop them."""

import json
from datetime import datetime

import pytest
from samples import sample_of
from sources import image_bytes
from transformers import AutoProcessor

from megatron_vlm.batch import IGNORE_INDEX
from megatron_vlm.config import ConfigError, DataConfig, RunConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.shard_format import cook_record, sample_parts
from megatron_vlm.objectives import objective_of
from megatron_vlm.validate import validate

USER = {"role": "user", "content": "<image>How many?"}
RECORDS = {
    "TRL": {"prompt": [USER], "solution": "7"},
    "a text": {"prompt": "<image>How many?", "solution": "7"},
    "turns without a reply": {"messages": [USER], "solution": "7"},
    "turns and their reply": {"messages": [USER, {"role": "assistant", "content": "7"}], "solution": "7"},
    "question and answer": {"question": "<image>How many?", "answer": "7", "solution": "7"},
    "verl": {"prompt": [USER], "reward_model": {"ground_truth": "7", "style": "rule"}, "solution": "7"},
}
WITH_REPLY = ("turns and their reply", "question and answer", "verl")


@pytest.fixture(scope="module")
def encoder(tiny_gemma3):
    run = RunConfig(data=DataConfig(seq_length=512))
    run.train.objective, run.grpo.max_completion_length = "grpo", 100
    encoder = HFEncoderVLMTaskEncoder(AutoProcessor.from_pretrained(tiny_gemma3), run.data)
    encoder.documents = objective_of(run).sample_encoder(encoder.documents, run)
    return encoder


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_asked_up_to_its_reply(encoder, name):
    sample = sample_of(RECORDS[name], [image_bytes(1)])
    document = encoder.documents.encode(sample)
    processor = encoder.processor
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    # behind the image, whose tokens the text does not have
    assert document.input_ids.tolist()[-8:] == ids[-8:]
    assert (document.labels == IGNORE_INDEX).all() and not document.loss_mask.any()
    asked = document.asked
    assert asked["columns"]["solution"] == "7" and asked["items"] == (1, 0) and len(asked["pictures"]) == 1
    assert asked["reference"] == ("7" if name in WITH_REPLY else None)
    assert asked["prompt"] == [{"role": "user", "content": content}]
    assert "images" not in asked["columns"] and "messages" not in asked["columns"]
    json.dumps(asked)
    batch = encoder.make_batch([document, document])
    assert batch["asked"] == [asked, asked]


def test_right_answers_are_those_of_evaluation(encoder):
    thought = "<think>Three and four.</think>\n\n7"
    record = {"messages": [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": thought}]}
    asked = encoder.documents.encode(sample_of(record)).asked
    assert (asked["reference"], asked["references"]) == ("7", ["7"])
    record = {"question": "3 + 4?", "answers": ["7", "seven", "7"]}
    asked = encoder.documents.encode(sample_of(record)).asked
    assert (asked["reference"], asked["references"]) == ("7", ["7", "seven", "7"])


def test_shards_hold_the_columns_of_records(encoder):
    conversation = parse_record(RECORDS["verl"] | {"level": [1, {"a": None}], "taken": datetime.now()})
    parts = sample_parts(conversation, [image_bytes(1)], [])
    keys = {"__key__": "0", "__restore_key__": (), "__subflavors__": None}
    columns = encoder.documents.encode(cook_record(parts | keys)).asked["columns"]
    assert columns == {"solution": "7", "level": [1, {"a": None}]} | {
        "reward_model": RECORDS["verl"]["reward_model"]
    }


@pytest.mark.parametrize("name", [name for name in RECORDS if name not in WITH_REPLY])
def test_a_prompt_alone_is_a_drop_of_every_other_run(tiny_gemma3, name):
    plain = HFEncoderVLMTaskEncoder(AutoProcessor.from_pretrained(tiny_gemma3), DataConfig())
    with pytest.raises(BadSample, match="a question without an answer|no reply to train on"):
        plain.documents.encode(sample_of(RECORDS[name], [image_bytes(1)]))


def test_a_prompt_that_leaves_no_room_for_an_answer_is_dropped(encoder):
    with pytest.raises(BadSample, match="over_length: a prompt of .* leaves 412 beside an answer"):
        encoder.documents.encode(sample_of({"prompt": "word " * 500}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "train.rewards: grpo learns from rewards"),
        ({"data.packing": "stream"}, "data.packing: .* a row is one prompt"),
        ({"grpo.max_completion_length": 4096}, "leaves no room for a prompt in data.seq_length 4096"),
        ({"grpo.reward_weights": [1.0, 2.0]}, "grpo.reward_weights: 2 of them"),
        ({"grpo.delta": 1.1}, "grpo.delta: 1.1 is within the clipping"),
    ],
)
def test_settings_that_do_not_go_together_are_named(settings, message):
    from megatron_vlm.overrides import apply_overrides

    base = {"run_dir": "run", "model.hf_path": "m", "data.train_data_path": "d", "data.dataset_type": "hf"}
    base |= {"train.objective": "grpo"} | ({"train.rewards": "math:sqrt"} if settings else {})
    with pytest.raises(ConfigError, match=message):
        validate(apply_overrides(RunConfig(), base | settings))
