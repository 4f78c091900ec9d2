"""Checks datasets on disk, as data and before torch is imported: every problem, a line each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_vlm.checks.model_on_disk import ROWS, cache, is_hub_name, is_offline, is_prepared, kind_of
from megatron_vlm.config import DataConfig, DataPaths
from megatron_vlm.data.paths import FILMS, PICTURES, items_of, paths_of, unread_end
from megatron_vlm.messages import printable

FIRST_RECORDS, FIRST_BYTES, FIRST_FILES = 20, 1 << 20, 1000
FEW_PATHS = 3  # fewer missing files may come from broken records, which a run counts and leaves out
MEDIA_FILES = {*PICTURES, *FILMS}
TABLES = (".parquet", ".arrow", ".csv", ".tsv", ".txt", ".tar", ".zip")
DESCRIBE = ("metadata.jsonl", "metadata.json", "dataset_info.json", "dataset_infos.json", "state.json")
_SPLIT = re.compile(r"(^|[-._ 0-9])(train|valid|val|dev|test|eval)[a-z]*[-._ 0-9]")  # words of file names
MEDIA_COLUMNS = ("images", "image", "videos", "video")
REAL_MEDIA_FOLDERS = 200  # the most folders to search for one that holds a missing file
NO_PATHS = ("data:", "://", "::")  # these mark media that are not paths: base64, addresses, keys of an LMDB


def data_problems(data: DataConfig, key: str, paths: DataPaths) -> Iterator[str]:
    """What keeps each of the paths from being read; remote paths are not checked."""
    for item, path in zip(items_of(paths), paths_of(paths), strict=True):
        if "://" in path:
            continue
        if end := unread_end(item):
            yield f"{key}: {printable(item)} does not exist, and {_what_it_is_not(printable(end))}"
        elif path != path.strip() and not Path(path).expanduser().exists():
            yield f"{key}: '{printable(path)}' does not exist, and has a space at an end; drop the space."
        else:
            yield from dataset_problems(data, key, path)


def _what_it_is_not(end: str) -> str:
    if end.startswith("#"):
        return f"`{end}` is no number of rows, such as `#5000`; give one, or a share, such as `*0.3`."
    return f"`{end}` is no share, such as `*0.3`; give one, or name each file, as patterns are not read."


def dataset_problems(data: DataConfig, key: str, name: str) -> Iterator[str]:
    """What keeps a local path from being read as a `data.dataset_type`."""
    path, shown = Path(name).expanduser(), f"{key}: {printable(name)}"
    if data.dataset_type == "energon":
        yield from _energon_problems(path, shown)
    else:
        yield from _hf_problems(data, path, name, shown)


def _energon_problems(path: Path, shown: str) -> Iterator[str]:
    if not path.exists():
        yield f"{shown} does not exist; write one with `megatron-vlm prepare`."
    elif path.is_file():
        if path.suffix != ".yaml" and not (path.suffix == ".jsonl" and Path(f"{path}.idx").is_file()):
            yield (
                f"{shown} is a file, dataset_type energon reads prepared folders; set data.dataset_type=hf, "
                "or run `megatron-vlm prepare` on it first."
            )
    elif not is_prepared(path):
        inside = next((child for child in sorted(path.iterdir()) if is_prepared(child)), None)
        kind = kind_of(path)
        if inside is not None:
            yield f"{shown} is not a prepared Energon dataset; did you mean {printable(inside)}?"
        elif kind == "a dataset saved by `datasets`":
            yield f"{shown} is {kind}, not an Energon one; set data.dataset_type=hf."
        elif kind is None or "shards" in kind:
            yield f"{shown} is not a prepared Energon dataset; run `megatron-vlm prepare` first."
        else:
            yield f"{shown} is {kind}, not a dataset; give a folder that `megatron-vlm prepare` wrote."


def _hf_problems(data: DataConfig, path: Path, name: str, shown: str) -> Iterator[str]:
    if not path.exists():
        if "," in name and all(os.path.exists(part) for part in name.split(",")):
            yield f"{shown} are several paths; give each by a flag of its own, or all as a list, [A,B]."
        elif not is_hub_name(name):
            yield f"{shown} does not exist; give a file or folder of conversations, or a hub name."
        elif is_offline("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") and not _dataset_cached(name):
            yield (
                f"{shown} does not exist here, nor in the caches, and HF_HUB_OFFLINE is set; give a file or "
                "a folder, or download it first."
            )
        return
    if data.media_dir is not None and not Path(data.media_dir).expanduser().is_dir():
        yield f"data.media_dir: {printable(data.media_dir)} is not a folder; give the one paths start from."
        return
    if is_prepared(path):
        yield f"{shown} is a prepared Energon dataset; set data.dataset_type=energon."
        return
    yield from _rows_problems(path, shown, data.media_dir, data.columns, "set data.media_dir=")


def source_problems(
    name: str, image_root: str | Path | None, columns: dict[str, str], is_hf: bool
) -> Iterator[str]:
    """What keeps `prepare` from reading a local path."""
    path, shown = Path(name), f"prepare: source {printable(name)}"
    if image_root is not None and not Path(image_root).is_dir():
        yield f"prepare: --image-root {printable(image_root)} is not a folder; give the one paths start from."
    elif is_prepared(path):
        yield f"{shown} is a prepared Energon dataset already; train from it, or give another source."
    elif path.exists():
        yield from _rows_problems(path, shown, image_root, columns, "add --image-root ")
    elif not is_hf and "://" not in name:
        yield f"{shown} does not exist; give a file or folder; a hub name needs --format hf."


def _rows_problems(
    path: Path, shown: str, media_dir: str | Path | None, columns: dict[str, str], setting: str
) -> Iterator[str]:
    """What keeps the rows from being read; `setting` names the setting of the media folder in messages."""
    if path.is_dir():
        kind = kind_of(path)
        if kind is not None and "saved by" not in kind:
            yield f"{shown} is {kind}, not a dataset; give the folder or file of the conversations."
        elif not any(path.iterdir()):
            yield f"{shown} is an empty folder; give the folder or file of the conversations."
        elif _holds_only_media(path):
            yield f"{shown} is a folder of media alone; give the folder or file of the conversations."
        elif file := _file_beside_media(path):
            yield f"{shown} is a folder of media, and {file.name} in it is not read; give {printable(file)}."
    elif not path.is_file():
        yield f"{shown} is neither a file nor a folder; give the file of the conversations."
    elif path.stat().st_size == 0:
        yield f"{shown} is an empty file; give the file of the conversations."
    elif path.suffix not in (".parquet", ".arrow"):
        yield from _json_problems(path, shown, media_dir, columns, setting)


def _holds_only_media(folder: Path) -> bool:
    """Whether the first files in the folder are media, by their names."""
    files = (child for child in folder.rglob("*") if not child.is_dir())
    suffixes = {child.suffix.lower() for child in islice(files, FIRST_FILES)}
    return bool(suffixes) and suffixes <= MEDIA_FILES


def _file_beside_media(folder: Path) -> Path | None:
    """The first file of records in a folder that `datasets` would take for one of media alone: unless a
    README.md, tables or names of splits tell it what to read, it takes what there is most of."""
    records = [
        child for child in folder.glob("*.json*") if child.suffix in ROWS and child.name not in DESCRIBE
    ]
    files = list(islice(folder.rglob("*"), FIRST_FILES))
    told = any(child.name == "README.md" or child.suffix in TABLES for child in files)
    if told or any(_SPLIT.search(child.name) for child in records):
        return None
    media = sum(child.suffix.lower() in MEDIA_FILES for child in files)
    return min(records) if 0 < len(records) < media else None


def _dataset_cached(name: str) -> bool:
    datasets = cache("HF_DATASETS_CACHE", "datasets") / name.replace("/", "___").lower()
    hub = cache("HF_HUB_CACHE", "hub") / f"datasets--{name.replace('/', '--')}"
    return datasets.exists() or hub.exists()


def _json_problems(
    path: Path, shown: str, media_dir: str | Path | None, columns: dict[str, str], setting: str
) -> Iterator[str]:
    with path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    if b"\0" in start[:4096]:
        yield f"{shown} is no text, but a binary file; give JSON, JSON Lines, parquet or a folder."
        return
    records = first_records(path, start.removeprefix(b"\xef\xbb\xbf"))
    if not records:
        if len(start) < FIRST_BYTES and not _is_meta(start):
            yield f"{shown} holds no JSON record; write one conversation a line."
        return
    root = Path(media_dir or path.parent).expanduser()
    of_records = [_media_names(record, columns) for record in records]
    names = [name for each in of_records for name in each]
    if not names or any(_leads_into(root, name) for name in names):
        return
    held = next((folder for folder in _folders(root, names) if _leads_into(folder, names[0])), None)
    if held or len(names) >= FEW_PATHS or all(of_records):
        yield (
            f"{shown}: none of the first {len(names)} media paths in it leads to a file under "
            f"{printable(root)}, such as {printable(names[0])}; {setting}"
            f"{printable(held) if held else 'FOLDER, where these paths start'}."
        )


def first_records(path: Path, start: bytes) -> list[dict]:
    """The JSON mappings at the beginning of the file."""
    text = start.decode(errors="replace").lstrip()
    found: list[Any] = []
    if path.suffix == ".json" and text.startswith("["):
        decoder, at = json.JSONDecoder(), 1
        while len(found) < FIRST_RECORDS:
            rest = text[at:].lstrip(" \r\n\t,")
            try:
                record, used = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                break
            found.append(record)
            at = len(text) - len(rest) + used
    else:
        for line in text.splitlines()[:FIRST_RECORDS]:
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return [record for record in found if isinstance(record, dict)]


def _is_meta(start: bytes) -> bool:
    try:
        return isinstance(json.loads(start), dict)
    except (ValueError, RecursionError):
        return False


def _media_names(record: dict, columns: dict[str, str]) -> list[str]:
    """The media paths that a record names as plain text, under any of their names."""
    values = [record.get(columns.get(name, name)) for name in MEDIA_COLUMNS]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [
        item for item in flat if isinstance(item, str) and item and not any(mark in item for mark in NO_PATHS)
    ]


def _leads_into(root: Path, name: str) -> bool:
    """Whether a file of this name is there and, as `data.media.files` demands, inside `root`."""
    try:
        path = (root / name).resolve()
        return path.is_relative_to(root.resolve()) and path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
        return False


def _folders(root: Path, names: list[str]) -> Iterator[Path]:
    """The folder of all absolute paths; that above `root`; some of the folders in `root` and next to it."""
    if folders := [os.path.dirname(name) for name in names if os.path.isabs(name)]:
        yield Path(os.path.commonpath(folders))
    yield root.parent
    for folder in (root, root.parent):
        if folder.is_dir():
            children = sorted(child for child in folder.iterdir() if child.is_dir())
            yield from children[:REAL_MEDIA_FOLDERS]
