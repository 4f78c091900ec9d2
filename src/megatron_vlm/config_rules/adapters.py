"""Rules for the settings of adapters that need no model to look its modules up in."""

from collections.abc import Iterator

from megatron_vlm.config import AdapterConfig, RunConfig, all_settings
from megatron_vlm.config_rules.patterns import problem

# peft takes modules_to_save for patterns when it leaves out their adapters
PATTERNS = ("modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")


def adapter_problems(config: RunConfig) -> Iterator[str]:
    """Messages for the user about what is wrong with `config.adapter`."""
    adapter = config.adapter
    default = all_settings(AdapterConfig())
    changed = [
        name for name, value in all_settings(adapter).items() if value != default[name] and name != "start"
    ]
    if adapter.start is not None:
        for name in changed:
            yield f"adapter.{name}: is settled by the folder of adapter.start; drop one of the two."
    elif adapter.r == 0:
        for name in changed:
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
    if adapter.layers_to_transform and isinstance(adapter.target_modules, str):
        yield (
            f"adapter.layers_to_transform: {adapter.layers_to_transform} with the regex of target_modules: "
            "peft takes one of them alone; let the regex name the layers."
        )
    if adapter.layers_pattern and not adapter.layers_to_transform:
        yield "adapter.layers_pattern: is set without adapter.layers_to_transform; set both, or none."
    for name in ("target_modules", "exclude_modules"):
        is_none_needed = name == "target_modules" and adapter.target_parameters
        if getattr(adapter, name) == [] and not is_none_needed:
            yield f"adapter.{name}: [] names no modules; give ends of their names, as [q_proj, v_proj]."
    patterns = [(name, pattern) for name in PATTERNS for pattern in getattr(adapter, name)]
    patterns += [(name, getattr(adapter, name)) for name in ("target_modules", "exclude_modules")]
    for name, pattern in patterns:
        if isinstance(pattern, str) and (why := problem(pattern)):  # else names in a list, or none
            yield f"adapter.{name}: {pattern} is no regular expression ({why}); names go into a list."
