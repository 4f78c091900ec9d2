"""The files of a checkpoint, without torch: which safetensors it has, and whether all files can be read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_vlm.config import ConfigError
from megatron_vlm.files import open_file, read_file
from megatron_vlm.messages import odd_fields, printable
from megatron_vlm.signatures import START, explain
from megatron_vlm.supported import CONFIG_FILE, GENERATION_FILE, INDEX_FILE, WEIGHT_FILE, any_config

# the forms of tensors that are read
FLOATS, FP8 = ("F64", "F32", "F16", "BF16"), "F8_E4M3"
EXPONENTS = ("F8_E8M0", "U8")  # of scales, which are 2 ** (e - 127)
# how the key of a scale ends -> how that of its FP8 tensor does: as Transformers writes it, and as AutoFP8,
# DeepSeek-V4 and Mistral do; and the same of scales of activations, which training does not need
SCALES = {"_scale_inv": "", "_scale": "", ".scale": ".weight", ".qscale_weight": ".weight"}
UNREAD = dict.fromkeys((".activation_scale", ".input_scale", ".qscale_act"), ".weight")
UNREAD["_activation_scale"] = ""
# buffers that models make themselves and older files hold; Transformers ignores them, too
# (`PreTrainedModel._adjust_missing_and_unexpected_keys`)
OF_THE_MODEL = re.compile(r"(^|\.)(position_ids|(original_)?inv_freq)$")
MOST_HEADER = 100_000_000  # bytes, as in safetensors
MOST_AXES = 8
DESCRIPTIONS = (  # that Transformers reads, of tokenizer, processor and generation
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", GENERATION_FILE),
)
MOST_PARSED = 1 << 20  # bytes
PROCESSORS = ("image_processor", "video_processor")  # keys in processor_config.json
TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask", "image", "video", "boi", "eoi")
POSITIVE = ("image_std", "rescale_factor", "patch_size", "merge_size", "temporal_patch_size", "max_pixels")
# what these keys hold: Transformers names few of them; of others, the file is named (`models.hf`)
HELD = {
    "eos_token_id": int | list[int] | None,
    **dict.fromkeys((*PROCESSORS, "added_tokens_decoder", "auto_map"), dict | None),
    **dict.fromkeys(("image_mean", "image_std"), int | float | list[int | float] | None),
    "size": dict | int | list[int] | None,
    "image_seq_length": int | None,
    **dict.fromkeys([f"{name}_token" for name in TOKENS], str | dict | None),
    **dict.fromkeys([f"{name}_type" for name in PROCESSORS], str | None),
    **dict.fromkeys(("tokenizer_class", "processor_class"), str | None),
    "chat_template": str | dict | list | None,
    "extra_special_tokens": list[str | dict] | dict[str, str | dict] | None,
    "additional_special_tokens": list[str | dict] | None,
    "model_input_names": list[str] | None,
    "add_prefix_space": bool | None,
    "padding_side": Literal["left", "right"],
}


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights that `weight_files` names, or should."""
    return any((folder / name).is_file() for name in (WEIGHT_FILE, INDEX_FILE))


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold a checkpoint's weights, in its own folder.

    An index only tells which files there are; the files tell what they hold, as in Transformers. Raises
    ConfigError for an index that is unusable, or that names other files than the single one beside it.
    """
    index, single = folder / INDEX_FILE, folder / WEIGHT_FILE
    if not index.is_file():
        if not single.is_file():
            raise FileNotFoundError(
                f"{printable(folder)}: neither {WEIGHT_FILE} nor {INDEX_FILE}; save it as safetensors first"
            )
        return [WEIGHT_FILE]
    names = _named_by(index)
    if single.is_file() and names != [WEIGHT_FILE]:  # Transformers reads the single file, others the index
        raise ConfigError(
            f"{printable(folder)} holds {WEIGHT_FILE} and, by {INDEX_FILE}, {len(names)} other weight files; "
            "remove those that are not the model's."
        )
    return names


def _named_by(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(read_file(index))["weight_map"].values()))
        usable = bool(names) and all(Path(name).name == name for name in names)
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        usable = False
    if not usable:
        raise ConfigError(
            f"{printable(index)} is no JSON with a weight_map to files beside it; put all weights into that "
            "folder, or download it again."
        )
    return names


class OnDisk(NamedTuple):
    """A tensor as a safetensors file has it; `blocks` says, for an FP8 tensor with several scales, which of
    them each position of each axis has."""

    file: str
    key: str
    dtype: str
    shape: list[int]
    scale: OnDisk | None = None
    blocks: tuple[tuple[int, ...], ...] = ()


def tensors_of(folder: Path, name: Callable[[str], str] = str) -> dict[str, OnDisk]:
    """A checkpoint's tensors by the `name` of their key, FP8 ones with their scales.

    Raises ConfigError for a file that is not whole, a tensor that is there twice, and one whose form is none
    that is read: what this function lets pass, import takes as the numbers that were meant.
    """
    tensors: dict[str, OnDisk] = {}
    for file in weight_files(folder):
        for key, entry in header(folder / file)[0].items():
            if OF_THE_MODEL.search(key):
                continue
            tensor = OnDisk(file, key, entry["dtype"], entry["shape"])
            if (twin := tensors.setdefault(name(key), tensor)) is not tensor:
                raise ConfigError(
                    f"{printable(folder)}: {printable(key)} of {file} and {printable(twin.key)} of "
                    f"{twin.file} are the same tensor of the model; remove one of them."
                )
    scaled = {key: of for key in tensors if (of := _scaled(key, tensors))}
    scales: dict[str, OnDisk] = {}
    for key, of in scaled.items():
        if not key.endswith(tuple(UNREAD)) and scales.setdefault(of, tensors[key]) is not tensors[key]:
            both = f"{printable(key)} and {printable(scales[of].key)}"
            raise ConfigError(f"{printable(folder)}: {both} are scales of one tensor; remove one of them.")
    size = _block_size(folder) if scales else None
    return {key: _read(folder, tensors[key], scales.get(key), size) for key in tensors if key not in scaled}


def _scaled(key: str, found: Mapping[str, OnDisk]) -> str | None:
    """The FP8 tensor of which this is a scale, by its name."""
    named = (key.removesuffix(end) + own for end, own in (SCALES | UNREAD).items() if key.endswith(end))
    return next((of for of in named if of in found and found[of].dtype == FP8), None)


def _read(folder: Path, tensor: OnDisk, scale: OnDisk | None, size: Any) -> OnDisk:
    """The tensor with its scale; raises ConfigError unless both have a form that is read."""
    if tensor.dtype in FLOATS:
        return tensor
    stored = f"{printable(tensor.key)!r} is stored as {printable(tensor.dtype)}"
    if tensor.dtype == FP8 and scale is not None and scale.dtype in (*FLOATS, *EXPONENTS):
        if math.prod(scale.shape) == 1:
            return tensor._replace(scale=scale)
        axes = len(tensor.shape)
        each = (
            size if isinstance(size, list) and all(type(n) is int for n in size) else [None] * 2 * (not size)
        )
        sizes = [*[1] * (axes - 2), *each]
        if axes == len(scale.shape) == len(sizes):
            fused = [axis > 0 and axes == 3 for axis in range(axes)]
            blocks = tuple(map(_blocks, tensor.shape, scale.shape, sizes, fused))
            if None not in blocks:
                return tensor._replace(scale=scale, blocks=blocks)
    if scale is not None:
        stored += f" {tensor.shape}, its scale {printable(scale.key)!r} as {printable(scale.dtype)}"
        stored += (
            f" {scale.shape}, for blocks of {size or 'equal sizes'} (weight_block_size in {CONFIG_FILE})"
        )
    elif tensor.dtype == FP8:
        stored += " without a scale"
    raise ConfigError(
        f"{printable(folder)}: {stored}; only floating-point numbers, and FP8 with scales, are trained: "
        "take the checkpoint in bf16 that it was made from."
    )


@cache
def _blocks(length: int, count: int, size: int | None, fused: bool) -> tuple[int, ...] | None:
    """Which of `count` scales each position of an axis has; None if there cannot be so many.

    A scale is for `size` positions, the last one for those that are left; without a size, for equal parts. If
    an axis has two matrices `fused`, such as gate and up, each may have scales of its own.
    """
    if size is None:
        size = length // count if count and length % count == 0 else 0
    for parts in (1, 2) if fused else (1,):
        part = length // parts
        if size and length == parts * part and count == parts * -(-part // size):
            return tuple(i // part * (count // parts) + i % part // size for i in range(length))
    return None


def _block_size(folder: Path) -> Any:
    """The sizes of the blocks that have a scale each, as config.json says; None if it says none."""
    config = any_config(folder)
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    settings = (part.get("quantization_config") for part in parts)
    sizes = (each.get("weight_block_size") for each in settings if isinstance(each, dict))
    return next(filter(None, sizes), None)


def header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The entries of a safetensors file for its tensors, by key, and where the first one begins.

    Raises ConfigError unless the file is whole by that, and as `open_file`.
    """
    size, shown = file.stat().st_size, printable(file)
    with open_file(file) as opened:
        first = opened.read(START)
        length = int.from_bytes(first[:8], "little")
        opened.seek(8)
        text = opened.read(length) if length < min(size, MOST_HEADER) else b""
    try:
        tensors = json.loads(text)
        tensors.pop("__metadata__", None)
        needed = 8 + length + _end(tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        known = explain(first) if first[8:9] != b"{" else None
        known = known or f"no safetensors file, or cut short ({size} bytes); download it again"
        raise ConfigError(f"{shown} is {known}.") from error
    if size != needed:
        raise ConfigError(f"{shown} holds {size} bytes, its header says {needed}; download it again.")
    return tensors, 8 + length


def description_problems(folder: Path, names: Sequence[str] = DESCRIPTIONS) -> Iterator[str]:
    """A line for each wrong file among those that describe tokenizer, processor and generation.
    Transformers' own messages do not name them. Raises as `read_file`."""
    for file in (folder / name for name in names if os.path.lexists(folder / name)):
        content = read_file(file)
        if known := explain(content):
            yield f"{printable(file)} is {known}."
        elif file.suffix == ".json" and not _is_whole(content.strip()):
            yield f"{printable(file)} is no whole JSON object ({len(content)} bytes); download it again."
        elif file.suffix == ".jinja" and b"\0" in content:
            yield f"{printable(file)} is no text, it holds zeros; download it again."
        elif file.name == "tokenizer.json" and b'"model"' not in content:
            yield f"{printable(file)} names no model of a tokenizer; download it again."
        elif file.name.endswith("config.json") and len(content) <= MOST_PARSED:
            described = json.loads(content)
            inner = [part for name in PROCESSORS if isinstance(part := described.get(name), dict)]
            parts = (described, *inner)
            for problem in chain.from_iterable(odd_fields(part, HELD, POSITIVE) for part in parts):
                yield f"{printable(file)}: {problem}; correct it, or download the file again."


def _is_whole(content: bytes) -> bool:
    """Whether it can be a JSON object; of a long one, only both ends are looked at."""
    if len(content) > MOST_PARSED:
        return content[:1] == b"{" and content.endswith(b"\n}" if content[1:2] == b"\n" else b"}")
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


def _end(tensors: dict[str, Any]) -> int:
    """Where the last tensor ends; raises ValueError unless each starts where another ends and has a shape of
    that size (two numbers of some types are one byte)."""
    end = 0
    for entry in sorted(tensors.values(), key=lambda entry: entry["data_offsets"]):
        (start, stop), lengths = entry["data_offsets"], entry["shape"]
        if start != end or stop < start:
            raise ValueError(f"a tensor starts at {start} and not at {end}")
        known = isinstance(entry["dtype"], str) and len(lengths) <= MOST_AXES
        known = known and all(type(n) is int and 0 <= n < 2**63 for n in lengths)
        if not known or math.prod(max(n, 1) for n in lengths) > max(2 * (stop - start), 1):
            raise ValueError(f"{stop - start} bytes are no tensor of {entry['dtype']} and shape {lengths}")
        end = stop
    return end
