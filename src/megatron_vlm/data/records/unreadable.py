"""Names the file of a dataset that `datasets` cannot read, and what to do with it."""

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
from datasets.exceptions import DatasetsError

from megatron_vlm.data.on_disk.descriptions import RESTORE, damaged
from megatron_vlm.data.on_disk.lines import records_in
from megatron_vlm.data.on_disk.plain import DAMAGED, PACKED, TABULAR
from megatron_vlm.files import open_file, read_file
from megatron_vlm.messages import printable
from megatron_vlm.signatures import what_file

# What `datasets` raises on a damaged file
FAILURES = (DatasetsError, pa.ArrowException, OSError, LookupError, TypeError, AttributeError)
FAILURES += (*DAMAGED, tarfile.TarError, ArithmeticError, StopIteration)
SUBSETS = re.compile(r"(?s)Config name is missing.*?available configs: (.*?)\n")
READ = (".arrow", ".parquet", ".json", ".jsonl", ".csv", ".tsv", ".gz", ".zst")  # what `datasets` may read


class UnreadColumn(ValueError):
    """A table is sound and has a column that `datasets` cannot read."""


@contextmanager
def naming_the_damaged(path: str | Path) -> Iterator[None]:
    """Makes a ValueError that names the damaged file of what `datasets` raises, which may be anything."""
    try:
        yield
    except FAILURES as error:
        if found := SUBSETS.search(f"{error}\n"):
            remedy = "give OWNER/NAME:SUBSET, or a meta file that names one as `subset`"
            raise damaged(path, f"has several subsets, {printable(found[1])}", remedy) from error
        named, why = _first_unreadable(Path(path)) or (path, error)
        remedy = "write it without" if isinstance(why, UnreadColumn) else RESTORE
        raise damaged(named, f"cannot be read ({reason(why)})", remedy) from error


def check_rows(file: Path) -> None:
    """Raises ValueError for a file that is none of rows by its first bytes; a text may be empty."""
    known = what_file(file)
    empty = () if file.suffix[1:] in TABULAR else ("empty",)
    if known is not None and known.name not in (*TABULAR, *PACKED, *empty):
        raise damaged(file, f"is {known.what}", known.remedy)


def _first_unreadable(path: Path) -> tuple[Path, Exception] | None:
    """The first file that is damaged, and why. Raises as `check_rows`."""
    for file in [path, *sorted(path.rglob("*"))]:
        if not (file.is_file() and (file == path or file.suffix in READ)):
            continue
        check_rows(file)
        known = what_file(file)
        try:
            _read(file, known.name if known else file.suffix[1:])
        except (pa.ArrowException, OSError, *DAMAGED) as error:
            return file, error
    return None


def _read(file: Path, kind: str) -> None:
    """Reads a whole file. Raises an error if it cannot be read or has no rows, as `datasets` does then."""
    count = 1
    if kind == "parquet":
        with pa.parquet.ParquetFile(file) as parquet:
            count = parquet.metadata.num_rows
            _check_columns(parquet.schema_arrow)
            for batch in parquet.iter_batches():
                batch.validate(full=True)
    elif kind == "arrow":
        with pa.memory_map(str(file)) as source:
            try:
                reader = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(source)
            _check_columns(reader.schema)
            count = reader.read_all().num_rows
    elif kind in PACKED:
        with open_file(file) as packed, PACKED[kind](packed) as content:
            while content.read(1 << 20):
                pass
    elif kind in ("json", "jsonl"):
        records_in(read_file(file).decode("utf-8-sig"))
    if count == 0:
        raise ValueError("it has no rows; take it out")


def _check_columns(schema: pa.Schema) -> None:
    """Raises UnreadColumn for a column of a type that `datasets` has not, and for two of one name."""
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise UnreadColumn(f"it has two columns {printable(field.name)}")
        try:
            datasets.Features.from_arrow_schema(pa.schema([field]))
        except ValueError:
            column = f"column {printable(field.name)}"
            raise UnreadColumn(f"`datasets` reads no {printable(field.type)}, as {column} is") from None


def reason(error: BaseException) -> str:
    """The first line of the first cause: `datasets` wraps it in general words."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or "no reason given").splitlines()[0]
