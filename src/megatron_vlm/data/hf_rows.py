"""What the `datasets` library opens: folders, parquet, arrow, hub names; images and videos stay encoded."""

from __future__ import annotations

from pathlib import Path

import datasets

MEDIA = (datasets.Image, datasets.Video)


def split_names(path: str | Path) -> list[str]:
    """The splits that `path` has of its own; empty for a single dataset saved by `save_to_disk`."""
    loaded = load(path)
    return list(loaded) if isinstance(loaded, dict) else []


def open_rows(path: str | Path, split: str | None = None, subset: str | None = None) -> datasets.Dataset:
    """The rows of a folder in `datasets` format, a folder or file of parquet/arrow, or a hub name.

    Images stay encoded. Raises ValueError when `split` is needed or not there.
    """
    loaded = load(path, subset)
    if isinstance(loaded, dict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        if split not in loaded:
            raise ValueError(f"dataset {path}: split {split!r} is not one of its splits {sorted(loaded)}.")
        loaded = loaded[split]
    return _keep_media_encoded(loaded)


def open_stream(path: str | Path, split: str | None = None) -> datasets.IterableDataset:
    """The rows of `path` as they come, nothing written to disk first. Images stay encoded.

    Raises ValueError for a folder saved by `datasets`, whose rows are on disk anyway, and as `open_rows`.
    """
    if _is_saved_folder(Path(path)):
        raise ValueError(
            f"dataset {path}: saved by `save_to_disk`, its rows are read where they lie; drop data.streaming."
        )
    loaded = datasets.load_dataset(*_builder(path), **_files(path), streaming=True)
    split = next(iter(loaded)) if split is None and len(loaded) == 1 else split or "train"
    if split not in loaded:
        raise ValueError(f"dataset {path}: split {split!r} is not one of its splits {sorted(loaded)}.")
    stream = loaded[split]
    return stream.decode(False) if stream.features is not None else stream


def load(path: str | Path, subset: str | None = None) -> datasets.Dataset | datasets.DatasetDict:
    if _is_saved_folder(Path(path)):
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(*_builder(path), name=subset, **_files(path))


def _is_saved_folder(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _builder(path: str | Path) -> tuple[str]:
    return (Path(path).suffix[1:] if _files(path) else str(path),)


def _files(path: str | Path) -> dict[str, str]:
    is_file = Path(path).suffix in (".parquet", ".arrow") and Path(path).is_file()
    return {"data_files": str(path)} if is_file else {}


def _keep_media_encoded(rows: datasets.Dataset) -> datasets.Dataset:
    for column, feature in rows.features.items():
        if isinstance(feature, MEDIA):
            rows = rows.cast_column(column, type(feature)(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, MEDIA):
            rows = rows.cast_column(column, datasets.List(type(feature.feature)(decode=False)))
    return rows


def media_root(path: str | Path) -> Path:
    """Image paths must lie in the dataset's folder, or for a hub name in the cache of `datasets`."""
    local = Path(path)
    if not local.exists():
        return Path(datasets.config.HF_CACHE_HOME)
    return local if local.is_dir() else local.parent
