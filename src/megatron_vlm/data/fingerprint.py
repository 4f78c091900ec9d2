"""Which data a loader state belongs to: a few fields that are compared before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

UNKNOWN = "unknown"  # equals any other value of a field


def digest(value: Any) -> str:
    """A short hash of JSON data, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises ValueError that names every field in which the two differ.

    `pipeline` is a digest that covers what has no field of its own; it is named when nothing else differs.
    """
    pairs = {name: (saved.get(name), current.get(name)) for name in saved.keys() | current.keys()}
    different = {name for name, pair in pairs.items() if pair[0] != pair[1] and UNKNOWN not in pair}
    if different:
        named = sorted(different - {"pipeline"}) or ["pipeline"]
        raise ValueError(
            "loader state belongs to another data configuration: "
            + "; ".join(f"{name}: saved {saved.get(name)!r}, now {current.get(name)!r}" for name in named)
            + ". Resume with the settings of the saved run, or begin the data again with data.restart=true."
        )
