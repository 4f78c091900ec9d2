"""A key that somebody adds to a record has an effect, is named in a line, or drops the record."""

import copy
import json
import re

import pytest
from places import ROOT

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, parse_record
from megatron_vlm.data.chatml.sample import make_sample
from megatron_vlm.data.on_disk import fields

USER, REPLY = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}
CALL = {"id": "t", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
USE = {"type": "tool_use", "id": "t", "name": "look", "input": {"at": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "black"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "a.jpg"}}
LAYOUTS = [
    *map(
        json.loads,
        re.findall(r"^\| [^|]+ \| `(\{.*\})` \|", (ROOT / "docs/how-to/prepare-data.md").read_text(), re.M),
    ),
    {"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}, REPLY]},
    {"messages": [USER, REPLY], "images": [{"image_url": {"url": "a.jpg"}}]},
    {"messages": [USER, REPLY], "videos": [{"frames": [{"path": "1.jpg"}, {"path": "2.jpg"}], "fps": 2}]},
    {"messages": [USER, REPLY], "system": [{"type": "text", "text": "Be brief."}]},
    {"messages": [USER, REPLY | {"tool_calls": [CALL]}]},
    {"messages": [USER, {"role": "tool_call", "content": [CALL["function"]]}, REPLY]},
    {"messages": [USER, REPLY | {"content": [USE]}, {"role": "user", "content": [RESULT]}, REPLY]},
    {"texts": [{"user": "What?", "assistant": "A cat."}]},
    {"prompt": [USER], "chosen": [REPLY], "rejected": [{"role": "assistant", "content": "A dog."}]},
    {"messages": [USER, REPLY], "rejected_messages": [USER, {"role": "assistant", "content": "A dog."}]},
    {
        "messages": [USER, REPLY | {"content": "<bbox>"}],
        "image": "a.jpg",
        "objects": {"bbox": [[1, 2, 3, 4]]},
    },
]


def read(record):
    """What a record says, and the keys that are named as unread; None if it is dropped."""
    try:
        conversation = parse_record(Columns()(record))
        counts = [len(conversation.media[kind]) for kind in ("image", "video")]
        make_sample(conversation, [b""] * counts[0], [b""] * counts[1], __key__="", __restore_key__=())
    except BadSample:
        return None
    if isinstance(conversation.rejected, BadSample):
        return None
    return [conversation.stored(), conversation.media], {key for _, key in conversation.unread}


def objects_in(value):
    """The objects in a record. The arguments of a call are whatever its tool takes."""
    if isinstance(value, dict):
        yield value
        value = [item for key, item in value.items() if key not in ("arguments", "input")]
    for item in value if isinstance(value, list) else ():
        yield from objects_in(item)


@pytest.mark.parametrize("record", LAYOUTS, ids=lambda record: "-".join(record))
def test_an_unknown_key_anywhere_is_named_or_drops_the_record(record):
    assert read(record) is not None
    for place in range(len(list(objects_in(record)))):
        changed = copy.deepcopy(record)
        list(objects_in(changed))[place]["novel"] = "words"
        result = read(changed)
        assert result is None or "novel" in result[1], changed


@pytest.mark.parametrize(
    ("key", "record"),
    [
        ("weight", {"messages": [USER | {"weight": 1}, REPLY]}),
        ("train", {"messages": [USER | {"train": True}, REPLY]}),
        ("references", {"messages": [USER | {"references": ["A dog."]}, REPLY]}),
        ("timestamps", {"messages": [USER, REPLY], "videos": [{"path": "a.mp4", "timestamps": [0, 1]}]}),
        (
            "timestamps",
            {
                "messages": [
                    USER | {"content": [{"type": "video", "video": "a.mp4", "timestamps": [0]}]},
                    REPLY,
                ]
            },
        ),
    ],
)
def test_a_key_without_effect_in_its_place_is_named(key, record):
    assert key in read(record)[1]


def test_what_arrow_adds_is_not_there():
    """A struct of nulls, where another row has an object."""
    part = {"text": "What?", "image_url": {}, "image": {}}
    expected = [[{"type": "text", "text": "What?"}], set()]
    for parts in ([part], [part | {"type": "text"}]):
        stored, unread = read({"messages": [USER | {"content": parts}, REPLY], "meta": {}})
        assert [stored[0]["messages"][0]["content"], unread] == expected


OTHERS = {
    *fields.FIELDS,
    *fields.AUDIO,
    "conversation",
    fields.REWARD,
    "fps",
    "nframes",
    "max_pixels",
    "width",
}


@pytest.mark.parametrize("value", ["words", ["words"], 8, {"words": 1}], ids=repr)
@pytest.mark.parametrize("record", LAYOUTS, ids=lambda record: "-".join(record))
def test_a_known_key_that_this_record_does_not_use_is_named(record, value):
    before = read(record)
    for key in sorted(OTHERS - record.keys()):
        result = read(record | {key: value})
        assert result is None or key in result[1] or result[0] != before[0], key
