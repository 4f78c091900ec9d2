"""The files of a checkpoint, without torch: which safetensors it has, and what they hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_vlm.config import ConfigError
from megatron_vlm.files import check_file, open_file, read_file
from megatron_vlm.inputs import explain_file
from megatron_vlm.supported import CONFIG_FILE, INDEX_FILE, WEIGHT_FILE, any_config, missing_weights

Renames = tuple[tuple[str, str], ...]  # patterns of keys -> what takes the place of what they find

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


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files that hold a checkpoint's weights, in its own folder.

    A single file goes before an index, as in Transformers. An index only tells which files there are; the
    files tell what they hold. Raises ConfigError if there is neither, or the index is unusable.
    """
    index = folder / INDEX_FILE
    if (folder / WEIGHT_FILE).is_file():
        return [WEIGHT_FILE]
    if problem := missing_weights(folder):
        raise ConfigError(problem)
    try:
        names = sorted(set(json.loads(read_file(index))["weight_map"].values()))
        is_usable = bool(names) and all(Path(name).name == name for name in names)
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f"{index} is no JSON with a weight_map to files beside it; put all weights into that "
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


def hub_name(key: str, renames: Renames) -> str:
    """`key` as the hub's files spell it, from any of the spellings found in the wild or in memory."""
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


def tensors_of(folder: Path, renames: Renames = ()) -> dict[str, OnDisk]:
    """A checkpoint's tensors by the `hub_name` of their key, FP8 ones with their scales.

    Raises ConfigError for a file that is not whole, a tensor that is there twice, and one whose form is none
    that is read: what this function lets pass, import takes as the numbers that were meant.
    """
    tensors: dict[str, OnDisk] = {}
    for file in weight_files(folder):
        for key, entry in header(folder / file)[0].items():
            if OF_THE_MODEL.search(key):
                continue
            tensor = OnDisk(file, key, entry["dtype"], entry["shape"])
            if (twin := tensors.setdefault(hub_name(key, renames), tensor)) is not tensor:
                raise ConfigError(
                    f"{folder}: {key} of {file} and {twin.key} of "
                    f"{twin.file} are the same tensor of the model; remove one of them."
                )
    scaled = {key: of for key in tensors if (of := _scaled(key, tensors))}
    scales: dict[str, OnDisk] = {}
    for key, of in scaled.items():
        if not key.endswith(tuple(UNREAD)) and scales.setdefault(of, tensors[key]) is not tensors[key]:
            both = f"{key} and {scales[of].key}"
            raise ConfigError(f"{folder}: {both} are scales of one tensor; remove one of them.")
    size = _block_size(folder) if scales else None
    return {key: _read(folder, tensors[key], scales.get(key), size) for key in tensors if key not in scaled}


def _scaled(key: str, tensors: Mapping[str, OnDisk]) -> str | None:
    """The FP8 tensor that this scales, by its name."""
    names = (
        key.removesuffix(end) + new_end for end, new_end in (SCALES | UNREAD).items() if key.endswith(end)
    )
    return next((of for of in names if of in tensors and tensors[of].dtype == FP8), None)


def _read(folder: Path, tensor: OnDisk, scale: OnDisk | None, size: Any) -> OnDisk:
    """The tensor with its scale; raises ConfigError unless both have a form that is read."""
    if tensor.dtype in FLOATS:
        return tensor
    # FP8 has one scale, or one for each block of the last two axes
    stored = f"{tensor.key!r} is stored as {tensor.dtype}"
    if tensor.dtype == FP8 and scale is None:
        stored += " without a scale"
    elif scale is not None:
        if scale.dtype in (*FLOATS, *EXPONENTS) and math.prod(scale.shape) == 1:
            return tensor._replace(scale=scale)
        axes, sizes = len(tensor.shape), size or [None, None]
        is_known = isinstance(sizes, list) and all(type(n) is int for n in size or ())
        if is_known and scale.dtype in (*FLOATS, *EXPONENTS) and axes == len(scale.shape) == max(axes, 2):
            sizes = [*[1] * (axes - len(sizes)), *sizes]
            fused = [axis > 0 and axes == 3 for axis in range(axes)]
            blocks = tuple(map(_scale_block_indices, tensor.shape, scale.shape, sizes, fused))
            if len(blocks) == axes and None not in blocks:
                return tensor._replace(scale=scale, blocks=blocks)
        stored += (
            f" {tensor.shape}, its scale {scale.key!r} as {scale.dtype} {scale.shape}, for blocks "
            f"of {size or 'equal sizes'} (weight_block_size in {CONFIG_FILE})"
        )
    raise ConfigError(
        f"{folder}: {stored}; only floating-point numbers, and FP8 with scales, are trained: "
        "take the checkpoint in bf16 that it was made from."
    )


@cache
def _scale_block_indices(length: int, count: int, size: int | None, fused: bool) -> tuple[int, ...] | None:
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
    sizes = (section.get("weight_block_size") for section in settings if isinstance(section, dict))
    return next(filter(None, sizes), None)


def header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The entries of a safetensors file for its tensors, by key, and where the first one begins.

    Raises ConfigError unless safetensors can read the whole file, and as `check_file`.
    """
    try:
        check_file(file)
        with safe_open(file, "np"):  # refuses a file that is cut short, and a tensor out of place
            pass
    except (SafetensorError, OSError) as error:
        reason = (
            explain_file(file) if file.is_file() else f"missing ({error.strerror}); complete the download"
        )
        raise ConfigError(
            f"{file} is {reason or f'no whole safetensors file ({error}); download it again'}."
        ) from error
    with open_file(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        tensors = json.loads(opened.read(length))
    tensors.pop("__metadata__", None)
    return tensors, 8 + length
