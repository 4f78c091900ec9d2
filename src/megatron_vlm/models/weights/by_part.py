"""Settings that parts of a model have for themselves, such as a learning rate: whose parameters they are."""

from collections.abc import Collection, Iterator, Mapping

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model
from torch import distributed as dist
from torch.nn import Module, Parameter

from megatron_vlm.adapter_settings import matching
from megatron_vlm.models.weights.rules import ADAPTERS, Rule, each_expert, find_rule, named_weights
from megatron_vlm.parallel.setup import device, from_all_ranks

Groups = Mapping[str, Collection[str]]  # part -> prefixes of its parameters
Named = tuple[str, Parameter, list[str]]  # name, parameter, names of its HF tensors


def parameters_by_part(
    chunks: list[Module], settings: Mapping[str, Collection[str]], groups: Groups, rules: list[Rule]
) -> dict[str, dict[str, list[Parameter]]]:
    """For each key of each setting, this rank's trained parameters that it is for. Collective.

    A key is a part of the model, "adapters", or a regular expression that is searched in the names of HF
    tensors, or of adapters' as in peft, such as `lora_B` (LoRA+, arXiv 2402.12354); what a pattern finds does
    not count to its part. Raises ValueError on all ranks if a key is for no trained
    parameter of any rank, if several patterns find a parameter, and if a pattern finds only some of the HF
    tensors that are one parameter here, such as q without k and v.
    """
    keys_by_setting = {name: keys for name, keys in settings.items() if keys}
    trained = list(_trained_parameters(chunks, rules)) if keys_by_setting else []
    groups = {**groups, ADAPTERS.rstrip("."): (ADAPTERS,)}
    return {name: _of_setting(name, keys, trained, groups) for name, keys in keys_by_setting.items()}


def trained_share(chunks: list[Module]) -> tuple[int, int, float]:
    """Return how many parameters the whole model trains, how many it has, and their ratio. Collective.

    Of ranks that hold the same parameter one counts it, as in Megatron's gradient norms.
    """
    sums = [[0, 0], [0, 0]]  # [dense, experts], [trained, all]
    expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
    for param in (param for chunk in chunks for param in chunk.parameters()):
        is_counted = param_is_not_tensor_parallel_duplicate(param, expert_tp_group=expert_tp_group)
        if is_counted and param_is_not_shared(param):
            of_kind = sums[0 if getattr(param, "allreduce", True) else 1]
            of_kind[0] += param.numel() * param.requires_grad
            of_kind[1] += param.numel()
    counts = torch.tensor(sums, device=device())
    dist.all_reduce(counts[0], group=parallel_state.get_model_parallel_group())
    dist.all_reduce(counts[1], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    trained, count = counts.sum(0).tolist()
    return trained, count, trained / count


def _of_setting(
    setting: str, keys: Collection[str], trained: list[Named], groups: Groups
) -> dict[str, list[Parameter]]:
    params: dict[str, list[Parameter]] = {key: [] for key in keys}
    problems, parts, names = [], set(), [hf_name for *_, hf_names in trained for hf_name in hf_names]
    fits = {key: set(matching(key, names, "search")) for key in keys if key not in groups}
    for name, param, hf_names in trained:
        part = next((part for part, prefixes in groups.items() if name.startswith(tuple(prefixes))), None)
        parts.add(part)
        finding = {key: hits for key in fits if (hits := fits[key].intersection(hf_names))}
        problems += [f"{setting}: {text}" for text in _unclear(finding, hf_names)]
        for key in list(finding)[:1] or ([part] if part in params else []):
            params[key].append(param)
    used = {key: bool(params[key]) or key in parts for key in keys}
    _agree(setting, groups, used, problems, [names[0] for _, _, names in trained[:1]])
    return params


def _unclear(finding: dict[str, set[str]], hf_names: list[str]) -> Iterator[str]:
    """Why the patterns that find some of a parameter's HF tensors do not tell what it has."""
    for key, hits in finding.items():
        missed = [name for name in hf_names if name not in hits]
        if missed:
            hit = next(name for name in hf_names if name in hits)
            yield f"{key} finds {hit} and not {missed[0]}, which is one parameter with it; let it find both."
    if len(finding) > 1:
        first, second = list(finding)[:2]
        yield f"both {first} and {second} find {hf_names[0]}; narrow one of them."


def _trained_parameters(chunks: list[Module], rules: list[Rule]) -> Iterator[Named]:
    """(name, parameter, its HF tensors' names); experts in one tensor have the names of all of them."""
    parameters: dict[int, Named] = {}
    for chunk in map(unwrap_model, chunks):
        for name, param in chunk.named_parameters():
            if name.startswith(ADAPTERS):
                parameters[id(param)] = name, param, [name.removeprefix(ADAPTERS)]
        for name, param in named_weights(chunk):
            if param.requires_grad:
                hf_names = parameters.setdefault(id(param), (name, param, []))[2]
                for global_name, _ in each_expert(chunk.config, name, param):
                    hf_names += find_rule(rules, global_name)[1]
    yield from parameters.values()


def _agree(
    setting: str, groups: Groups, used: Mapping[str, bool], problems: list[str], examples: list[str]
) -> None:
    """Raises on all ranks what is wrong on any. `used`: whether a key is for parameters of this rank."""
    everywhere = from_all_ranks((problems[:1], used, examples[:1]))
    wrong = [text for texts, *_ in everywhere for text in texts]
    names = [name for *_, names in everywhere for name in names]
    for key in used:
        if any(used[key] for _, used, _ in everywhere):
            continue
        if key in groups:
            reason = "model.freeze, or adapters alone are trained"
            wrong.append(f"{setting}: no parameter of {key} is trained ({reason}); drop it there.")
        else:
            wrong.append(
                f"{setting}: {key} is none of the parts {', '.join(groups)}, and no trained parameter has a "
                f"name in which it is found, such as {', '.join(names[:1])}."
            )
    if wrong:
        raise ValueError(wrong[0])
