"""Rows of a source that are held out for validation, chosen by a hash of their keys.

Whether a row is held out depends on nothing but its key in its own source and the share: not on order, ranks,
workers, seed or other sources. A larger share holds out what a smaller one does, and more.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy import ndarray

from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.data.records.blends import Blend, Table


def is_held_out(key: str, share: float) -> bool:
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    return number < share * 2**64


def divided(table: Table, share: float, held_out: bool) -> Table:
    """The rows that are held out, each once in an epoch; or all others, as often as in `table`, where it
    does not say how many rows an epoch has.

    Raises ValueError if no row is held out, or all rows of one of the sources are.
    """
    tables = table.tables if isinstance(table, Blend) else {"": table}
    chosen, rest = {}, {}
    for name, source in tables.items():
        is_chosen = np.array([is_held_out(source.key(row), share) for row in range(len(source))], bool)
        chosen[name] = ChosenRows(source, np.flatnonzero(is_chosen), f"{share} held out")
        rest[name] = ChosenRows(source, np.flatnonzero(~is_chosen), f"without {share} held out")
    wrong = [f"all {len(one)} rows of {one.origin(0)[0]}" for name, one in tables.items() if not rest[name]]
    wrong += [] if any(chosen.values()) else [f"none of {len(table)} rows"]
    if wrong:
        raise ValueError(
            f"data.validation_share: {share:g} holds out {wrong[0]}; change it, or give data.valid_data_path."
        )
    if not isinstance(table, Blend):
        return (chosen if held_out else rest)[""]
    if held_out:
        some = {name: rows for name, rows in chosen.items() if rows}
        return Blend(some, {name: len(rows) for name, rows in some.items()})
    counts = dict(table.counts)
    for name in counts.keys() - table.exact:
        counts[name] = max(1, round(counts[name] * len(rest[name]) / len(tables[name])))
    return Blend(rest, counts)


@dataclass
class ChosenRows(Table):
    """Some rows of a table, with the keys that they have there."""

    table: Table
    rows: ndarray
    name: str  # which part it is

    def __post_init__(self) -> None:
        self.identity = f"{self.table.identity} {self.name}"

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, index: int) -> tuple[dict, Path]:
        return self.table.record(int(self.rows[index]))

    def origin(self, index: int) -> tuple[str, int]:
        return self.table.origin(int(self.rows[index]))

    def content(self) -> str:
        return digest([self.table.content(), self.name])
