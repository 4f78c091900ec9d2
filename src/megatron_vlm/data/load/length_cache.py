"""Tokens and patches of every row of a dataset, measured once and kept on disk.

They lie in a folder named after the data and all settings that decide them, in parts that are written whole
and carry a checksum. So an interrupted measurement continues where it was, a damaged part is measured again,
and several processes on one folder share the work.
"""

import os
from pathlib import Path

import numpy as np
import transformers
from numpy import ndarray
from torch.utils.data import Dataset
from tqdm import tqdm
from xxhash import xxh3_64_digest

from megatron_vlm.data.accounts.fingerprint import digest, encoder_settings
from megatron_vlm.data.load.workers import loader_of
from megatron_vlm.files import naming, read_file, write_whole
from megatron_vlm.job import watchdog
from megatron_vlm.messages import printable

PART = 1000  # rows in a file
DROPPED = -1


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
    with naming(folder, "set data.lengths_cache to a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
    parts = _Parts(rows, folder)
    missing = [number for number in range(len(parts)) if parts.read(number) is None]
    if (damaged := sum(parts.path(number).exists() for number in missing)) and not rank:
        tqdm.write(printable(f"data.lengths_cache: {damaged} damaged files of {folder} are measured again"))
    # each rank begins elsewhere, so that ranks together measure every part once
    missing.sort(key=lambda number: (number - rank) % world_size)
    loader = loader_of(parts, missing, num_workers if missing else 0)
    done = len(parts) - len(missing)
    quiet = rank > 0 or not missing
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
            write_whole(self.path(number), xxh3_64_digest(content) + content)

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
