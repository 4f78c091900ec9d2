"""Rules for the settings of adapters that need no model to look its modules up in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_vlm.config import AdapterConfig, RunConfig, all_settings
from megatron_vlm.config_rules.patterns import problem
from megatron_vlm.messages import printable


def adapter_problems(config: RunConfig) -> Iterator[str]:
    """Messages for the user about what is wrong with `config.adapter`."""
    adapter = config.adapter
    default = dict(all_settings(AdapterConfig()))
    given = [name for name, value in all_settings(adapter) if value != default[name] and name != "start"]
    if adapter.start is not None:
        for name in given:
            yield f"adapter.{name}: is settled by the folder of adapter.start; drop one of the two."
    elif adapter.r == 0:
        for name in given:
            yield f"adapter.{name}: is set, and adapter.r is 0, which means no adapters; set adapter.r=16."
    if adapter.used and config.model.freeze:
        yield (
            f"model.freeze: {config.model.freeze} of a run with adapters, whose model is frozen as a whole; "
            "drop it, and choose in adapter.target_modules what has adapters."
        )
    if adapter.used and not config.model.load_weights:
        yield "model.load_weights: false leaves nothing that adapters could adapt; drop it, or the adapters."
    for name in ("use_dora", "lora_dropout"):
        if adapter.target_parameters and getattr(adapter, name):
            yield (
                f"adapter.{name}: {getattr(adapter, name)} with target_parameters: peft has it for modules "
                "alone and could not load such an adapter; set one of them."
            )
    if not (adapter.target_modules == [] and adapter.target_parameters):
        yield from _name_problems("adapter.target_modules", adapter.target_modules)
    yield from _name_problems("adapter.exclude_modules", adapter.exclude_modules)
    for name in adapter.modules_to_save:  # peft takes them for patterns when it leaves out their adapters
        yield from _regex_problems("adapter.modules_to_save", name)
    if adapter.layers_to_transform and isinstance(adapter.target_modules, str):
        yield (
            f"adapter.layers_to_transform: {adapter.layers_to_transform} with the regex of target_modules: "
            "peft takes one of them alone; let the regex name the layers."
        )
    if adapter.layers_pattern and not adapter.layers_to_transform:
        yield "adapter.layers_pattern: is set without adapter.layers_to_transform; set both, or none."
    for pattern in adapter.layers_pattern:
        yield from _regex_problems("adapter.layers_pattern", pattern)
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(adapter, name):
            yield from _regex_problems(f"adapter.{name}", pattern)


def _name_problems(key: str, names: Any) -> Iterator[str]:
    if isinstance(names, str):
        yield from _regex_problems(key, names)
    elif names == []:
        yield f"{key}: [] names no modules; give ends of their names, as [q_proj, v_proj]."


def _regex_problems(key: str, pattern: str) -> Iterator[str]:
    if why := problem(pattern):
        yield f"{key}: {printable(pattern)} is no regular expression ({why}); names go into a list."
