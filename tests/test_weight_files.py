"""The files of a checkpoint's weights are those that Transformers reads, and whole, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_vlm.config import ConfigError
from megatron_vlm.models.weights import HFCheckpoint
from megatron_vlm.supported import INDEX_FILE, WEIGHT_FILE
from megatron_vlm.weight_files import problems, weight_files

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = {"a": A, "b": B}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two files of two tensors each, and their index."""
    save_file({"a": torch.ones(2), "c": torch.ones(3)}, tmp_path / A)
    save_file({"b": torch.zeros(2), "d": torch.zeros(3)}, tmp_path / B)
    return indexed(tmp_path, {"a": A, "b": B, "c": A, "d": B})


def indexed(folder: Path, weight_map: object) -> Path:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "weight_map",
    [{"a": B, "b": A}, {"a": A, "b": B}, {"a": A, "b": B, "nowhere": B}],
    ids=["the wrong file", "less than the files hold", "more than they hold"],
)
def test_what_files_hold_they_say_themselves_whatever_the_index_says(folder, weight_map):
    found = HFCheckpoint(indexed(folder, weight_map))
    assert found.files == {"a": (A, "a"), "c": (A, "c"), "b": (B, "b"), "d": (B, "d")}
    assert found.shape("d") == [3]


def test_a_tensor_in_two_files_is_refused(folder):
    save_file({"b": torch.zeros(2), "a": torch.zeros(2)}, folder / B)
    with pytest.raises(ValueError, match=rf"a of {B} and a of {A} are the same tensor .*; remove one"):
        _ = HFCheckpoint(folder).files


def test_a_single_file_beside_an_index_of_others_is_refused(folder):
    save_file({"a": torch.zeros(2)}, folder / WEIGHT_FILE)
    with pytest.raises(
        ConfigError, match=r"holds model.safetensors and, by .*, 2 other weight files; remove"
    ):
        weight_files(folder)
    assert weight_files(indexed(folder, {"a": WEIGHT_FILE})) == [WEIGHT_FILE]


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ([], "no JSON with a weight_map; download"),
        (None, "no JSON with a weight_map; download"),
        ({}, "names no file; download"),
        ({"a": 5}, "names 5, which is no file beside it"),
        ({"a": f"../{A}"}, "which is no file beside it"),
        ({"a": f"sub/{A}"}, "which is no file beside it"),
        ({"a": "\x1b[31m/x"}, r"names \\x1b\[31m/x, which"),
    ],
)
def test_an_index_of_no_use_is_refused_by_name(folder, weight_map, said):
    with pytest.raises(ConfigError, match=said):
        weight_files(indexed(folder, weight_map))


def rewrite_header(file: Path, change) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length].decode().rstrip()).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def test_a_header_that_does_not_say_where_each_byte_belongs_is_refused(folder):
    assert not list(problems(folder / A)) and not list(problems(folder / B))
    with (folder / A).open("ab") as file:
        file.write(b"more")
    assert "bytes, its header says" in next(problems(folder / A))
    rewrite_header(folder / B, lambda text: text.replace("[0,8]", "[4,8]"))
    assert "is no safetensors file, or cut short" in next(problems(folder / B))
    with pytest.raises(ValueError, match=rf"{A} is damaged \(.*\); download it again"):
        _ = HFCheckpoint(folder).files
