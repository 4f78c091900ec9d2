"""Checks that a run on preference pairs has data of pairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.checks.data_on_disk import RECORD_KEYS
from megatron_vlm.config import DataConfig
from megatron_vlm.data.on_disk.lines import first_records
from megatron_vlm.data.paths import paths_of
from megatron_vlm.messages import printable

REJECTED = ("rejected", "rejected_response", "rejected_messages")  # as `data.records.preferences` reads them


def pair_problems(data: DataConfig) -> Iterator[str]:
    """JSON files of a run on preference pairs that begin with other records."""
    names = {data.columns.get(name, name) for name in REJECTED}
    for key in ("train_data_path", "valid_data_path") if data.dataset_type == "hf" else ():
        for name in paths_of(getattr(data, key)):
            path = Path(name).expanduser()
            records = list(first_records(path)) if path.is_file() else []
            known = any(each.keys() & RECORD_KEYS for each in records)  # no meta file
            if known and not any(names & each.keys() for each in records):
                yield (
                    f"data.{key}: {printable(name)}: its first {len(records)} records have no rejected "
                    f"answer ({', '.join(sorted(names))}), which train.objective=dpo needs; give preference "
                    "records, or drop the objective."
                )
