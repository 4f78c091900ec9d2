"""The adapter_config.json of a folder that peft wrote, as settings; without torch.

It may come from anyone: each value is read as peft reads it, has no effect, or is refused by file and key.
"""

import json
from dataclasses import replace
from pathlib import Path

from megatron_vlm.config import AdapterConfig, ConfigError, RunConfig
from megatron_vlm.config_rules.adapters import adapter_problems
from megatron_vlm.files import read_file
from megatron_vlm.inputs import odd_fields
from megatron_vlm.messages import join_lines
from megatron_vlm.overrides import apply_overrides

CONFIG = "adapter_config.json"
READ = {  # and what peft takes as their values
    **{"r": int, "lora_alpha": int | float, "lora_dropout": int | float | None},
    **dict.fromkeys(("use_rslora", "use_dora"), bool | None),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), str | list[str] | None),
    **dict.fromkeys(("target_parameters", "modules_to_save"), list[str] | None),
    **{"layers_to_transform": int | list[int] | None},
    **{"rank_pattern": dict[str, int] | None, "alpha_pattern": dict[str, int | float] | None},
}
LAYERS = ("layers_to_transform", "layers_pattern")  # one, or a list
PATTERNS = ("target_modules", "exclude_modules")  # a regex, or a list
# what changes nothing in the adapter's numbers, whatever its value
WITHOUT_EFFECT = ("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping")
WITHOUT_EFFECT += ("peft_version", "megatron_core", "runtime_config", "qalora_group_size", "fan_in_fan_out")
WITHOUT_EFFECT += ("loftq_config", "eva_config", "corda_config", "lora_ga_config")  # none of PLAIN_STARTS
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")  # others of peft change the base weights
OFF = (None, False, "none", {}, [])  # values by which a key has no effect
MOST_BYTES = 1 << 24  # of a config file


def with_peft_settings(adapter: AdapterConfig) -> AdapterConfig:
    """The settings that count: the folder's in `adapter.start`, if there is one.

    Raises ConfigError, which names the file, for a folder that is none of peft's, or whose adapter is of a
    kind that cannot be trained.
    """
    if adapter.start is None:
        return adapter
    file = Path(adapter.start) / CONFIG
    place = f"adapter.start: {file}"
    try:
        given = json.loads(read_file(file, MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place} cannot be read ({error}); give a folder that peft wrote.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{place} holds no JSON object; give a folder that peft wrote.")
    if (kind := given.get("peft_type")) != "LORA":
        raise ConfigError(f"{place} describes peft_type {kind!r}; only LoRA adapters (LORA) are trained.")
    if (start := given.get("init_lora_weights")) not in PLAIN_STARTS:
        raise ConfigError(f"{place}: init_lora_weights {start} changed the base weights; merge it first.")
    known = {*READ, *WITHOUT_EFFECT, "peft_type", "init_lora_weights"}
    for key, value in given.items():
        if key not in known and value not in OFF:
            shown = f"{key} {value}"
            raise ConfigError(f"{place}: {shown} is not supported; train without it.")
    for problem in odd_fields(given, READ):
        raise ConfigError(f"{place}: {problem}; correct it, or give a folder that peft wrote.")
    given |= {key: [given[key]] for key in LAYERS if isinstance(given.get(key), int | str)}
    # as settings, a regex such as [qk]_proj would be read as a list
    regexes = {key: given.pop(key) for key in PATTERNS if given.get(key) and isinstance(given[key], str)}
    settings = {f"adapter.{key}": given[key] for key in READ if given.get(key) or given.get(key) == 0}
    if "adapter.target_parameters" in settings:  # to peft, no modules are then none
        settings.setdefault("adapter.target_modules", [])
    try:
        run = apply_overrides(RunConfig(), settings)
    except ConfigError as error:
        lines = [f"{place}: {problem}" for problem in str(error).splitlines()]
        raise ConfigError(join_lines(lines)) from error
    if run.adapter.r < 1:
        raise ConfigError(f"{place}: r {run.adapter.r} is no rank; give the folder of another adapter.")
    run.adapter = replace(run.adapter, **regexes)
    for problem in adapter_problems(run):
        raise ConfigError(f"{place}: {problem}")
    return run.adapter
