"""Which checkpoint adapters belong to, without reading all of it."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from megatron_vlm.config import ConfigError
from megatron_vlm.files import open_file
from megatron_vlm.messages import printable
from megatron_vlm.weight_files import header, weight_files

SAMPLE = 4096  # bytes that are looked at in the middle of each tensor


def fingerprint(folder: Path) -> str:
    """XXH3 of the names, types and shapes of a checkpoint's tensors, and of some bytes of each.

    It is the same however the tensors are spread over files. A tensor whose other bytes alone differ is not
    noticed; training changes all.
    """
    seen = []
    for name in weight_files(folder):
        tensors, first = header(folder / name)
        with open_file(folder / name) as file:
            for key, entry in tensors.items():
                start, end = entry["data_offsets"]
                file.seek(first + max(start, (start + end - SAMPLE) // 2))
                sample = xxhash.xxh3_64_hexdigest(file.read(min(SAMPLE, end - start)))
                seen.append([key, entry["dtype"], entry["shape"], sample])
    return xxhash.xxh3_64_hexdigest(json.dumps(sorted(seen)).encode())


def check_same(path: Path, saved: list[str] | None, now: list[str] | None) -> None:
    """Raises ConfigError unless the saved adapters, if it holds any, belong to this model."""
    if saved == now:
        return
    if saved is None or now is None:
        held, wanted = ("whole weights", "adapters") if saved is None else ("adapters", "whole weights")
        why = f"holds {held}, and this run trains {wanted}; set adapter.* as it was, or give another run_dir."
    elif saved[0] != now[0]:
        why = (
            f"holds adapters of a base model with fingerprint {printable(saved[0])}, and model.hf_path has "
            f"{now[0]}; give the checkpoint on which they were trained, or another run_dir."
        )
    else:
        why = "holds adapters of other modules, ranks or scales; set adapter.* as it was, or another run_dir."
    raise ConfigError(f"checkpoint: {printable(path)} {why}")
