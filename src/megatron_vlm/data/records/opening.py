"""Opens sources: files of rows, what `datasets` reads, and meta files that name several of them.

Meta files have LLaMA-Factory's format: several datasets, each with its columns, tags and share.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_vlm import stores
from megatron_vlm.data.chatml.record import Columns
from megatron_vlm.data.on_disk.descriptions import damaged
from megatron_vlm.data.on_disk.paths import ROWS, DataSource
from megatron_vlm.data.on_disk.rows_file import on_disk, tabular_kind, unpacked
from megatron_vlm.data.records.blends import blend_datasets, path_names
from megatron_vlm.data.records.datasets import HFDataset, JsonDataset, MapDataset
from megatron_vlm.files import check_file, read_file
from megatron_vlm.inputs import odd_fields
from megatron_vlm.messages import suggestion

META_SOURCES = ("file_name", "hf_hub_url")
META_NUMBERS = ("sample_ratio", "num_samples")
META_FIELDS = {
    **dict.fromkeys((*META_SOURCES, "media_dir", "split", "subset"), str),
    **dict.fromkeys(("columns", "tags"), dict),
}
META_KEYS = {*META_FIELDS, *META_NUMBERS, "formatting", "ranking"}  # the last two are not read: records tell
LARGEST_META = 1 << 24  # bytes


# -- opening


def open_table(
    path: str | Path,
    split: str | None = None,
    *,
    columns: Columns | None = None,
    media_dir: str | Path | None = None,
    datasets: Sequence[str] = (),
    kind: str | None = None,
    subset: str | None = None,
) -> MapDataset:
    """The rows of `path`: a file of rows, a meta file, or what `datasets` opens (folder, hub name).

    columns     the names of its fields and turns
    media_dir   the folder that paths of media are relative to and may not leave; default: the source's own
    datasets    the datasets of a meta file to read; default: all
    kind        json, meta or hf; default: what it holds tells

    Raises ValueError that names the file if a source cannot be read, FileNotFoundError if it does not exist.
    """
    kind = kind or kind_of(path)
    if media_dir is not None and not (stores.is_store(media_dir) or Path(media_dir).is_dir()):
        raise FileNotFoundError(f"data.media_dir: {media_dir} is not a folder.")
    root, columns = None if media_dir is None else stores.folder(media_dir), columns or Columns()
    # A meta file names several sources, each with its own columns and media
    if kind == "meta" or datasets:
        entries = entries_of(path, columns, root, datasets)
        tables = {name: _open_entry(path, source, options) for name, (source, options) in entries.items()}
        return blend_datasets(tables, [source for source, _ in entries.values()])
    # Lines are read here, one at a time; `datasets` opens everything else
    if kind == "json":
        return JsonDataset(path, root or stores.parent(path), columns)
    from megatron_vlm.data.records.hub import media_root, open_rows

    return HFDataset(str(path), open_rows(on_disk(path), split, subset), root or media_root(path), columns)


def open_sources(pairs: Sequence[tuple[DataSource, str | None]], **options: Any) -> MapDataset:
    """One table of all sources and their splits, each opened as by `open_table`."""
    tables = [open_table(source.path, split, subset=source.subset, **options) for source, split in pairs]
    sources = [source for source, _ in pairs]
    if len(tables) == 1 and sources[0].whole:
        return tables[0]
    return blend_datasets(dict(zip(path_names(sources), tables, strict=True)), sources)


def kind_of(path: str | Path) -> str:
    """How `path` is read, by what it holds: as json, as meta, or by `datasets` as hf. Raises ValueError."""
    path = on_disk(path)
    if path.suffix in ROWS and not path.exists():
        raise FileNotFoundError(f"data: {path} does not exist; give the path of a file or folder.")
    if path.exists() and not path.is_dir():
        check_file(path)
    if not path.is_file():
        return "hf"
    plain = unpacked(path)
    if tabular_kind(plain):
        return "hf"
    return "json" if read_meta(plain) is None else "meta"


def source_splits(path: str | Path, subset: str | None = None) -> list[str]:
    """The splits of a source; empty for a source without splits."""
    if kind_of(path) != "hf":
        return []
    from megatron_vlm.data.records.hub import split_names

    return split_names(on_disk(path), subset)


def _open_entry(meta: str | Path, source: DataSource, options: dict[str, Any]) -> MapDataset:
    """Return a dataset of a meta file: the split that it names, or else `train` if there is one."""
    if kind_of(source.path) == "meta":
        raise ValueError(f"{meta}: {source.path} is a meta file itself; name its datasets here.")
    if options["split"] is None and "train" in source_splits(source.path):
        options["split"] = "train"
    return open_table(source.path, subset=source.subset, **options)


# -- meta files


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
    path: str | Path, columns: Columns, root: Path | None, datasets: Sequence[str]
) -> dict[str, tuple[DataSource, dict[str, Any]]]:
    """Return the datasets of a file {name: {file_name, columns, tags, media_dir, sample_ratio, ...}, ...}.

    Of each its source, and the options with which `tables.open_table` opens it.

    Raises ValueError or FileNotFoundError that names the file, the dataset and what to do.
    """
    if columns.names or columns.tags:
        raise ValueError(f"data.columns: {path} says the columns of each of its datasets; drop the setting.")
    if stores.is_store(path):
        raise ValueError(f"data: {path} is a meta file; give its datasets as a list, or a copy on disk.")
    path = Path(path)
    entries = read_meta(path) if path.is_file() else None
    if not entries:
        fact = "is no meta file" if path.exists() else "does not exist"
        remedy = "write {name: {file_name: ..., ...}, ...}" + (", or drop data.datasets" if datasets else "")
        raise damaged(path, fact, remedy)
    for name in datasets:
        if name not in entries:
            raise ValueError(f"data.datasets: {path} has no dataset {name}{suggestion(name, entries)}")
    names = datasets or entries
    return {
        name: _entry(path.parent, f"{path}, dataset {name}", entries[name], root, columns.parser)
        for name in names
    }


def _entry(
    folder: Path, place: str, entry: dict, root: Path | None, parser: str | None
) -> tuple[DataSource, dict[str, Any]]:
    for problem in odd_fields(entry, META_FIELDS):
        raise damaged(place, problem, "correct it")
    if not any(key in entry for key in META_SOURCES):
        raise damaged(place, f"names none of {', '.join(META_SOURCES)}", "say where its records are")
    for key in entry.keys() - META_KEYS:
        raise ValueError(f"{place}: {key} is no setting that is read{suggestion(key, sorted(META_KEYS))}")
    try:
        columns = Columns(dict(entry.get("columns") or {}), dict(entry.get("tags") or {}), parser)
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
