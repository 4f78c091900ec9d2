"""Meta files in LLaMA-Factory's words: several datasets, each with its columns, tags and share."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_vlm.config import suggestion
from megatron_vlm.data.blends import Blend, Table
from megatron_vlm.data.files import check_fields, damaged
from megatron_vlm.data.layouts import Layout

META_SOURCES = ("file_name", "hf_hub_url")
META_KEYS = {
    *META_SOURCES,
    *("columns", "tags", "formatting", "media_dir", "sample_ratio", "num_samples", "split", "subset"),
    "ranking",
}
FIELDS = {
    **dict.fromkeys((*META_SOURCES, "formatting", "media_dir", "split", "subset"), "text"),
    **dict.fromkeys(("columns", "tags"), "mapping"),
}
FORMATTINGS = ("alpaca", "sharegpt", "openai")  # the record itself tells
LARGEST_META = 1 << 24  # bytes


def open_meta(path, split, layout: Layout, root: Path | None, datasets: Sequence[str], subset) -> Blend:
    """A file {name: {file_name, columns, tags, media_dir, sample_ratio, ...}, ...}."""
    path = Path(path)
    if layout.columns or layout.tags:
        raise ValueError(f"data.columns: {path} says the columns of each of its datasets; drop the setting.")
    entries = read_meta(path)
    if not entries:
        raise damaged(path, "is no meta file", "write {name: {file_name: ..., ...}, ...}")
    for name in datasets:
        if name not in entries:
            raise ValueError(f"data.datasets: {path} has no dataset {name}{suggestion(name, entries)}")
    entries = {name: entries[name] for name in datasets or entries}
    tables, counts = {}, {}
    for name, entry in entries.items():
        place = f"{path}, dataset {name}"
        tables[name] = _open_entry(path.parent, place, entry, root)
        counts[name] = _rows_in_an_epoch(place, entry, len(tables[name]))
    return Blend(tables, counts)


def _open_entry(folder: Path, place: str, entry: dict, root: Path | None) -> Table:
    from megatron_vlm.data.tables import kind_of, open_table

    check_fields(place, entry, FIELDS, "correct it")
    if not any(key in entry for key in META_SOURCES):
        raise damaged(place, f"names none of {', '.join(META_SOURCES)}", "say where its records are")
    for key in entry.keys() - META_KEYS:
        raise ValueError(f"{place}: {key} is no setting that is read{suggestion(key, sorted(META_KEYS))}")
    if entry.get("ranking"):
        raise ValueError(f"{place}: ranking data has no replies to train on; leave the dataset out.")
    if (formatting := entry.get("formatting", "sharegpt")) not in FORMATTINGS:
        raise ValueError(f"{place}: formatting {formatting}{suggestion(str(formatting), FORMATTINGS)}")
    try:
        layout = Layout(dict(entry.get("columns") or {}), dict(entry.get("tags") or {}))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    media_dir = folder / entry["media_dir"] if entry.get("media_dir") else root or folder
    if "hf_hub_url" in entry:
        source = entry["hf_hub_url"]
    else:
        source = folder / entry["file_name"]
        if not source.exists():
            raise FileNotFoundError(f"{place}: {source} does not exist.")
        if kind_of(source) == "meta":
            raise ValueError(f"{place}: {source} is a meta file itself; name its datasets here.")
    split = entry.get("split") or _train_split(source)
    table = open_table(source, split, layout=layout, media_dir=media_dir, subset=entry.get("subset"))
    if not len(table):
        raise ValueError(f"{place}: {source} has no records.")
    return table


def _train_split(source: str | Path) -> str | None:
    from megatron_vlm.data.tables import source_splits

    return "train" if "train" in source_splits(source) else None


def _rows_in_an_epoch(place: str, entry: dict, rows: int) -> int:
    ratio, count = entry.get("sample_ratio"), entry.get("num_samples")
    if ratio is not None and count is not None:
        raise ValueError(f"{place}: sample_ratio {ratio} and num_samples {count}; give one of them.")
    for value in (ratio, count):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise ValueError(f"{place}: {value!r} rows; give a positive number, or leave the dataset out.")
    if count is not None and count != int(count):
        raise ValueError(f"{place}: num_samples {count!r} is no whole number; a share is a sample_ratio.")
    return max(1, round(rows * (1.0 if ratio is None else ratio))) if count is None else int(count)


def read_meta(path: Path) -> dict[str, dict] | None:
    """The entries of a meta file; None for a file that is something else."""
    if path.stat().st_size > LARGEST_META:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # JSON Lines, or damaged: reading it line by line will tell
        return None
    is_meta = isinstance(content, dict) and content and all(isinstance(e, dict) for e in content.values())
    return content if is_meta else None
