import json
import os
import pickle

import pytest

from megatron_vlm.data.shard_format import cook_record

TURNS = [{"role": "user", "content": "<image><image>?"}, {"role": "assistant", "content": "x"}]


def cook(**parts):
    names = {name.replace("_", "."): data for name, data in parts.items()}
    return cook_record({"__key__": "a/1", "__restore_key__": ("Webdataset", 1), **names})


def test_images_come_in_the_order_of_their_part_names():
    sample = cook(json=json.dumps(TURNS).encode(), img001_png=b"second", img000_jpg=b"first")
    assert (sample.imgs, sample.problem) == ([b"first", b"second"], None)
    asked = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]
    said = [{"type": "text", "text": "x"}]
    assert sample.messages == [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    assert sample.limits == {"image": [{}, {}], "video": []}
    assert sample.__key__ == "a/1"


def test_the_older_pickled_layout_is_read():
    sample = cook(json=json.dumps(TURNS).encode(), jpgs=pickle.dumps([b"0", b"1"]))
    assert sample.imgs == [b"0", b"1"]


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def protocol_0_global():
    return b"cos\nmkdir\n(S'executed'\ntR."


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.dumps([Payload()]),
        protocol_0_global(),
        b"Pid\n.",
        b"not a pickle",
        pickle.dumps([b"0", b"1"])[:-4],
        pickle.dumps({"0": b""}),
        pickle.dumps(["text"]),
    ],
    ids=["reduce", "global", "persistent", "junk", "truncated", "dict", "text"],
)
def test_anything_but_plain_data_is_refused(pickled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample = cook(json=json.dumps(TURNS).encode(), jpgs=pickled)
    assert sample.problem.reason == "unsafe_pickle"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "parts, reason",
    [
        ({}, "bad_conversation"),
        ({"json": b"{"}, "bad_json"),
        ({"json": b"\xff\xfe"}, "bad_json"),
        ({"json": b'{"images": ["img000.jpg"]}'}, "missing_media"),
        ({"json": b'{"images": "img000.jpg"}', "img000_jpg": b""}, "missing_media"),
        ({"json": b'{"images": []}', "img000_jpg": b""}, "missing_media"),
    ],
)
def test_a_bad_record_carries_its_problem(parts, reason):
    assert cook(**parts).problem.reason == reason
