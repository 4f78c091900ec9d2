"""What can be wrong with what a run trains on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.checks.data_on_disk import RECORD_KEYS
from megatron_vlm.config import DataConfig, RunConfig
from megatron_vlm.data.on_disk.fields import REJECTIONS
from megatron_vlm.data.on_disk.lines import first_records
from megatron_vlm.data.on_disk.paths import paths_of
from megatron_vlm.messages import printable


def objective_problems(config: RunConfig) -> Iterator[str]:
    """What does not go with `train.objective`."""
    if config.train.objective != "dpo":
        return
    if config.data.over_length == "truncate":
        yield (
            "data.over_length: truncate would cut one answer of a pair and leave the other; with "
            "train.objective=dpo, raise data.seq_length for both together, or drop pairs."
        )
    if not config.model.load_weights:
        yield (
            "train.objective: dpo compares with the weights of model.hf_path, and model.load_weights is "
            "false; set it to true."
        )
    if config.train.dpo_beta == 0:
        yield "train.dpo_beta: 0 trains nothing; give a number above 0, such as 0.1."


def pair_problems(data: DataConfig) -> Iterator[str]:
    """JSON files of a run on preference pairs that begin with other records."""
    names = {data.columns.get(name, name) for name in REJECTIONS}
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
