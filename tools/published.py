"""Write what becomes of published checkpoints into docs/reference/checkpoints.md.

python tools/published.py            rewrite the table
python tools/published.py --check    exit 1 when the page does not show what happens today
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config
from megatron_vlm.recipes.published import CONFIGS
from tables import ROOT, markdown, replaced

PAGE = ROOT / "docs" / "reference" / "checkpoints.md"
LIST = ROOT / "tests" / "published_configs.json"
TRAINS = "trains"


def published() -> Iterator[tuple[dict, dict[str, Any]]]:
    """(entry of the list, its config.json)."""
    stored = json.loads(LIST.read_text(encoding="utf-8"))
    for entry in stored["checkpoints"]:
        config: dict[str, Any] = {}
        if "like" in entry:
            config = json.loads((CONFIGS / f"{entry['like']}.json").read_text(encoding="utf-8"))
        for part in entry.get("parts", ()):
            config |= stored["parts"][part]
        yield entry, over(config, entry.get("with", {}))


def over(config: dict, changes: dict) -> dict:
    """`config` with the changes merged into it, level by level."""
    nested = {
        key: over(config.get(key) or {}, value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    return config | nested


def outcome(config: dict[str, Any]) -> str:
    """TRAINS, or the message that a user gets."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config), encoding="utf-8")
        try:
            description = describe(load_config(folder))
            assert description.architecture and description.rules
        except ValueError as refused:
            return " ".join(str(refused).removeprefix(f"checkpoint {folder}: ").split())
    return TRAINS


def table() -> str:
    rows = (
        (", ".join(f"`{name}`" for name in entry["names"]), outcome(config)) for entry, config in published()
    )
    return markdown(("checkpoints", "what happens"), rows)


def main() -> None:
    old = PAGE.read_text(encoding="utf-8")
    new = replaced(old, table(), "published")
    if "--check" in sys.argv and new != old:
        sys.exit(f"{PAGE.name} does not show what happens to published checkpoints; run tools/published.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
