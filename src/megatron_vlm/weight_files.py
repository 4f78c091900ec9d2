"""The safetensors files of a checkpoint, without torch: their names, and whether they are whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_vlm.config import ConfigError
from megatron_vlm.messages import printable
from megatron_vlm.supported import INDEX_FILE, WEIGHT_FILE

_LFS = b"version https://git-lfs"


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
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"{printable(index)} holds no JSON with a weight_map; download it again."
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(
                f"{printable(index)} names {printable(name)}, which is no file beside it; put all weights "
                "into that folder, or download it again."
            )
    if not names:
        raise ConfigError(f"{printable(index)} names no file; download it again.")
    return sorted(names)


def problems(file: Path) -> Iterator[str]:
    """What is wrong with a safetensors file, judged by its header, which says where each byte belongs."""
    size, shown = file.stat().st_size, printable(file)
    with file.open("rb") as opened:
        first = opened.read(8)
        if (first + opened.read(len(_LFS) - 8)).startswith(_LFS):
            yield f"{shown} is a Git LFS pointer, not weights; run `git lfs pull` in that folder."
            return
        opened.seek(8)
        length = int.from_bytes(first, "little")
        header = opened.read(length) if len(first) == 8 and length < size else b""
    try:
        needed = 8 + length + _end(json.loads(header))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        yield f"{shown} is no safetensors file, or cut short ({size} bytes); download it again."
        return
    if size != needed:
        yield f"{shown} holds {size} bytes, its header says {needed}; download it again."


def _end(tensors: dict[str, Any]) -> int:
    """Where the last tensor ends; raises ValueError unless each starts where another ends."""
    spans = sorted(entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__")
    end = 0
    for start, stop in spans:
        if start != end or stop < start:
            raise ValueError(f"a tensor starts at {start} and not at {end}")
        end = stop
    return end
