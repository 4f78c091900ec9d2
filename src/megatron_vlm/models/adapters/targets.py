"""Which linears of a model have adapters: peft's rules, on the names that Transformers gives its modules."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from megatron_vlm.config import AdapterConfig, ConfigError
from megatron_vlm.config_rules.patterns import matching
from megatron_vlm.messages import printable, suggestion
from megatron_vlm.models.adapters.saved import SavedModule, find_saved, outside_saved
from megatron_vlm.models.description import Description
from megatron_vlm.models.weights.files import hub_name
from megatron_vlm.models.weights.rules import Rule, WeightMap, find_weight

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Target:
    """A linear of the HF model that has an adapter; or a parameter that holds `experts` of them. Says where
    its weight is in `VLMModel`."""

    module: str  # as Transformers names it, the module or the parameter of experts
    rule: Rule  # pairs the parameter with its HF tensors
    weight: str  # name of the parameter; layers are numbered over the whole model
    place: int  # which of the rule's HF tensors the module's weight is
    out: int  # rows of the module's weight, or of each expert's
    width: int  # columns
    rank: int
    scale: float  # of what the adapter adds
    dora: bool
    experts: int = 0
    stored: str = ""  # where peft stores it, if that is not `module`


def find_targets(adapter: AdapterConfig, description: Description) -> list[Target]:
    """The linears that `adapter` names, in the model's order, then the experts; peft finds the same.

    Raises ConfigError for a name or pattern that fits nothing, or a module that cannot have an adapter.
    """
    built, weight_map = hf_modules(description.hf_config), description.weight_map
    modules, head = {name: type(module) for name, module in built.items()}, "lm_head"
    linears = [name for name, kind in modules.items() if issubclass(kind, nn.Linear) and name != head]
    linears = outside_saved(adapter.modules_to_save, linears)
    placed = {name: find_weight(weight_map.rules, _key(name, weight_map)) for name in linears}
    wanted = adapter.target_modules
    experts = _experts(adapter.target_parameters, built, weight_map)
    if wanted is None:
        of_text = [name for name in linears if (placed[name] or ("", ""))[1].startswith("language_model.")]
        found = _but(weight_map.peft_experts, of_text)
    elif isinstance(wanted, str) and wanted.lower() == ALL_LINEAR:
        found = linears
    else:
        _check_names("adapter.target_modules", wanted, modules, linears)
        found = outside_saved(adapter.modules_to_save, fitting(wanted, filter(None, modules)))
    found = _of_layers(adapter, found)
    if adapter.exclude_modules is not None:
        _check_names("adapter.exclude_modules", adapter.exclude_modules, modules, found)
        found = _but(adapter.exclude_modules, found)
    as_experts = fitting(weight_map.peft_experts, found)
    without = [name for name in found if placed.get(name) is None or name in as_experts]
    for name in without:
        _refuse(name, modules[name], name in as_experts, _all_but(without, found))
    if not (found or experts):
        raise ConfigError("adapter.exclude_modules: leaves no module with an adapter; exclude less.")
    all_found = [*found, *experts]
    sizes = {name: (built[name].out_features, built[name].in_features) for name in found}
    ranks = _by_pattern("adapter.rank_pattern", adapter.rank_pattern, adapter.r, all_found)
    alphas = _by_pattern("adapter.alpha_pattern", adapter.alpha_pattern, adapter.lora_alpha, all_found)
    _check_ranks(ranks, [*sizes.values(), *(experts[name].rule.row_shape for name in experts)])
    root = 0.5 if adapter.use_rslora else 1  # rsLoRA, arXiv 2312.03732
    scales = [alpha / rank**root for rank, alpha in zip(ranks, alphas, strict=True)]
    return [
        Target(*(name, *placed[name], *sizes[name], rank, scale, adapter.use_dora))
        if name in sizes
        else replace(experts[name], rank=rank, scale=scale)
        for name, rank, scale in zip(all_found, ranks, scales, strict=True)
    ]


def _experts(names: list[str], modules: dict[str, nn.Module], weight_map: WeightMap) -> dict[str, Target]:
    """The target of each parameter of routed experts in `names`, which are whole or ends of names.

    peft wraps a module once for each of its parameters, in their order, and names them by the wrappings.
    """
    found = {}
    for name, module in modules.items():
        own = {f"{name}.{key}": param for key, param in module.named_parameters(recurse=False)}
        mine = fitting(names, own)
        for outside, key in enumerate(reversed(mine)):
            placed = find_weight(weight_map.rules, hub_name(key, weight_map.renames))
            if placed is None or placed[0].rows is None:
                raise ConfigError(
                    f"adapter.target_parameters: {key} is {list(own[key].shape)} and holds no routed "
                    "experts; other weights have adapters by adapter.target_modules."
                )
            rule = placed[0]
            assert tuple(own[key].shape) == (rule.rows, *rule.row_shape), "Transformers stores them otherwise"
            place_of_peft = rule.rows, name + outside * ".base_layer"
            found[key] = Target(key, *placed, *rule.row_shape, 0, 0.0, False, *place_of_peft)
    for name in names:
        if not fitting([name], found):
            fused = [key for rule in weight_map.rules if rule.rows for key in rule.hf]
            known = suggestion(name, sorted({"experts." + key.rpartition(".")[2] for key in fused}))
            known = known if fused else ", whose family has no routed experts"
            raise ConfigError(
                f"adapter.target_parameters: {printable(name)} fits no parameter of the model{known}"
            )
    return found


def _check_ranks(ranks: list[int], sizes: list[tuple[int, int]]) -> None:
    """Raises ConfigError for a rank above the smaller side of every matrix: it would only cost memory."""
    if (rank := max(ranks)) > (most := max(map(min, sizes))):
        raise ConfigError(
            f"adapter.r: a rank of {rank} is more than any matrix with an adapter has, at most {most}; give "
            "a smaller one: 8 to 64 are usual."
        )


def find_whole(adapter: AdapterConfig, description: Description) -> dict[str, SavedModule]:
    """The modules trained whole next to adapters, by parameter; see `find_saved`."""
    modules = hf_modules(description.hf_config)
    return find_saved(adapter.modules_to_save, modules, description.weight_map)


def hf_modules(hf_config: Any) -> dict[str, nn.Module]:
    """Every module of Transformers' model by name, in its order, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(deepcopy(hf_config), trust_remote_code=False)
    return dict(model.named_modules())


def fitting(names: str | Iterable[str], modules: Iterable[str]) -> list[str]:
    """The modules that names fit: a regex the whole name, a list its end. As in peft
    (`tuners_utils.check_target_module_exists`)."""
    if isinstance(names, str):
        return list(matching(names, modules))
    ends = tuple(f".{name}" for name in names)
    return [module for module in modules if f".{module}".endswith(ends)]


def _but(names: str | Iterable[str], modules: list[str]) -> list[str]:
    without = set(fitting(names, modules))
    return [name for name in modules if name not in without]


def _of_layers(adapter: AdapterConfig, modules: list[str]) -> list[str]:
    """The modules in `layers_to_transform`. A module's layer is the first number in its name, or the first
    after one of `layers_pattern`, as in peft."""
    wanted = adapter.layers_to_transform
    if not wanted:
        return modules
    layers: dict[str, int] = {}
    for start in [rf"(?:^|.*?\.){name}" for name in adapter.layers_pattern] or [r".*?\.[^.]*"]:
        for module, found in matching(rf"{start}\.(?P<idx>\d+)\.", modules, "match").items():
            layers.setdefault(module, int(found["idx"]))
    if missing := sorted(set(wanted) - set(layers.values())):
        raise ConfigError(
            f"adapter.layers_to_transform: {missing[0]} is the layer of no module in target_modules; known "
            f"are {', '.join(map(str, sorted(set(layers.values()))))}."
        )
    return [name for name in modules if layers.get(name) in wanted]


def _key(module: str, weight_map: WeightMap) -> str:
    return hub_name(f"{module}.weight", weight_map.renames)


def _by_pattern(key: str, patterns: dict[str, float], default: float, modules: list[str]) -> list[float]:
    """The value of each module by the first pattern that fits the end of its name, as in peft."""
    values: dict[str, float] = {}
    for pattern, value in patterns.items():
        left = [name for name in modules if name not in values]
        if not (found := matching(rf"(.*\.)?({pattern})$", left, "match")):
            known = suggestion(pattern, _endings(modules))
            raise ConfigError(f"{key}: {printable(pattern)} fits no module that has an adapter{known}")
        values |= dict.fromkeys(found, value)
    return [values.get(name, default) for name in modules]


def _check_names(key: str, names: str | list[str], modules: Iterable[str], linears: list[str]) -> None:
    for name in [names] if isinstance(names, str) else names:
        if not fitting(name if isinstance(names, str) else [name], modules):
            ends = name.split(",") if isinstance(names, str) else ()
            if ends and all(fitting([end], modules) for end in ends):
                raise ConfigError(
                    f"{key}: {printable(name)} is read as a regex, which fits no whole name of a module; "
                    f"give ends of names as a list: {key}=[{printable(name)}]."
                )
            known = [*_endings(linears), *linears] if "." in name else _endings(linears)
            known = suggestion(name, known + [ALL_LINEAR] * isinstance(names, str))
            example = f" A regex fits whole names, such as {linears[0]}." if isinstance(names, str) else ""
            raise ConfigError(f"{key}: {printable(name)} fits no module of the model{known}{example}")


def _endings(modules: Iterable[str]) -> list[str]:
    """The last parts of the names, each once; numbers say nothing."""
    return sorted({last for name in modules if not (last := name.rpartition(".")[2]).isdigit()})


def _all_but(without: list[str], found: list[str]) -> str | None:
    """A value of `exclude_modules` that fits only the modules `without` adapters; None if neither ends of
    their names nor their common path do."""
    parts, others = [name.split(".") for name in without], set(found) - set(without)
    ends = sorted({".".join(part[-2:]) for part in parts})
    path = re.escape(".".join(os.path.commonprefix(parts))) + r"(\..*)?"
    for names, written in ((ends, f"[{','.join(ends)}]"), (path, f"'{path}'")):
        if others and not fitting(names, others):
            return written
    return None


def _refuse(name: str, kind: type[nn.Module], as_expert: bool, excluded: str | None) -> None:
    """Says why a module cannot have an adapter; `excluded` leaves out all such modules."""
    if as_expert:
        why = "is a router, or has a name that peft takes for experts, so it could not be loaded again"
    elif name == "lm_head":
        why = "is the output layer, which computes the loss without its logits"
    elif not issubclass(kind, nn.Linear):
        why = f"is a {kind.__name__}; adapters are for linears"
    else:
        why = "is not a part of the model that is trained"
    rest = f"set adapter.exclude_modules={excluded}" if excluded else "add it to exclude_modules"
    raise ConfigError(f"adapter.target_modules: {name} {why}; leave it out, or {rest}.")
