"""A line for each start of a run, with its command and versions, in `<run_dir>/starts.jsonl`.

A line holds `step` (the first that it was to train), `total_steps`, `time` (seconds since 1970), `command`
(the words of its command line), `processes`, `host`, `device` and `versions`.
"""

import json
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_vlm.files import open_to_write
from megatron_vlm.job.watchdog import world_size

FILE = "starts.jsonl"
PACKAGES = ("megatron-vlm", "torch", "megatron-core", "transformers", "megatron-energon")


def note_start(run_dir: str | Path, first_step: int, total_steps: int) -> None:
    """Adds the line of this start, which the first rank writes."""
    row = {"step": first_step, "total_steps": total_steps, "time": time.time(), "command": sys.argv}
    row |= {"processes": world_size(), "host": socket.gethostname(), "device": _device()}
    row["versions"] = {"python": sys.version.split()[0], **{name: _version(name) for name in PACKAGES}}
    with open_to_write(Path(run_dir) / FILE, "ab") as file:
        file.write(json.dumps(row).encode() + b"\n")


def _device() -> str:
    torch = sys.modules.get("torch")  # a run has imported it
    return torch.cuda.get_device_name() if torch and torch.cuda.is_available() else "CPU"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
