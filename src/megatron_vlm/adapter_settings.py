"""Settings of adapters without torch: their rules, peft's adapter_config.json, and users' patterns."""

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megatron_vlm.config import AdapterConfig, ConfigError, RunConfig, all_settings
from megatron_vlm.files import read_file
from megatron_vlm.inputs import odd_fields
from megatron_vlm.messages import join_lines
from megatron_vlm.overrides import apply_overrides

PEFT_ALPHA = 8.0  # peft's lora_alpha, whatever r is; also the default of runs until version 0.1
SECONDS = 2.0  # of a processor, for one pattern and all names of a model; a usual one takes milliseconds


def problem(pattern: str) -> str | None:
    """Why it is no regular expression that can be used; None if it is one."""
    import regex

    try:
        re.compile(pattern)  # as peft does; what it takes, the other takes, too
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        return str(error)
    return None


def matching(pattern: str, texts: Iterable[str], method: str = "fullmatch") -> dict[str, re.Match]:
    """The texts that the pattern fits by this function of `re`, with what it found.

    Raises ConfigError if that takes too long: Python's `re` cannot be stopped, `regex` can.
    """
    import regex

    test = getattr(regex, method)
    ends = time.process_time() + SECONDS
    matches = {}
    for text in texts:
        try:
            if match := test(pattern, text, timeout=max(ends - time.process_time(), 1e-3)):
                matches[text] = match
        except TimeoutError as error:
            raise ConfigError(
                f"the pattern {pattern} was not done with {text} after {SECONDS:g} s; "
                "write it without repeats inside of repeats, or give a list of names."
            ) from error
    return matches


# peft takes modules_to_save for patterns when it leaves out their adapters
PATTERNS = ("modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")


def adapter_problems(config: RunConfig) -> Iterator[str]:
    """Messages for the user about what is wrong with `config.adapter`."""
    adapter = config.adapter
    default = all_settings(AdapterConfig())
    unset = {"lora_alpha": PEFT_ALPHA, "start": adapter.start}  # as config.yaml of an earlier run has them
    changed = [
        name
        for name, value in all_settings(adapter).items()
        if value not in (default[name], unset.get(name, default[name]))
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
        if isinstance(pattern, str) and (fault := problem(pattern)):  # else names in a list, or none
            yield f"adapter.{name}: {pattern} is no regular expression ({fault}); names go into a list."


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
PEFT_PATTERNS = ("target_modules", "exclude_modules")  # a regex, or a list
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
        saved = json.loads(read_file(file, MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place} cannot be read ({error}); give a folder that peft wrote.") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"{place} holds no JSON object; give a folder that peft wrote.")
    if (kind := saved.get("peft_type")) != "LORA":
        raise ConfigError(f"{place} describes peft_type {kind!r}; only LoRA adapters (LORA) are trained.")
    if (start := saved.get("init_lora_weights")) not in PLAIN_STARTS:
        raise ConfigError(f"{place}: init_lora_weights {start} changed the base weights; merge it first.")
    known_keys = {*READ, *WITHOUT_EFFECT, "peft_type", "init_lora_weights"}
    for key, value in saved.items():
        if key not in known_keys and value not in OFF:
            text = f"{key} {value}"
            raise ConfigError(f"{place}: {text} is not supported; train without it.")
    for problem in odd_fields(saved, READ):
        raise ConfigError(f"{place}: {problem}; correct it, or give a folder that peft wrote.")
    saved |= {key: [saved[key]] for key in LAYERS if isinstance(saved.get(key), int | str)}
    # as settings, a regex such as [qk]_proj would be read as a list
    regexes = {key: saved.pop(key) for key in PEFT_PATTERNS if saved.get(key) and isinstance(saved[key], str)}
    settings = {f"adapter.{key}": saved[key] for key in READ if saved.get(key) or saved.get(key) == 0}
    settings.setdefault("adapter.lora_alpha", PEFT_ALPHA)
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
