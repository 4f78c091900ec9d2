"""Reads the items of a data path setting: a path, and how much of it an epoch has."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

COUNT, SHARE = r"#(\d{1,18})", r"\*(\d{1,9}|\d{0,9}\.\d+)"  # after a path

# How names of files end
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
FILMS = (".mp4", ".webm", ".mkv", ".mov", ".avi")
ROWS = (".json", ".jsonl", ".parquet", ".arrow", ".csv", ".tsv", ".gz", ".zst", ".zip")


@dataclass(frozen=True)
class DataSource:
    """One item of a data path setting: `PATH`, `PATH#5000`, `PATH*0.3` or `OWNER/NAME:SUBSET`.

    An epoch has 5,000 of its rows, or 0.3 times its rows. A subset is one of a dataset of the hub. `NAME=`
    before any of them is what the source is called beside others."""

    path: str
    subset: str | None = None
    rows: int | None = None
    share: float | None = None
    name: str | None = None

    @classmethod
    def of(cls, item: str) -> DataSource:
        """Reads an item, without its spaces; the name of a file or folder that exists is a path as it is."""
        if os.path.exists(item):
            return cls(item)
        item = item.strip()
        end = re.search(rf"(?:{COUNT}|{SHARE})?\Z", item)
        path, (rows, share) = item[: end.start()].strip(), end.groups()
        if (with_name := re.fullmatch(r"([^/:=]*)=\s*(.+)", item)) and not os.path.exists(path):
            return replace(cls.of(os.path.expanduser(with_name[2])), name=with_name[1].strip())
        if "://" in item:
            return cls(item)
        name = re.fullmatch(r"([\w.-]+/[\w.-]+):([\w.-]+)", path)
        path, subset = name.groups() if name and not os.path.exists(path) else (path, None)
        return cls(path, subset, rows and int(rows), share and float(share))

    @property
    def title(self) -> str:
        """The name that it was given, or else its path with the subset."""
        return self.name or self.path + (f":{self.subset}" if self.subset else "")

    @property
    def whole(self) -> bool:
        """Whether an epoch has each of its rows once."""
        return self.rows is None and self.share is None

    def rows_in_an_epoch(self, rows: int) -> int:
        """The rows in an epoch of a table with `rows` rows; at least one."""
        return self.rows or max(1, round(rows * (1 if self.share is None else self.share)))


def sources_of(value: str | Sequence[str] | None) -> list[DataSource]:
    """The items of a data path setting."""
    return [DataSource.of(item) for item in items_of(value)]


def items_of(value: str | Sequence[str] | None) -> list[str]:
    """The items of a data path setting as they were written."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def paths_of(value: str | Sequence[str] | None) -> list[str]:
    """The paths of a data path setting, without what its items say of rows and subsets."""
    return [source.path for source in sources_of(value)]


def tar_shards(path: str | Path) -> tuple[Path, list[Path]]:
    """Return a folder and the .tar files in and below it; `path` may be one of them or a pattern.

    Names that begin with a dot are left out: file systems, and runs that were killed, leave such ones.
    """
    path = Path(os.path.abspath(os.path.expanduser(path)))
    if path.is_dir():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    else:
        files = [path] if path.exists() else [Path(name) for name in glob.glob(str(path))]
        path = Path(os.path.commonpath([file.parent for file in files] or [path.parent]))
    hidden = re.compile(r"(^|/)\.")
    return path, [f for f in files if f.suffix == ".tar" and not hidden.search(str(f.relative_to(path)))]
