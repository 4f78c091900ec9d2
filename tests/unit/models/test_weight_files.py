"""The files of a checkpoint's weights are those that Transformers reads, and whole, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.modeling_utils import _get_resolved_checkpoint_files

from megatron_vlm.config import ConfigError
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.supported import INDEX_FILE, WEIGHT_FILE
from megatron_vlm.weight_files import header, weight_files

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


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
    assert {key: tensor.file for key, tensor in found.files.items()} == {"a": A, "c": A, "b": B, "d": B}
    assert found.shape("d") == [3]


def test_a_single_file_goes_before_an_index_as_in_transformers(folder):
    save_file({"a": torch.zeros(2)}, folder / WEIGHT_FILE)
    assert weight_files(folder) == [WEIGHT_FILE]
    names, _ = _get_resolved_checkpoint_files(folder, None, None, True, None, False)
    assert names == [str(folder / WEIGHT_FILE)]


def rewrite_header(file: Path, change) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length].decode().rstrip()).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


MANY = str([99999] * 20_000)  # axes: their product costs the square, which no such tensor is worth


def test_a_header_that_does_not_say_where_each_byte_belongs_is_refused(folder):
    assert header(folder / A)[0].keys() == {"a", "c"}
    with (folder / A).open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConfigError, match="is no whole safetensors file"):
        _ = HFCheckpoint(folder).files
    for old, new in (
        ("[0,8]", "[4,8]"),
        ("[2]", "[-2]"),
        ("[2]", "[1e400]"),
        ("[2]", "[99999999999, 0]"),
        ("[2]", MANY),
    ):
        whole = (folder / B).read_bytes()
        rewrite_header(folder / B, lambda text, old=old, new=new: text.replace(old, new))
        assert (folder / B).read_bytes() != whole
        with pytest.raises(ConfigError, match="is no whole safetensors file"):
            header(folder / B)
        (folder / B).write_bytes(whole)


def test_a_good_file_is_read_whatever_the_length_of_its_header(tmp_path):
    """Some lengths begin as files of other kinds do: 640 as a pickle."""
    file = tmp_path / WEIGHT_FILE
    tensors = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    for length in range(8, 4097):
        text, values = (tensors, b"\0" * 4) if length >= len(tensors) else (b"{}", b"")
        file.write_bytes(length.to_bytes(8, "little") + text.ljust(length) + values)
        with safe_open(file, "pt") as opened:
            assert header(file) == (json.loads(text), 8 + length)
            assert {*opened.keys()} == {*json.loads(text)}


# ---- the forms in which tensors are stored ----------------------------------------------------------------

KEY = "layers.0.down_proj.weight"
SCALE = KEY + "_scale_inv"
BYTES = torch.tensor([0, 1, 60, 126, 127, 128, 140, 200], dtype=torch.uint8)


def quantised(folder: Path, size: Any, tensors: dict[str, torch.Tensor]) -> HFCheckpoint:
    """A checkpoint of these tensors, whose config.json has this weight_block_size."""
    how = {"quant_method": "fp8", "weight_block_size": size}
    (folder / "config.json").write_text(json.dumps({"quantization_config": how}))
    save_file(tensors, folder / WEIGHT_FILE)
    return HFCheckpoint(folder)


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("shape", "size", "grid"),
    [
        ((2112, 704), [128, 128], (17, 6)),  # sizes of Gemma 4 26B-A4B
        ((130, 10944), [128, 128], (2, 86)),  # of GLM-4.5V
        ((256, 128), [128, 128], (2, 1)),
        ((8, 64), [1, 32], (8, 2)),
        ((12, 6), None, (4, 2)),
        ((12, 6), None, ()),
        ((12, 6), [4, 4], (1, 1)),
        ((3, 12, 6), [8, 4], (3, 2, 2)),
        ((3, 12, 6), None, (3, 1, 1)),
    ],
)
def test_fp8_is_multiplied_by_the_scale_of_its_block(tmp_path, shape, size, grid):
    values, scale = fp8(*shape), torch.rand(grid) + 0.5
    found = quantised(tmp_path, size, {KEY: values, SCALE: scale}).slices(KEY)
    blocks = size or [length // count for length, count in zip(shape[-2:], scale.shape[-2:], strict=False)]
    if math.prod(grid) > 1:  # an oracle: each scale as often as its block has rows and columns
        for axis, block in zip((-2, -1), blocks, strict=True):
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, shape[axis])
    expected = values.float() * scale
    assert torch.equal(found[...], expected)
    assert torch.equal(found[2], expected[2]) and torch.equal(found[1:3, 2:5], expected[1:3, 2:5])
    assert torch.equal(found[(slice(0, 2),)], expected[:2])


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "exponents", "bytes"])
def test_scales_are_read_by_their_type_and_name_as_transformers_does(tmp_path, name, kind):
    values, e = fp8(16, 8), BYTES.reshape(4, 2)
    scale = {"exponents": e.view(torch.float8_e8m0fnu), "bytes": e}.get(kind)
    scale = torch.rand(4, 2).to(getattr(torch, kind)) if scale is None else scale
    tensors = {KEY: values, KEY.replace("weight", name): scale}
    tensors[KEY.replace("weight", "activation_scale")] = torch.tensor(3.0)
    found = quantised(tmp_path, None, tensors)
    assert list(found.files) == [KEY] and found.is_fp8
    theirs = Fp8Dequantize(None)._dequantize_one(values, scale, torch.float32)
    assert torch.equal(found.slices(KEY)[...], theirs)
    if kind in ("exponents", "bytes"):
        exact = torch.tensor([2.0**-127, 2.0**-126, 2.0**-67, 0.5, 1, 2, 2.0**13, 2.0**73]).reshape(4, 2)
        assert torch.equal(theirs, values.float() * exact.repeat_interleave(4, 0).repeat_interleave(4, 1))


def with_scale(scale: torch.Tensor, *shape: int) -> dict[str, torch.Tensor]:
    return {KEY: fp8(*shape), SCALE: scale}


@pytest.mark.parametrize(
    ("size", "tensors", "said"),
    [
        (None, {KEY: fp8(4, 4)}, rf"'{KEY}' is stored as F8_E4M3 without a scale; only"),
        (
            None,
            {KEY: fp8(4).view(torch.float8_e5m2)},
            "is stored as F8_E5M2; only floating-point numbers",
        ),
        (None, {KEY: BYTES.to(torch.int8)}, "is stored as I8; .* take the checkpoint in bf16"),
        (
            [128, 128],
            with_scale(torch.ones(4, 2), 256, 512),
            rf"'{KEY}' .* \[256, 512\], its .*_inv' as F32 \[4, 2\]",
        ),
        (None, with_scale(torch.ones(3, 4), 256, 512), r"_inv' as F32 \[3, 4\], for blocks of equal sizes"),
        (None, with_scale(torch.ones(2), 8), r"_inv' as F32 \[2\], for"),
        (None, with_scale(torch.ones((), dtype=torch.int32), 4, 4), "its scale .*_inv' as I32"),
        ([0, 1], with_scale(torch.ones(2, 2), 4, 4), r"for blocks of \[0, 1\]"),
    ],
)
def test_a_form_that_is_not_read_is_refused_by_name(tmp_path, size, tensors, said):
    folder = quantised(tmp_path, size, tensors).folder
    with pytest.raises(ConfigError, match=said):
        _ = HFCheckpoint(folder).files
