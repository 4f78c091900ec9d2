"""Which linears of a model have adapters, and what is trained whole: peft's rules on Transformers' names."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from megatron_vlm.adapter_settings import matching
from megatron_vlm.config import AdapterConfig, ConfigError
from megatron_vlm.messages import suggestion
from megatron_vlm.models.description import Description
from megatron_vlm.models.weights.rules import Rule, Vocabulary, WeightMap, find_weight
from megatron_vlm.weight_files import hub_name

ALL_LINEAR, HEAD = "all-linear", "lm_head"


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
    rank: int = 0
    scale: float = 0.0  # of what the adapter adds
    dora: bool = False
    experts: int = 0
    stored: str = ""  # where peft stores it, if that is not `module`


@dataclass(frozen=True)
class SavedModule:
    """A weight of `VLMModel` that is trained whole, and its HF tensors in the order of its rule."""

    rule: Rule
    keys: list[str]  # in Transformers' model
    shapes: list[list[int]]  # whole


def find_targets(adapter: AdapterConfig, description: Description) -> list[Target]:
    """The linears that `adapter` names, in the model's order, then the experts; peft finds the same.

    Raises ConfigError for a name or pattern that fits nothing, or a module that cannot have an adapter.
    """
    modules, weight_map = hf_modules(description.hf_config), description.weight_map
    linears = [name for name, kind in modules.items() if isinstance(kind, nn.Linear) and name != HEAD]
    linears = outside_saved(adapter.modules_to_save, linears)
    # what the rules import is trained; a linear outside them, such as another tower's, has no place
    keys = {name: hub_name(f"{name}.weight", weight_map.renames) for name in linears}
    places = {name: place for name, key in keys.items() if (place := find_weight(weight_map.rules, key))}
    target_modules = adapter.target_modules
    if target_modules is None:
        of_text = [name for name, place in places.items() if place[1].startswith("language_model.")]
        names = _but(weight_map.peft_experts, of_text)
    elif isinstance(target_modules, str) and target_modules.lower() == ALL_LINEAR:
        names = [name for name in linears if not weight_map.carries(keys[name])]
    else:
        _check_names("adapter.target_modules", target_modules, modules, linears)
        names = outside_saved(adapter.modules_to_save, fitting(target_modules, filter(None, modules)))
    names = _of_layers(adapter, names)
    if adapter.exclude_modules is not None:
        _check_names("adapter.exclude_modules", adapter.exclude_modules, modules, names)
        names = _but(adapter.exclude_modules, names)
    # refused now, by their names: peft could not load such an adapter, or nothing would train it
    as_experts = fitting(weight_map.peft_experts, names)
    if without := [name for name in names if name not in places or name in as_experts]:
        _refuse(without, names, modules[without[0]], without[0] in as_experts)
    targets = []
    for name in names:
        rule, weight, place = places[name]
        out, width = modules[name].weight.shape
        targets.append(Target(name, rule, weight, place, out, width, dora=adapter.use_dora))
    targets += _experts(adapter.target_parameters, modules, weight_map)
    if not targets:
        raise ConfigError("adapter.exclude_modules: leaves no module with an adapter; exclude less.")
    return _with_ranks(adapter, targets)


def _with_ranks(adapter: AdapterConfig, targets: list[Target]) -> list[Target]:
    names = [target.module for target in targets]
    ranks = _by_pattern("adapter.rank_pattern", adapter.rank_pattern, adapter.r, names)
    alphas = _by_pattern("adapter.alpha_pattern", adapter.alpha_pattern, adapter.alpha, names)
    largest_rank = max(min(target.out, target.width) for target in targets)
    if max(ranks) > largest_rank:  # it would only cost memory
        raise ConfigError(
            f"adapter.r: a rank of {max(ranks)} is more than any matrix with an adapter has, at most "
            f"{largest_rank}; give a smaller one: 8 to 64 are usual."
        )
    root = 0.5 if adapter.use_rslora else 1  # rsLoRA, arXiv 2312.03732
    return [
        replace(target, rank=rank, scale=alpha / rank**root)
        for target, rank, alpha in zip(targets, ranks, alphas, strict=True)
    ]


def _experts(names: list[str], modules: dict[str, nn.Module], weight_map: WeightMap) -> list[Target]:
    """The parameters of routed experts in `names`, which are whole or ends of names, without their ranks.

    peft wraps a module once for each of its parameters, in their order, and names them by the wrappings.
    """
    targets: dict[str, Target] = {}
    for name, module in modules.items():
        parameters = {f"{name}.{key}": param for key, param in module.named_parameters(recurse=False)}
        # the last parameter is the innermost: each earlier one lies in one wrapper more
        for outside, key in enumerate(reversed(fitting(names, parameters))):
            shape = tuple(parameters[key].shape)
            match = find_weight(weight_map.rules, hub_name(key, weight_map.renames))
            if match is None or match[0].rows is None:
                raise ConfigError(
                    f"adapter.target_parameters: {key} is {list(shape)} and holds no routed experts; other "
                    "weights have adapters by adapter.target_modules."
                )
            rule, weight, place = match
            assert shape == (rule.rows, *rule.row_shape), "Transformers stores them otherwise"
            experts, out, width = shape
            stored = name + outside * ".base_layer"
            targets[key] = Target(key, rule, weight, place, out, width, experts=experts, stored=stored)
    # a name that fits nothing is refused, with the names that would fit
    for name in names:
        if not fitting([name], targets):
            of_experts = [rule for rule in weight_map.rules if rule.rows and rule.block is None]
            fused = {"experts." + key.rpartition(".")[2] for rule in of_experts for key in rule.hf}
            hint = suggestion(name, sorted(fused)) if fused else ", whose family has no routed experts"
            raise ConfigError(f"adapter.target_parameters: {name} fits no parameter of the model{hint}")
    return list(targets.values())


def find_whole(adapter: AdapterConfig, description: Description) -> dict[str, SavedModule]:
    """The weights trained whole next to adapters, by name in `named_weights`: all in the modules that
    `modules_to_save` are ends of.

    Raises ConfigError for a name that fits nothing, or a module that cannot be trained and written by itself.
    """
    names, weight_map = adapter.modules_to_save, description.weight_map
    modules = hf_modules(description.hf_config)
    saved_modules = fitting(names, filter(None, modules))
    for end in names:
        if not fitting([end], saved_modules):
            hint = suggestion(end, sorted({name.rpartition(".")[2] for name in modules}))
            raise _refused(f"{end} fits no module of the model{hint}")
    for name in modules:  # peft compares letters, not whole parts of names
        if name.endswith(tuple(names)) and name not in saved_modules:
            raise _refused(f"peft would take {name}, too, which ends alike; give longer or whole names.")
    rules: dict[str, Rule] = {}
    parts: dict[str, dict[int, tuple[str, list[int]]]] = {}  # by weight and place: its key and shape
    for name in saved_modules:
        if outside := next((other for other in saved_modules if name.startswith(f"{other}.")), None):
            raise _refused(f"{name} lies in {outside}, which is trained whole; name one of them.")
        for key, value in modules[name].state_dict(prefix=f"{name}.").items():
            rule, weight, place = _place(key, weight_map)
            rules[weight] = rule
            parts.setdefault(weight, {})[place] = key, list(value.shape)
    saved = {}
    for weight, rule in rules.items():
        tensors = [parts[weight].get(place) for place in range(len(rule.hf))]
        if missing := ", ".join(hf for hf, tensor in zip(rule.hf, tensors, strict=True) if tensor is None):
            key, _ = next(filter(None, tensors))
            raise _refused(f"{key} is one parameter here with {missing}; name modules that hold them all.")
        saved[weight] = SavedModule(rule, [key for key, _ in tensors], [shape for _, shape in tensors])
    return saved


def _place(key: str, weight_map: WeightMap) -> tuple[Rule, str, int]:
    hub = hub_name(key, weight_map.renames)
    if weight_map.tied and any(
        isinstance(rule.operation, Vocabulary) and hub in rule.hf for rule in weight_map.rules
    ):
        raise _refused(
            f"{key} is both embedding and output layer of this model; peft would make two of them, and here "
            "they are one."
        )
    place = find_weight(weight_map.rules, hub)
    if place is None:
        raise _refused(f"{key} is not a part of the model that is trained; leave its module out.")
    if place[0].rows is not None:
        raise _refused(f"{key} holds routed experts; give them adapters by adapter.target_parameters.")
    return place


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"adapter.modules_to_save: {reason}")


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


def outside_saved(names: list[str], modules: list[str]) -> list[str]:
    """The names that lie in none of `modules_to_save`: peft gives the others no adapter
    (`tuners_utils.check_target_module_exists`)."""
    inside = {module for name in names for module in matching(rf"(^|.*\.){name}($|\..*)", modules, "match")}
    return [name for name in modules if name not in inside]


def _but(names: str | Iterable[str], modules: list[str]) -> list[str]:
    without = set(fitting(names, modules))
    return [name for name in modules if name not in without]


def _of_layers(adapter: AdapterConfig, modules: list[str]) -> list[str]:
    """The modules in `layers_to_transform`. A module's layer is the first number in its name, or the first
    after one of `layers_pattern`, as in peft."""
    layer_numbers = adapter.layers_to_transform
    if not layer_numbers:
        return modules
    layers: dict[str, int] = {}
    for start in [rf"(?:^|.*?\.){name}" for name in adapter.layers_pattern] or [r".*?\.[^.]*"]:
        for module, match in matching(rf"{start}\.(?P<idx>\d+)\.", modules, "match").items():
            layers.setdefault(module, int(match["idx"]))
    if missing := sorted(set(layer_numbers) - set(layers.values())):
        raise ConfigError(
            f"adapter.layers_to_transform: {missing[0]} is the layer of no module in target_modules; known "
            f"are {', '.join(map(str, sorted(set(layers.values()))))}."
        )
    return [name for name in modules if layers.get(name) in layer_numbers]


def _by_pattern(key: str, patterns: dict[str, float], default: float, modules: list[str]) -> list[float]:
    """The value of each module by the first pattern that fits the end of its name, as in peft."""
    values: dict[str, float] = {}
    for pattern, value in patterns.items():
        unmatched = [name for name in modules if name not in values]
        if not (matches := matching(rf"(.*\.)?({pattern})$", unmatched, "match")):
            hint = suggestion(pattern, _endings(modules))
            raise ConfigError(f"{key}: {pattern} fits no module that has an adapter{hint}")
        values |= dict.fromkeys(matches, value)
    return [values.get(name, default) for name in modules]


def _check_names(key: str, names: str | list[str], modules: Iterable[str], linears: list[str]) -> None:
    is_regex = isinstance(names, str)
    for name in [names] if is_regex else names:
        if fitting(names if is_regex else [name], modules):
            continue
        known_names = [*_endings(linears), *linears] if "." in name else _endings(linears)
        hint = suggestion(name, known_names + [ALL_LINEAR] * is_regex)
        remedy = (
            f" A regex fits whole names, such as {linears[0]}; give ends of names as a list: {key}=[{name}]."
        )
        raise ConfigError(f"{key}: {name} fits no module of the model{hint}{remedy * is_regex}")


def _endings(modules: Iterable[str]) -> list[str]:
    """The last parts of the names, each once; numbers say nothing."""
    return sorted({last for name in modules if not (last := name.rpartition(".")[2]).isdigit()})


def _refuse(without: list[str], names: list[str], module: nn.Module, as_expert: bool) -> None:
    """Says why the first of some modules cannot have an adapter, and how to leave out all of them."""
    name = without[0]
    if as_expert:
        reason = "is a router, or has a name that peft takes for experts, so it could not be loaded again"
    elif name == HEAD:
        reason = "is the output layer, which computes the loss without its logits"
    elif not isinstance(module, nn.Linear):
        reason = f"is a {type(module).__name__}; adapters are for linears"
    else:
        reason = "is not a part of the model that is trained"
    ends = sorted({".".join(module_name.split(".")[-2:]) for module_name in without})
    other_names = set(names) - set(without)
    fits_no_other = other_names and not fitting(ends, other_names)
    remedy = (
        f"set adapter.exclude_modules=[{','.join(ends)}]" if fits_no_other else "add it to exclude_modules"
    )
    raise ConfigError(f"adapter.target_modules: {name} {reason}; leave it out, or {remedy}.")
