"""Hugging Face `datasets` as a source."""

from __future__ import annotations

from pathlib import Path

import datasets


def split_names(path: str | Path) -> list[str]:
    """The splits that `path` has of its own; empty for a single dataset saved by `save_to_disk`."""
    loaded = _load(path)
    return list(loaded) if isinstance(loaded, dict) else []


def open_rows(path: str | Path, split: str | None = None) -> datasets.Dataset:
    """The rows of a folder in `datasets` format, a folder or file of parquet/arrow, or a hub name.

    Images stay encoded. Raises ValueError when `split` is needed or not there.
    """
    loaded = _load(path)
    if isinstance(loaded, dict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        if split not in loaded:
            raise ValueError(f"dataset {path}: split {split!r} is not one of its splits {sorted(loaded)}.")
        loaded = loaded[split]
    return _keep_images_encoded(loaded)


def _load(path: str | Path) -> datasets.Dataset | datasets.DatasetDict:
    folder = Path(path)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(path))
    if folder.suffix in (".parquet", ".arrow") and folder.is_file():
        return datasets.load_dataset(folder.suffix[1:], data_files=str(path))
    return datasets.load_dataset(str(path))


def _keep_images_encoded(rows: datasets.Dataset) -> datasets.Dataset:
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            rows = rows.cast_column(column, datasets.List(datasets.Image(decode=False)))
    return rows
