"""What this Transformers' config classes have and its models ask for, and what `describe` says of each.

Run as a program by `test_configs.py`, under the oldest and the newest version, with one folder a family.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import parity
import torch
import transformers

from megatron_vlm.models.families import describe
from megatron_vlm.models.family_parts.limits import ASKED_FOR, PARTS, dotted, keys_read, limits_of, part_of

asked: dict[int, set[str]] = {}  # of configs, by identity


def listen(section: Any, key: str) -> Any:
    asked.setdefault(id(type(section)), set()).add(key)
    return _plain(section, key)


_plain = transformers.PretrainedConfig.__getattribute__


def another(value: Any) -> Any:
    """A value of the kind, but not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return 0.5 if value is None else list(value)[:-1]


def unrefused(folder: str) -> list[str]:
    """Fields that nobody reads, that have no limits, and that are not refused by name when they change."""
    accepted = []
    description = describe(transformers.AutoConfig.from_pretrained(folder))
    reads = keys_read(description)
    for name in PARTS:
        names = [each.name for each in dataclasses.fields(part_of(description.hf_config, name))]
        known = limits_of(description, name).keys() | PARTS
        for key in [key for key in names if key not in known and dotted(name, key) not in reads]:
            changed = transformers.AutoConfig.from_pretrained(folder)
            part = part_of(changed, name)
            setattr(part, key, another(getattr(part, key)))
            try:
                describe(changed)
            except ValueError as error:
                if f"  {dotted(name, key)} is " in str(error):
                    continue
            accepted.append(dotted(name, key))
    return accepted


def names_asked(folder: str) -> list[list[str]]:
    """By section: what Transformers asks its configs for while it loads, runs and differentiates a model."""
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    description = describe(hf_config)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    rows = [row for row in ("t", "it", "vt") if "v" not in row or parity.takes_videos(description)]
    inputs = [parity.encode(processor, description, [row])[0] for row in rows]
    transformers.PretrainedConfig.__repr__ = object.__repr__  # a log's; it asks for every key there is
    asked.clear()
    transformers.PretrainedConfig.__getattribute__ = listen
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = parity.clip_by_clip(model).train()
    for each in inputs:
        model(**each, use_cache=False).loss.backward()
    transformers.PretrainedConfig.__getattribute__ = _plain
    return [sorted(_no_constants(part_of(hf_config, name))) for name in PARTS]


def _no_constants(section: Any) -> set[str]:
    """Names that config.json can set: neither private nor constants and methods of Transformers' class."""
    kind = type(section)
    settable = {name for name in dir(kind) if getattr(getattr(kind, name, None), "fset", None)}
    names = {each.name for each in dataclasses.fields(kind)} | settable
    return {
        key
        for key in {kind.attribute_map.get(key, key) for key in asked.get(id(kind), ())}
        if not key.startswith("_") and (key in names or not hasattr(kind, key))
    }


def main(folders: list[str]) -> dict:
    result: dict[str, Any] = {"version": transformers.__version__, "families": {}}
    for folder in folders:
        hf_config = transformers.AutoConfig.from_pretrained(folder)
        description = describe(hf_config)
        parts = [part_of(hf_config, name) for name in PARTS]
        own = [description.limits[name].keys() for name in PARTS]
        result["families"][Path(folder).name] = {
            "fields": [sorted(each.name for each in dataclasses.fields(part)) for part in parts],
            "limits": [sorted(keys) for keys in own],
            "kept": [sorted({*keys, *ASKED_FOR, *PARTS}) for keys in own],
            "unrefused": unrefused(folder),
            "asked": names_asked(folder),
        }
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
