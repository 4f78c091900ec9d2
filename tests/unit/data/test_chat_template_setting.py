"""`data.chat_template` and its values: rendered as Transformers does, kept by the run and its export."""

import json

import pytest
from jinja2 import TemplateError
from published_templates import CONVERSATIONS, FOLDER, PUBLISHED, TOOLS
from transformers import AutoProcessor

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.fingerprint import check_fingerprint, encoder_settings
from megatron_vlm.data.chatml.record import parse_turns
from megatron_vlm.data.encode.chat_template import names_read, set_chat_template
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.encode.processing import TextEncoder
from megatron_vlm.generation.prompt import processor_outputs
from megatron_vlm.models.hf import Source
from megatron_vlm.models.weights.exporting import write_texts
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus

READ = [
    (name, {key: value})
    for name in PUBLISHED
    for key in ("enable_thinking", "preserve_thinking", "add_vision_id", "keep_thinking")
    if key in names_read((FOLDER / f"{name}.jinja").read_text())
    for value in (False, True)
] + [("qwen3_8", {"reasoning_effort": "low", "enable_thinking": True})]


@pytest.fixture(scope="module")
def processors():
    made = {}

    def of(family):
        if family not in made:
            made[family] = TINY_FAMILIES[family].processor(default_corpus(), "{{ messages }}")
        return made[family]

    return of


@pytest.mark.parametrize(("name", "values"), READ)
def test_ids_are_those_of_transformers_with_template_and_values(processors, name, values):
    processor, text = processors(PUBLISHED[name]), (FOLDER / f"{name}.jinja").read_text()
    set_chat_template(processor, text, values)
    encoder = TextEncoder(processor)
    compared = 0
    for title, turns in CONVERSATIONS.items():
        messages = parse_turns(json.loads(json.dumps(turns)))
        tools = TOOLS if "call" in title else None
        if encoder.chat._needs_parts:
            turns = messages
        try:
            expected, asked = (
                processor.tokenizer.apply_chat_template(
                    json.loads(json.dumps(turns[: len(turns) - is_prompt])),
                    tools=tools,
                    chat_template=text,
                    add_generation_prompt=is_prompt,
                    return_dict=False,
                    **values,
                )
                for is_prompt in (False, True)
            )
        except (TemplateError, TypeError, ValueError):
            continue
        images = 0 if name == "glm4moe" else str(turns).count("'image'")  # a template of texts alone
        prompt = encoder.chat(messages, tools, images)
        next_turn = processor.tokenizer.encode(encoder.chat._next_turn or "", add_special_tokens=False)
        assert encoder.tokenize(prompt).input_ids.tolist() in (expected, expected + next_turn)
        prompt = encoder.chat.prompt(messages[:-1], tools, images)
        assert encoder.tokenize(prompt).input_ids.tolist() == asked
        if not (tools or images or encoder.chat._needs_parts):  # what rollouts and `generate` are made of
            assert processor_outputs(processor, turns[:-1], [])["input_ids"][0].tolist() == asked
        compared += 1
    assert compared > 5


# ---- the settings -----------------------------------------------------------------------------------------


# ---- resume and export ------------------------------------------------------------------------------------


def test_a_state_of_another_template_or_value_is_refused(processors):
    def fingerprint(**values):
        set_chat_template(processors("qwen3_vl"), (FOLDER / "qwen3_5_think.jinja").read_text(), values)
        return encoder_settings(HFEncoderVLMTaskEncoder(processors("qwen3_vl"), DataConfig(seq_length=64)))

    saved = fingerprint(enable_thinking=False)
    check_fingerprint(saved, fingerprint(enable_thinking=False))
    for values in ({}, {"enable_thinking": True}):
        with pytest.raises(ValueError, match="configuration: chat_template: saved"):
            check_fingerprint(saved, fingerprint(**values))


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "processor_config.json"])
def test_transformers_reads_an_exports_own_template(tiny_gemma3, tmp_path, place):
    text = (FOLDER / "gemma4.jinja").read_text()
    source = Source(
        tiny_gemma3, None, DataConfig(chat_template=text, chat_template_kwargs={"enable_thinking": True})
    )
    for file in tiny_gemma3.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / place
    described = json.loads(file.read_text()) if file.exists() else {}
    old = {"chat_template": "{{ 'old' }}"}
    file.write_text(json.dumps(described | old) if file.suffix == ".json" else old["chat_template"])
    assert AutoProcessor.from_pretrained(tmp_path).chat_template == "{{ 'old' }}"
    write_texts(tmp_path, source.own_template, None)
    exported = AutoProcessor.from_pretrained(tmp_path)
    assert exported.chat_template == exported.tokenizer.chat_template == source.processor.chat_template
    assert exported.chat_template.endswith(text) and "set enable_thinking" in exported.chat_template
    assert Source(tiny_gemma3, None).own_template is None
