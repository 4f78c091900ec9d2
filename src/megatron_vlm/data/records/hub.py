"""Opens sources with the `datasets` library: folders, parquet, arrow, hub names. Media stay encoded."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from megatron_vlm import stores
from megatron_vlm.data.on_disk.descriptions import RESTORE, damaged, reading_data
from megatron_vlm.data.on_disk.rows_file import tabular_kind, unpacked
from megatron_vlm.files import check_file, read_text

ROWS = {".arrow", ".parquet", ".json", ".jsonl", ".csv", ".tsv"}  # endings of files of rows
CARDS = (datasets.config.REPOCARD_FILENAME, datasets.config.REPOYAML_FILENAME)
MEDIA_BUILDERS = ("text", "imagefolder", "videofolder", "audiofolder")  # of `datasets`, for files alone
ROWS_AT_ONCE = 10_000  # rows read at a time for the digest
ON_THE_HUB = "give OWNER/NAME or OWNER/NAME:SUBSET of a dataset that you may read"
IN_FOLDER = "put the data into the dataset's folder, or give its own path"


def split_names(path: str | Path, subset: str | None = None) -> list[str]:
    """Return the splits of `path`; none for a single dataset saved by `save_to_disk`."""
    loaded = load(path, subset)
    return list(loaded) if isinstance(loaded, dict) else []


def open_rows(path: str | Path, split: str | None = None, subset: str | None = None) -> datasets.Dataset:
    """Return the rows of a folder in `datasets` format, a folder or file of parquet/arrow, or a hub name.

    Raises ValueError if `split` is needed and not given, or does not exist.
    """
    loaded = load(path, subset)
    if isinstance(loaded, dict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        loaded = loaded[_split_of(path, split, loaded)]
    return loaded


def open_stream(path: str | Path) -> datasets.IterableDataset:
    """Return the training rows of `path` as a stream; nothing is written to disk first. Images stay encoded.

    Raises ValueError as `open_rows`.
    """
    builder = _builder(path)
    with reading_data(path):
        loaded = builder.as_streaming_dataset()
    split = next(iter(loaded)) if len(loaded) == 1 else "train"
    stream = loaded[_split_of(path, split, loaded)]
    return stream.decode(False) if stream.features is not None else stream


def _split_of(path: str | Path, split: str | None, splits: Iterable[str]) -> str:
    """Return the split, if it is one of them; raise ValueError if not."""
    if split not in splits:
        missing = "has no split train" if split is None else f"has no split {split!r}"
        folder = Path(path, min(splits))
        remedy = "a meta file that names one as `split`"
        if folder.is_dir():
            remedy = f"the folder of one, {folder}"
        raise ValueError(f"dataset {path}: {missing}, but {', '.join(sorted(splits))}; give {remedy}.")
    return split


def load(path: str | Path, subset: str | None = None) -> datasets.Dataset | datasets.DatasetDict:
    """Load `path` with `datasets`. Raise ValueError that names what cannot be read."""
    local = Path(path)
    if not is_saved_folder(local):
        builder = _builder(path, subset)
        with reading_data(path):
            builder.download_and_prepare()
            return builder.as_dataset()
    _refuse_pipes(local)
    with reading_data(path):
        loaded = datasets.load_from_disk(str(path))
    for rows in loaded.values() if isinstance(loaded, dict) else [loaded]:
        for file in rows.cache_files:
            _check_inside(local, file["filename"])
    return loaded


def is_saved_folder(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _builder(path: str | Path, subset: str | None = None) -> datasets.DatasetBuilder:
    """Return the builder of what `datasets` reads of a source.

    Raises ValueError unless all of it is the dataset's own (a folder's inside of it, a hub name's on the
    hub), and for files of rows that would be left out.
    """
    local = Path(path)
    name, options = str(path), {}
    if local.exists():
        _refuse_pipes(local)
    if local.is_file():
        options["data_files"] = str(unpacked(local))
        name = tabular_kind(unpacked(local))
    with reading_data(path, RESTORE if local.exists() else ON_THE_HUB):
        builder = datasets.load_dataset_builder(name, name=subset, **options)
    files = list(chain.from_iterable((builder.config.data_files or {}).values()))
    if local.is_dir():
        for file in files:
            _check_inside(local, file)
        _check_folder(local, builder.name, files)
    elif not local.exists():
        for file in files:
            if not file.startswith(("hf://", datasets.config.HF_ENDPOINT)):
                raise damaged(path, f"names the data file {file}, which is not on the hub", IN_FOLDER)
    return builder


def _refuse_pipes(path: Path) -> None:
    """Raise NotAFile for a pipe or a device, which would be waited for, and for a link to nothing."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        is_read = file == path or file.name in CARDS or ROWS & set(file.suffixes)
        if is_read and (file.exists() or file.name[0] != ".") and not file.is_dir():
            check_file(file)


def _check_inside(folder: Path, name: str) -> None:
    """Raise ValueError if a data file, or what it is a link to, is not in the folder.

    The hub's cache is links to what lies beside its snapshots.
    """
    home = folder.resolve()
    home = home.parent.parent if home.parent.name == "snapshots" else home
    is_address = "://" in name or "::" in name
    if is_address or ".." in Path(name).parts or not (folder / name).resolve().is_relative_to(home):
        raise damaged(folder, f"names the data {name}, outside of the folder", IN_FOLDER)


def _check_folder(folder: Path, builder: str, files: list[str]) -> None:
    """Raise ValueError if `datasets` would leave out records of a folder, or guess their values."""
    if builder in MEDIA_BUILDERS and not any(Path(file).name.startswith("metadata.") for file in files):
        remedy = "give the file of its conversations, with a line of JSON for each"
        raise damaged(folder, f"is read by `datasets` as {builder}, without conversations", remedy)
    if builder == "csv":
        fact = "holds tables, and `datasets` would guess the types of their values"
        raise damaged(folder, fact, "give the files, as a list")
    cards = [folder / name for name in CARDS if (folder / name).is_file()]
    if any("data_files" in read_text(card) for card in cards):  # it says what is read
        return
    read = {Path(file).resolve() for file in files}
    for place in sorted({Path(file).parent for file in files}):
        for file in sorted(place.iterdir()):
            if file.suffix in ROWS - {".json"} and file.name[0] != "." and file.resolve() not in read:
                fact = f"would be left out: `datasets` reads {len(read)} other files of {folder}"
                raise damaged(file, fact, "give all files as a list, or move it")


def rows_digest(rows: datasets.Dataset, name: str) -> str:
    """A digest of all rows in their order: of all values, but only of the lengths of media and other bytes.

    Raises ValueError if rows cannot be read because their file is damaged.
    """
    total, table = hashlib.blake2b(), rows.with_format("arrow")
    for start in range(0, len(rows), ROWS_AT_ONCE):
        columns = table[start : start + ROWS_AT_ONCE]
        try:
            for column in columns.column_names:
                for leaf in _leaves(columns[column].combine_chunks()):
                    leaf.validate(full=True)
                    total.update(pa.record_batch([leaf], ["values"]).serialize())
        except pa.ArrowException as error:
            raise damaged(name, f"has rows after {start} that cannot be read ({error})") from error
    return total.hexdigest()[:16]


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    """The flat arrays that hold the values of a nested array."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        yield from _leaves(array.storage)
    elif isinstance(array, pa.ChunkedArray):
        for chunk in array.chunks:
            yield from _leaves(chunk)
    elif pa.types.is_struct(kind):
        yield array.is_valid()
        for field in array.flatten():
            yield from _leaves(field)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield pc.list_value_length(array)
        yield from _leaves(array.flatten())
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        yield pc.binary_length(array)
    else:
        yield array


def media_root(path: str | Path) -> Path | str:
    """The folder that media paths may not leave: the dataset's, or for a hub name the cache of `datasets`."""
    local = Path(path)
    if stores.is_store(path):
        return stores.parent(path)
    if not local.exists():
        return Path(datasets.config.HF_CACHE_HOME)
    return local if local.is_dir() else local.parent
