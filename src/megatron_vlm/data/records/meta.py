"""Meta files in LLaMA-Factory's format: several datasets, each with its columns, tags and share."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_vlm.data.chatml.columns import Columns
from megatron_vlm.data.on_disk.descriptions import check_fields, damaged
from megatron_vlm.data.on_disk.paths import DataSource
from megatron_vlm.files import read_file
from megatron_vlm.messages import suggestion

META_SOURCES = ("file_name", "hf_hub_url")
META_NUMBERS = ("sample_ratio", "num_samples")
META_FIELDS = {
    **dict.fromkeys((*META_SOURCES, "media_dir", "split", "subset"), str),
    **dict.fromkeys(("columns", "tags"), dict),
}
META_KEYS = {*META_FIELDS, *META_NUMBERS, "formatting", "ranking"}  # the last two are not read: records tell
LARGEST_META = 1 << 24  # bytes


def read_meta(path: Path) -> dict[str, dict] | None:
    """Return the entries of a meta file, or None for a file that is something else."""
    try:
        content = json.loads(read_file(path, LARGEST_META))
    except (ValueError, RecursionError):  # JSON Lines, or damaged: who reads it line by line will see
        return None
    is_meta = isinstance(content, dict) and content and all(isinstance(e, dict) for e in content.values())
    entries = content.values() if is_meta else ()  # or {id: record}
    has_meta_keys = any({*META_SOURCES} & entry.keys() or entry.keys() <= META_KEYS for entry in entries)
    return content if has_meta_keys else None


def entries_of(
    path: Path, columns: Columns, root: Path | None, datasets: Sequence[str]
) -> dict[str, tuple[DataSource, dict[str, Any]]]:
    """Return the datasets of a file {name: {file_name, columns, tags, media_dir, sample_ratio, ...}, ...}.

    Of each its source, and the options with which `tables.open_table` opens it.

    Raises ValueError or FileNotFoundError that names the file, the dataset and what to do.
    """
    if columns.names or columns.tags:
        raise ValueError(f"data.columns: {path} says the columns of each of its datasets; drop the setting.")
    entries = read_meta(path)
    if not entries:
        raise damaged(path, "is no meta file", "write {name: {file_name: ..., ...}, ...}")
    for name in datasets:
        if name not in entries:
            raise ValueError(f"data.datasets: {path} has no dataset {name}{suggestion(name, entries)}")
    names = datasets or entries
    return {name: _entry(path.parent, f"{path}, dataset {name}", entries[name], root) for name in names}


def _entry(folder: Path, place: str, entry: dict, root: Path | None) -> tuple[DataSource, dict[str, Any]]:
    check_fields(place, entry, META_FIELDS, "correct it")
    if not any(key in entry for key in META_SOURCES):
        raise damaged(place, f"names none of {', '.join(META_SOURCES)}", "say where its records are")
    for key in entry.keys() - META_KEYS:
        raise ValueError(f"{place}: {key} is no setting that is read{suggestion(key, sorted(META_KEYS))}")
    try:
        columns = Columns(dict(entry.get("columns") or {}), dict(entry.get("tags") or {}))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    path = entry.get("hf_hub_url") or folder / entry["file_name"]
    if isinstance(path, Path) and not path.exists():
        raise FileNotFoundError(f"{place}: {path} does not exist.")
    media_dir = folder / entry["media_dir"] if entry.get("media_dir") else root or folder
    rows, share = _rows_and_share(place, entry)
    source = DataSource(str(path), entry.get("subset"), rows, share)
    return source, {"columns": columns, "media_dir": media_dir, "split": entry.get("split")}


def _rows_and_share(place: str, entry: dict) -> tuple[int | None, float | None]:
    numbers = {name: entry[name] for name in META_NUMBERS if entry.get(name) is not None}
    for name, value in numbers.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value > 0) or len(numbers) > 1:
            raise ValueError(
                f"{place}: {name} is {value!r}; give one of {' and '.join(META_NUMBERS)}, above 0."
            )
    count, ratio = numbers.get("num_samples"), numbers.get("sample_ratio")
    if count is not None and count != int(count):
        raise ValueError(f"{place}: num_samples {count!r} is no whole number; a share is a sample_ratio.")
    return count and int(count), ratio
