"""At the start of a run, a line says what the template leaves out of records, and what stays plain text."""

import json

import pytest
from published_templates import CALLS, FOLDER, REPLY, THINKS, TOOLS, USER
from samples import templated

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.hf import HFProvider
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus

PLAIN = {"messages": [USER, REPLY]}
WITH_TOOLS = {"messages": [USER, REPLY], "tools": TOOLS}
CALLING = {"messages": [USER, CALLS, {"role": "tool", "name": "add", "content": "7"}, REPLY]}
THINKING = {"messages": [USER, THINKS]}
THOUGHT_BEFORE = {"messages": [USER, THINKS, USER, REPLY]}


@pytest.fixture(scope="module")
def processor():
    return TINY_FAMILIES["qwen3_vl"].processor(default_corpus(), "{{ messages }}")


def notes(processor, folder, template, *sources, **settings):
    paths = []
    for number, records in enumerate(sources):
        paths.append(str(folder / f"{number}.jsonl"))
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = notes_of(HFProvider, processor, template, paths if len(paths) > 1 else paths[0], **settings)
    return [line.removeprefix(f"data: {folder}/") for line in lines]


def notes_of(provider, processor, template, paths, **settings):
    data = DataConfig(train_data_path=paths, num_workers=0, **settings)
    text = (FOLDER / f"{template}.jinja").read_text()
    encoder = HFEncoderVLMTaskEncoder(templated(processor, text), data)
    loader = provider(data).train_loader(encoder, micro_batch_size=1, rank=0, world_size=1, seed=0)
    loader.close()
    return loader.notes


LEAVES_OUT = "0.jsonl: the template leaves out"


@pytest.mark.parametrize(
    ("template", "records", "note"),
    [
        ("qwen2_5_vl", [PLAIN] * 120, None),
        (
            "qwen2_5_vl",
            [PLAIN, *[WITH_TOOLS] * 3, CALLING],
            "tools of 3, tool calls of 1 of 5 records looked at",
        ),
        ("qwen2_5_vl", [*[PLAIN] * 90, *[THINKING] * 30], "reasoning of 25 of 100 records looked at"),
        ("qwen3_vl", [PLAIN, WITH_TOOLS, CALLING, THINKING], "reasoning of 1 of 4 records looked at"),
        ("qwen3_5_think", [PLAIN, WITH_TOOLS, CALLING, THINKING], None),
        ("qwen3_5_think", [THINKING, THOUGHT_BEFORE], "reasoning of 1 of 2 records looked at"),
    ],
)
def test_what_the_template_leaves_out_is_said(processor, tmp_path, template, records, note):
    assert notes(processor, tmp_path, template, records) == ([f"{LEAVES_OUT} {note}"] if note else [])
