"""Tokens and patches of rows before they are encoded: of a whole dataset, kept in files, or a buffer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy import ndarray
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from xxhash import xxh3_64_digest

from megatron_vlm.data.accounts.drops import lost_samples
from megatron_vlm.data.accounts.fingerprint import digest, encoder_settings
from megatron_vlm.data.load.base import loader_of
from megatron_vlm.data.load.sampler import Measured, Position, ShuffledSampler, StreamSampler
from megatron_vlm.data.load.workers import close_loader
from megatron_vlm.files import add_path_to_errors, atomic_write, read_file
from megatron_vlm.job import watchdog
from megatron_vlm.messages import QUIET, printable

PART = 1000  # rows in a file
DROPPED = -1
MEASURED_AT_ONCE = 25  # rows that a worker measures before it hands them over


def measure_dataset(
    rows, folder: str | Path | None = None, num_workers: int = 0, rank: int = 0, world_size: int = 1
) -> tuple[ndarray, ndarray]:
    """(tokens, patches) of each row of an `EncodedRows`; DROPPED for a row that is dropped.

    Reads the parts that `folder` has and measures the rest, with a progress bar on rank 0. Ranks begin with
    different parts; a rank measures the parts of others too if they are missing, so no rank waits.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    settings = encoder_settings(rows.encoder)
    key = digest([rows.fingerprint, rows.table.identity, settings, transformers.__version__])
    folder = Path(folder or cache / "megatron_vlm" / "lengths") / key
    with add_path_to_errors(folder, "set data.lengths_cache to a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
    parts = _Parts(rows, folder)
    missing = [number for number in range(len(parts)) if parts.read(number) is None]
    if (damaged := sum(parts.path(number).exists() for number in missing)) and not rank:
        tqdm.write(printable(f"data.lengths_cache: {damaged} damaged files of {folder} are measured again"))
    # each rank begins elsewhere, so that ranks together measure every part once
    missing.sort(key=lambda number: (number - rank) % world_size)
    loader = loader_of(parts, missing, num_workers if missing else 0)
    done = len(parts) - len(missing)
    quiet = QUIET in os.environ or rank > 0 or not missing
    for _ in tqdm(loader, "measuring", len(parts), unit=f" x {PART} rows", initial=done, disable=quiet):
        watchdog.beat()
    tokens, patches = np.concatenate([parts.read(number) for number in range(len(parts))]).T
    return tokens, patches


class _Parts(Dataset):
    """Measures a part, by its number, if its file is missing or damaged. A file has a checksum before the
    numbers."""

    def __init__(self, rows, folder: Path) -> None:
        self._rows, self._folder = rows, folder

    def __len__(self) -> int:
        return -(-len(self._rows) // PART)

    def __getitem__(self, number: int) -> None:
        if self.read(number) is None:
            costs = [self._rows.measured(index) or (DROPPED, DROPPED) for index in self._indices(number)]
            content = np.array(costs, "<i4").tobytes()
            atomic_write(self.path(number), xxh3_64_digest(content) + content)

    def path(self, number: int) -> Path:
        return self._folder / f"{number * PART:012d}.lengths"

    def read(self, number: int) -> ndarray | None:
        """(tokens, patches) of each row of a part; None if its file is missing or is not what was written."""
        try:
            raw = read_file(self.path(number))
        except (OSError, ValueError):
            return None
        is_whole = len(raw) == 8 * (1 + len(self._indices(number))) and xxh3_64_digest(raw[8:]) == raw[:8]
        return np.frombuffer(raw[8:], "<i4").reshape(-1, 2) if is_whole else None

    def _indices(self, number: int) -> range:
        return range(number * PART, min((number + 1) * PART, len(self._rows)))


class Measuring(Dataset):
    """Called with a sampler: what each of its rows costs. Workers measure up to a buffer ahead.

    `rows` are `EncodedRows`.
    """

    def __init__(self, rows, buffer_size: int, num_workers: int) -> None:
        self._rows, self._num_workers = rows, num_workers
        self._ahead = -(-buffer_size // (MEASURED_AT_ONCE * max(1, num_workers)))
        self._loader: DataLoader | None = None

    def __call__(self, sampler: ShuffledSampler | StreamSampler) -> Iterator[Measured]:
        self.close()
        pieces, handed_out = itertools.tee(itertools.batched(sampler, MEASURED_AT_ONCE))
        self._loader = loader_of(self, handed_out, self._num_workers, self._ahead)
        return self._check_measures(pieces)

    def _check_measures(self, pieces: Iterator[tuple[tuple[Position, list[int]], ...]]) -> Iterator[Measured]:
        """The measures of the workers. Raises LostSample if they are not of the rows that were asked for."""
        key = self._rows.table.key
        for measured, piece in zip(self._loader, pieces, strict=True):
            expected = [(place, key(row)) for place, [row] in piece]
            if [position_and_key for position_and_key, _ in measured] != expected:
                raise lost_samples([key for _, key in expected], "not measured by the worker asked to")
            for (place, [row]), (_, costs) in zip(piece, measured, strict=True):
                yield place, row, costs

    def __getitem__(self, piece: tuple[tuple[Position, list], ...]) -> list[tuple[tuple[Position, str], Any]]:
        return [((place, self._rows.table.key(row)), self._rows.measured(row)) for place, [row] in piece]

    def close(self) -> None:
        if self._loader is not None:
            close_loader(self._loader)
