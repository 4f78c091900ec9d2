"""Tokens and patches of every row of a dataset, measured once and kept on disk.

They lie in a folder named after the data and all settings that decide them, in parts that are written whole.
So an interrupted measurement continues where it was, and several processes on one folder share the work.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy import ndarray
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from megatron_vlm.data.drops import DropReport
from megatron_vlm.data.fingerprint import digest, encoder_settings
from megatron_vlm.job import watchdog

PART = 1000  # rows in a file
DROPPED = -1


def default_folder() -> Path:
    """The folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megatron_vlm" / "lengths"


def measure_dataset(
    rows, folder: str | Path | None = None, num_workers: int = 0, rank: int = 0, world_size: int = 1
) -> tuple[ndarray, ndarray]:
    """(tokens, patches) of each row of an `EncodedRows`; DROPPED for a row that is dropped.

    Reads the parts that `folder` has and measures the rest, with a progress bar on rank 0. Ranks begin with
    different parts; a rank measures the parts of others too if they are missing, so no rank waits.
    """
    folder = Path(folder or default_folder()) / _key(rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"data.lengths_cache: {folder} cannot be made ({error.strerror}); set it to a folder that can be "
            "written."
        ) from error
    parts = [folder / f"{start:012d}.npy" for start in range(0, len(rows), PART)]
    missing = [number for number, path in enumerate(parts) if not path.exists()]
    missing.sort(key=lambda number: (number - rank) % world_size)
    loader = DataLoader(
        _Parts(rows, parts),
        batch_size=None,
        sampler=missing,
        num_workers=num_workers if missing else 0,
        generator=torch.Generator(),  # the run's own random numbers stay as they are
        multiprocessing_context="fork" if num_workers and missing else None,
    )
    done = len(rows) - sum(min(PART, len(rows) - number * PART) for number in missing)
    with tqdm(
        total=len(rows), initial=done, desc="measuring", unit="row", disable=rank > 0 or not missing
    ) as bar:
        for count in loader:
            bar.update(count)
            watchdog.beat()
    measured = np.concatenate([np.load(path) for path in parts])
    if len(measured) != len(rows):
        raise ValueError(
            f"{folder}: lengths of {len(measured)} rows, the data has {len(rows)}; delete the folder."
        )
    return measured[:, 0], measured[:, 1]


class _Parts(Dataset):
    """Number of a part → how many rows it has. Writes the part's file if it is missing."""

    def __init__(self, rows, paths: list[Path]) -> None:
        self._rows, self._paths = copy.copy(rows), paths
        self._rows.encoder = copy.copy(rows.encoder)
        self._rows.encoder.drops = DropReport()  # the run counts a drop when it reaches the sample

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> int:
        path, indices = self._paths[number], range(number * PART, min((number + 1) * PART, len(self._rows)))
        if not path.exists():
            costs = [self._rows.measured(index) or (DROPPED, DROPPED) for index in indices]
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            with temporary.open("wb") as file:
                np.save(file, np.array(costs, np.int32))
            temporary.replace(path)
        return len(indices)


def _key(rows) -> str:
    settings = encoder_settings(rows.encoder)
    return digest([rows.fingerprint, rows.table.identity, settings, transformers.__version__])
