"""Hugging Face `datasets` as a source, through the very encoder that Energon uses.

Rows stay on disk (Arrow, memory-mapped) and images encoded until a worker encodes the sample. The order of
rows and what is packed together depend on seed, epoch, rank and world size alone, so the state is a few
numbers and fits any number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from megatron.energon import SkipSample
from torch.utils.data import DataLoader, Dataset

from megatron_vlm.config import DataConfig
from megatron_vlm.data.chatml import BadSample, ChatMLSample
from megatron_vlm.data.drops import TooManyDrops
from megatron_vlm.data.encoder import PackingVLMTaskEncoder
from megatron_vlm.data.loader_state import FORMAT, check_fingerprint, digest
from megatron_vlm.data.loaders import (
    close_loader,
    encoder_settings,
    equal_length,
    next_or_too_many_drops,
    with_limited_drops,
)
from megatron_vlm.data.measured import measure_dataset
from megatron_vlm.data.orders import (
    BalancedRows,
    BufferedPacking,
    Measured,
    Place,
    RandomOrder,
    pieces,
)
from megatron_vlm.data.records import conversation_json, conversation_of, images_of, without_nulls

VALIDATION_SPLITS = ("val", "validation", "valid")
FINGERPRINT_ROWS = 16
MEASURED_AT_ONCE = 25  # rows that a worker measures before it hands them over


@dataclass
class HFProvider:
    """Loaders of a folder in `datasets` format, a folder or file of parquet, or a hub name.

    `columns` renames columns of the source to `conversations` or `messages` and `image` or `images`.
    With `packing` (see DataConfig) the training loader's encoder must be a PackingVLMTaskEncoder. For
    "global" packing and `group_by_length` the whole dataset is measured when the training loader is built,
    once for all runs that share `lengths_cache`.
    """

    train_data_path: str
    valid_data_path: str | None = None
    num_workers: int = 2
    max_drop_share: float = 0.05
    columns: Mapping[str, str] | None = None
    packing: str = "none"
    packing_buffer_size: int = 1000
    group_by_length: bool = False
    lengths_cache: str | None = None

    @classmethod
    def from_config(cls, data: DataConfig) -> HFProvider:
        return cls(
            data.train_data_path,
            data.valid_data_path,
            num_workers=data.num_workers,
            max_drop_share=data.max_drop_share,
            packing=data.packing,
            packing_buffer_size=data.packing_buffer_size,
            group_by_length=data.group_by_length,
            lengths_cache=data.lengths_cache,
        )

    def train_loader(
        self, encoder, *, micro_batch_size: int, rank: int, world_size: int, seed: int
    ) -> HFTrainLoader:
        """Endless, each epoch in a new order, savable; `rank` and `world_size` are those of data parallelism.

        Raises ValueError for fewer rows than ranks.
        """
        rows = self.train_rows(encoder)
        if len(rows) < world_size:
            raise ValueError(
                f"data: {self.train_data_path} has {len(rows)} rows for {world_size} data-parallel ranks; "
                "use fewer ranks or more data."
            )
        settings = {
            "dataset": rows.fingerprint(),
            "rank": rank,
            "world_size": world_size,
            "seed": seed,
            "micro_batch_size": micro_batch_size,
            "packing": self.packing,
            "packing_buffer_size": self.packing_buffer_size if self.packing == "stream" else None,
            "group_by_length": self.group_by_length,
        }
        order = self._order(rows, micro_batch_size, rank, world_size, seed)
        if isinstance(order, BalancedRows):
            settings["lengths"] = digest([order.tokens.tolist(), order.patches.tolist()])
        return HFTrainLoader(rows, order, micro_batch_size, self.num_workers, settings)

    def train_rows(self, encoder) -> EncodedRows:
        names = split_names(self.train_data_path)
        return self._rows(self.train_data_path, "train" if "train" in names else None, encoder)

    def _order(self, rows: EncodedRows, micro_batch_size: int, rank: int, world_size: int, seed: int):
        if self.packing == "global" or self.group_by_length:
            tokens, patches = measure_dataset(rows, self.lengths_cache, self.num_workers, rank, world_size)
            capacity = rows.encoder.seq_length if self.packing == "global" else None
            limits = capacity, getattr(rows.encoder, "max_patches", None)
            return BalancedRows(tokens, patches, rank, world_size, micro_batch_size, seed, *limits)
        order = RandomOrder(len(rows), rank, world_size, seed)
        if self.packing == "none":
            return order
        measure = _Measuring(rows, self.packing_buffer_size, self.num_workers)
        return BufferedPacking(order, self.packing_buffer_size, measure, rows.encoder.select_rows)

    def valid_loader(
        self, encoder, *, micro_batch_size: int, rank: int, world_size: int, seed: int = 0
    ) -> HFValidLoader | None:
        """Finite, in stored order, each row on exactly one rank, the same number of batches on every rank.

        None when no validation path is set and the training dataset has no validation split.
        """
        path = self.valid_data_path or self.train_data_path
        names = split_names(path)
        split = next((name for name in VALIDATION_SPLITS if name in names), None)
        if split is None and self.valid_data_path is None:
            return None
        rows = self._rows(path, split, encoder)
        return HFValidLoader(rows, rank, world_size, micro_batch_size, self.num_workers)

    def _rows(self, path: str, split: str | None, encoder) -> EncodedRows:
        rows = open_rows(path, split)
        if self.columns:
            rows = rows.rename_columns(dict(self.columns))
        return EncodedRows(rows, _media_root(path), with_limited_drops(encoder, self.max_drop_share))


class EncodedRows(Dataset):
    """(place, row indices) → (place, their documents as one encoded sample, None when all were dropped)."""

    def __init__(self, rows: datasets.Dataset, root: Path, encoder) -> None:
        self.rows, self.root, self.encoder = rows, root, encoder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: tuple[Any, list[int]]) -> tuple[Any, Any]:
        place, indices = item
        encoded = [sample for index in indices if (sample := self._kept(self._encode, index)) is not None]
        if not encoded:
            return place, None
        row = self._row(encoded)
        row.__restore_key__ = indices
        return place, row

    def measured(self, index: int) -> tuple[int, int] | None:
        """(tokens, patches) of a row's encoding, None when it is dropped."""
        return self._kept(self.encoder.measure, index)

    def _encode(self, sample: ChatMLSample):
        if isinstance(self.encoder, PackingVLMTaskEncoder):
            return self.encoder.postencode_sample(self.encoder.preencode_sample(sample))
        return self.encoder.encode_sample(sample)

    def _row(self, documents: list):
        if isinstance(self.encoder, PackingVLMTaskEncoder):
            return self.encoder.pack_selected_samples(documents)
        (document,) = documents
        return document

    def _kept(self, encode: Callable[[ChatMLSample], Any], index: int) -> Any:
        try:
            return encode(self.sample(index))
        except SkipSample:
            return None
        except TooManyDrops:
            raise
        except Exception as error:
            raise RuntimeError(f"data: sample {_key(index)}: {type(error).__name__}: {error}") from error

    def sample(self, index: int) -> ChatMLSample:
        """As Energon's cooker gives it; what is wrong with the row travels in `problem` to the encoder."""
        row = without_nulls(self.rows[index])
        try:
            fields = {
                "conversation": conversation_json(conversation_of(row)).decode(),
                "imgs": images_of(row, self.root) or None,
            }
        except BadSample as bad:
            fields = {"conversation": "", "problem": bad}
        return ChatMLSample(__key__=_key(index), __restore_key__=(), **fields)

    def batch(self, samples: list) -> dict:
        return self.encoder.encode_batch(self.encoder.batch(samples))

    def fingerprint(self) -> str:
        """Of the rows themselves, so that a dataset may move."""
        conversations = self.rows.select_columns(
            [c for c in self.rows.column_names if not c.startswith("image")]
        )
        picked = np.linspace(0, len(self) - 1, min(len(self), FINGERPRINT_ROWS)).astype(int)
        return f"{len(self)} rows, {digest([conversations[int(index)] for index in picked])}"


class _Measuring(Dataset):
    """Called with an order, what its rows cost, measured by workers up to a buffer ahead."""

    def __init__(self, rows: EncodedRows, buffer_size: int, num_workers: int) -> None:
        self._rows, self._num_workers = rows, num_workers
        self._ahead = -(-buffer_size // (MEASURED_AT_ONCE * max(1, num_workers)))
        self._loader: DataLoader | None = None

    def __call__(self, order: RandomOrder) -> Iterator[Measured]:
        self._loader = _loader(self, pieces(order, MEASURED_AT_ONCE), self._num_workers, self._ahead)
        return itertools.chain.from_iterable(self._loader)

    def __getitem__(self, piece: list[tuple[Place, list[int]]]) -> list[Measured]:
        return [(place, index, self._rows.measured(index)) for place, [index] in piece]

    def close(self) -> None:
        if self._loader is not None:
            close_loader(self._loader)


class HFTrainLoader:
    """An endless iterator of batches; `state_dict` is the state after the last batch yielded."""

    def __init__(
        self, rows: EncodedRows, order, micro_batch_size: int, num_workers: int, settings: dict
    ) -> None:
        self._rows, self._order, self._micro_batch_size = rows, order, micro_batch_size
        self._loader = _loader(rows, order, num_workers)
        self._batches: Iterator[dict] | None = None
        self._place = order.place
        self.fingerprint = settings | encoder_settings(rows.encoder)

    def __iter__(self) -> HFTrainLoader:
        return self

    def __next__(self) -> dict:
        if self._batches is None:
            self._batches = self._make_batches()
        return next_or_too_many_drops(self._batches, self._rows.encoder.drops)

    def _make_batches(self) -> Iterator[dict]:
        samples = []
        for place, sample in self._loader:
            if sample is not None:
                samples.append(sample)
            if len(samples) == self._micro_batch_size:
                self._place = place
                yield self._rows.batch(samples)
                samples = []

    def state_dict(self) -> dict:
        """JSON data."""
        return {"format": FORMAT, "fingerprint": self.fingerprint, "place": list(self._place)}

    def load_state_dict(self, state: dict) -> None:
        """Continue after the batch that `state` was saved behind; only before the first batch.

        Raises ValueError that names the difference when the state is of another dataset, rank or setting.
        """
        if self._batches is not None:
            raise RuntimeError("loader: load_state_dict after the first batch; load it into a new loader.")
        if state.get("format") != FORMAT:
            raise ValueError(f"loader state: format {state.get('format')}, this version reads {FORMAT}.")
        check_fingerprint(state["fingerprint"], self.fingerprint)
        self._place = self._order.place = tuple(state["place"])

    def replay(self, restore_key: list[list[int]]) -> dict:
        """The batch whose `__restore_key__` this is, from this dataset, in this or a later process."""
        return self._rows.batch([self._rows[None, indices][1] for indices in restore_key])

    def close(self) -> None:
        """End the workers at once."""
        close_loader(self._loader)
        if isinstance(self._order, BufferedPacking):
            self._order.measure.close()


class HFValidLoader:
    """Each `for` is one pass over the rows, with workers of its own that end with it.

    A rank that runs short yields fully masked copies of its last batch (`loss_mask` all 0, no keys), so that
    every rank yields `len(self)` batches.
    """

    def __init__(
        self, rows: EncodedRows, rank: int, world_size: int, micro_batch_size: int, num_workers: int
    ) -> None:
        self._rows, self._mine = rows, range(rank, len(rows), world_size)
        self._micro_batch_size, self._num_workers = micro_batch_size, num_workers
        most_rows = -(-len(rows) // world_size)
        self._length = -(-most_rows // micro_batch_size)
        self._loader: DataLoader | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict]:
        return equal_length(self._checked(self._mine), len(self), self._first_batch)

    def close(self) -> None:
        """End the workers of a pass under way at once."""
        if self._loader is not None:
            close_loader(self._loader)

    def _checked(self, indices: range) -> Iterator[dict]:
        batches = self._make_batches(indices)
        while (batch := next_or_too_many_drops(batches, self._rows.encoder.drops)) is not None:
            yield batch

    def _make_batches(self, indices: range) -> Iterator[dict]:
        loader = self._loader = _loader(self._rows, [(None, [index]) for index in indices], self._num_workers)
        try:
            encoded = (sample for _, sample in loader if sample is not None)
            while samples := list(itertools.islice(encoded, self._micro_batch_size)):
                yield self._rows.batch(samples)
        finally:
            close_loader(loader)

    def _first_batch(self) -> dict:
        """Of all rows, for a rank that has none of its own."""
        for batch in self._make_batches(range(len(self._rows))):
            return batch
        raise ValueError("data: the validation rows give no sample; all were dropped.")


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


def _media_root(path: str) -> Path:
    """Image paths must lie in the dataset's folder, or for a hub name in the cache of `datasets`."""
    local = Path(path)
    if not local.exists():
        return Path(datasets.config.HF_CACHE_HOME)
    return local if local.is_dir() else local.parent


def _loader(rows: Dataset, order, num_workers: int, prefetch_factor: int = 2) -> DataLoader:
    return DataLoader(
        rows,
        batch_size=None,
        sampler=order,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0,  # keeps the iterator where `close_loader` finds it
        collate_fn=_unchanged,
        generator=torch.Generator(),  # the run's own random numbers stay as they are
        multiprocessing_context="fork" if num_workers else None,
    )


def _unchanged(item: Any) -> Any:
    return item


def _key(index: int) -> str:
    return f"{index:09d}"
