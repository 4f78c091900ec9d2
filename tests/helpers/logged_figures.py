"""The rows of a run's metrics.jsonl that two equal runs have alike."""

from pathlib import Path

from megatron_vlm.callbacks.run_log import read_rows

OF_THE_MOMENT = (
    "seconds",
    "per_second",
    "per_device",
    "mfu",
    "peak_memory_gb",
)  # how names end that differ


def figures(run_dir: Path) -> list[dict]:
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    return [{name: row[name] for name in row if not name.endswith(OF_THE_MOMENT)} for row in rows]
