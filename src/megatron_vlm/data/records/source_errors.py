"""Adds the file and what to do to what `datasets` raises, which may be anything."""

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
from datasets.exceptions import DatasetsError

from megatron_vlm.data.on_disk.descriptions import RESTORE, damaged
from megatron_vlm.data.on_disk.plain import DAMAGED
from megatron_vlm.signatures import explain_file

# What `datasets` raises on a damaged file
FAILURES = (DatasetsError, pa.ArrowException, OSError, LookupError, TypeError, AttributeError)
FAILURES += (*DAMAGED, tarfile.TarError, ArithmeticError, StopIteration)
SUBSETS = re.compile(r"(?s)Config name is missing.*?available configs: (.*?)\n")
# How files of rows end in a folder, and what `datasets` reads them with
READERS = {".arrow": "arrow", ".parquet": "parquet", ".json": "json", ".jsonl": "json"}
READERS |= {".csv": "csv", ".tsv": "csv"}
PACKED_ENDS = (".gz", ".bz2", ".xz", ".zst", ".zip")


@contextmanager
def name_damaged_file(path: str | Path) -> Iterator[None]:
    """Raise ValueError that names the file, with the library's reason, for what `datasets` raises."""
    try:
        yield
    except FAILURES as error:
        if subsets := SUBSETS.search(f"{error}\n"):
            remedy = "give OWNER/NAME:SUBSET, or a meta file that names one as `subset`"
            raise damaged(path, f"has several subsets, {subsets[1]}", remedy) from error
        cause = first_cause(error)
        if (place := _place_in_cache(cause)) is not None:
            fact = f"the cache of `datasets` cannot be written ({cause.strerror})"
            raise damaged(place, fact, "set HF_HOME to a folder with room that you may write to") from error
        file, cause = _first_refused(Path(path)) or (Path(path), cause)
        if file.is_file() and (explanation := explain_file(file)):
            raise ValueError(f"data: {file}: is {explanation}.") from error
        if _has_no_rows(file):
            raise damaged(file, "has no rows", "take it out") from error
        remedy = "save it as UTF-8" if isinstance(cause, UnicodeDecodeError) else RESTORE
        raise damaged(file, f"cannot be read ({reason(cause)})", remedy) from error


def reader_of(file: Path) -> str | None:
    """The reader of `datasets` for a file in a folder, by its name; None for one that holds no rows."""
    return READERS.get((file.with_suffix("") if file.suffix in PACKED_ENDS else file).suffix)


def _place_in_cache(error: BaseException) -> str | None:
    """The path in the cache of `datasets` that the system refused to write; None for another error."""
    place = getattr(error, "filename", None)
    homes = (datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE)
    is_inside = isinstance(place, str | Path) and any(Path(place).is_relative_to(home) for home in homes)
    return str(place) if is_inside and isinstance(error, OSError) else None


def _first_refused(folder: Path) -> tuple[Path, BaseException] | None:
    """The first file of a folder that `datasets` refuses when it reads it alone, and why."""
    for file in sorted(folder.rglob("*")):
        if not (file.is_file() and (reader := reader_of(file))):
            continue
        try:
            rows = datasets.load_dataset(reader, data_files=str(file), split="train", streaming=True)
            for _ in rows.with_format("arrow"):
                pass
        except FAILURES as error:
            return file, first_cause(error)
    return None


def _has_no_rows(file: Path) -> bool:
    """Return whether it is a parquet file without rows; `datasets` has another message for it."""
    with suppress(pa.ArrowException, OSError):
        return pa.parquet.read_metadata(file).num_rows == 0
    return False


def first_cause(error: BaseException) -> BaseException:
    """The first cause of an error: `datasets` wraps it in general words."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def reason(error: BaseException) -> str:
    """The first line of the first cause."""
    return (str(first_cause(error)).strip() or type(error).__name__).splitlines()[0]
