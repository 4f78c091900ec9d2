"""Parsers and cookers of the user's own: examples of docs/how-to/extend.md, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sources import image_bytes

from megatron_vlm.config import ConfigError
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, load_media, parse_record
from megatron_vlm.data.encode.chat_template import text_of
from megatron_vlm.data.records.opening import open_table
from megatron_vlm.data.shard_types import SampleRule, media_of, record_of
from megatron_vlm.recipes import load_recipe
from megatron_vlm.validate import validate

RECORDS = Path(__file__).parents[3] / "examples/extend/records.py"


OWN = """def parse(row):
    return row['no such']

def text(row):
    return 'x'
"""


@pytest.fixture
def rows(tmp_path) -> Path:
    (tmp_path / "a.jpg").write_bytes(image_bytes(1))
    lines = [{"picture": "a.jpg", "facts": facts} for facts in (["a cat", "a sofa"], [], ["a dog"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows.jsonl"


def test_the_parser_of_the_example_reads_rows(rows):
    table = open_table(rows, columns=Columns(parser=f"{RECORDS}:scene"))
    record, root = table.record(0)
    conversation = parse_record(record)
    assert [text_of(turn) for turn in conversation.messages] == ["What is there?", "a cat, a sofa"]
    assert load_media(conversation, root)[0] == [image_bytes(1)]
    with pytest.raises(BadSample, match="left_out: data.parser returned None"):
        table.record(1)


def test_a_parser_that_fails_ends_the_run_with_its_line(rows, tmp_path):
    (tmp_path / "own.py").write_text(
        "def parse(row):\n    return row['no such']\n\ndef text(row):\n    return 'x'\n"
    )
    table = open_table(rows, columns=Columns(parser=f"{tmp_path}/own.py:parse"))
    with pytest.raises(ConfigError, match=r"data.parser: .*own.py:parse: KeyError: 'no such' in line 2;"):
        table.record(0)
    table = open_table(rows, columns=Columns(parser=f"{tmp_path}/own.py:text"))
    with pytest.raises(BadSample, match="data.parser returned str, not a record"):
        table.record(0)


def test_another_text_of_the_parser_is_another_dataset(rows, tmp_path):
    identities = []
    for text in ("def parse(row):\n    return row\n", "def parse(row):\n    return row  # changed\n"):
        (tmp_path / "own.py").write_text(text)
        columns = Columns(parser=f"{tmp_path}/own.py:parse")
        identities.append(open_table(rows, columns=columns).identity)
    assert identities[0] != identities[1]


def test_the_cooker_of_the_example_reads_parts():
    lines = json.dumps([{"text": "Total"}, {"text": "7.20"}]).encode()
    parts = {"__key__": "a", "scan.png": image_bytes(1), "lines.json": lines}
    conversation = parse_record(record_of(parts, SampleRule(cooker=f"{RECORDS}:page")))
    assert [text_of(turn) for turn in conversation.messages] == ["Read the page.", "Total\n7.20"]
    assert [media_of(entry, parts) for entry in conversation.media["image"]] == [image_bytes(1)]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "energon",
            {"parser": "own.py:f"},
            "data.parser: is for dataset_type hf; for an energon",
        ),
        ("hf", {"cooker": "own.py:f"}, "data.cooker: is for dataset_type energon; for other"),
        ("hf", {"parser": "own.py:f", "columns": {"images": "a"}}, "data.columns: data.parser gives records"),
    ],
)
def test_settings_of_the_other_kind_of_data_are_refused(kind, settings, message):
    config = load_recipe("gemma3_vl_4b")(train_data_path="x", dataset_type=kind)
    for name, value in settings.items():
        setattr(config.data, name, value)
    with pytest.raises(ConfigError, match=message):
        validate(config)
