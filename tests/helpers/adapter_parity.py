"""Adapters against peft's on the Transformers model: what runs in the processes of `test_adapters.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import parity
import saved_cases
import torch

from megatron_vlm.config import AdapterConfig, ParallelConfig
from megatron_vlm.models.adapters.targets import find_targets, fitting, hf_modules

# name of the adapter -> peft's LoraConfig. All of the model; and few layers, so that embeddings, a stage and
# whole layers have nothing that is trained.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapter": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": "all-linear",
        "rank_pattern": {r"layers\.0\.\w+_attn\.(q_proj|q_b_proj|in_proj_qkv)": 3, "o_proj": 5},
        "alpha_pattern": {"v_proj": 9},
    },
    "adapter with DoRA": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_dora": True},
    "adapter with DoRA on q and v": {
        "r": 4,
        "target_modules": r".*(language|text)_model\.layers\.\d+\.\w+_attn\.([qv]_proj|q_b_proj|in_proj_qkv)",
        "use_dora": True,
    },
    "adapter on late layers": {
        "r": 4,
        "use_rslora": True,
        "target_modules": r".*(language|text)_model\.layers\.[^0]\.(\w+_attn\.([qv]|q_b|out)|mlp\.down)_proj",
    },
}
WITH_MODULES = "adapter and modules"
ADAPTERS[WITH_MODULES] = {"r": 4, "target_modules": "all-linear"}
OF_EXPERTS: dict[str, dict[str, Any]] = {  # of families that have some
    "adapter of experts": {
        "r": 3,
        "lora_alpha": 6,
        # of the language model alone, as the q_proj of a Gemma 4 tower is no linear
        "target_modules": r".*(language|text)_model\.layers\.[0-3]\.\w+_attn\.(q_proj|q_b_proj|in_proj_z)",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"down_proj": 4},
        "alpha_pattern": {"gate_up_proj": 9},
    },
    "adapter of experts' down": {"r": 4, "target_modules": [], "target_parameters": ["experts.down_proj"]},
}
SAVED = ".modules_to_save"  # in the names of peft's modules, not in its files
INPUTS = ("text", "0, 1 and 3 images")
PACKED = ("packed: short documents", "packed: images in one document")
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}

# name -> (processes, layout, settings of the model, adapter)
LAYOUTS: dict[str, tuple[int, ParallelConfig, dict[str, str], str]] = {
    "1 process, adapter": (1, ParallelConfig(), {}, "adapter"),
    "1 process, adapter, recomputed": (1, ParallelConfig(), FULL, "adapter"),
    "1 process, adapter on late layers, recomputed": (1, ParallelConfig(), FULL, "adapter on late layers"),
    "1 process, adapter on late layers, norms and gates recomputed": (
        *(1, ParallelConfig(), SELECTIVE, "adapter on late layers"),
    ),
    "TP2, adapter": (2, ParallelConfig(tp=2, sp=False), {}, "adapter"),
    "TP2+SP, adapter": (2, ParallelConfig(tp=2), {}, "adapter"),
    "TP2+SP, adapter, recomputed": (2, ParallelConfig(tp=2), FULL, "adapter"),
    "TP2+SP, images on each rank, adapter": (2, ParallelConfig(tp=2, vision_dp=False), {}, "adapter"),
    "PP2, adapter": (2, ParallelConfig(pp=2), {}, "adapter"),
    "PP2, adapter, recomputed": (2, ParallelConfig(pp=2), FULL, "adapter"),
    "PP2, adapter on late layers": (2, ParallelConfig(pp=2), {}, "adapter on late layers"),
    "PP2·VPP2, adapter": (2, ParallelConfig(pp=2, vpp=2), {}, "adapter"),
    "CP2, adapter": (2, ParallelConfig(cp=2), {}, "adapter"),
    "DP2, adapter": (2, ParallelConfig(distributed_optimizer=False), {}, "adapter"),
    "DP2 dist. optimizer, adapter": (2, ParallelConfig(), {}, "adapter"),
    "1 process, adapter with DoRA": (1, ParallelConfig(), {}, "adapter with DoRA"),
    "TP2, adapter with DoRA": (2, ParallelConfig(tp=2, sp=False), {}, "adapter with DoRA"),
    "TP2+SP, adapter with DoRA": (2, ParallelConfig(tp=2), {}, "adapter with DoRA"),
    "TP2+SP, adapter with DoRA on q and v": (2, ParallelConfig(tp=2), {}, "adapter with DoRA on q and v"),
    "PP2, adapter with DoRA, recomputed": (2, ParallelConfig(pp=2), FULL, "adapter with DoRA"),
    "CP2, adapter with DoRA": (2, ParallelConfig(cp=2), {}, "adapter with DoRA"),
    "DP2, adapter with DoRA": (2, ParallelConfig(distributed_optimizer=False), {}, "adapter with DoRA"),
    "EP2, adapter": (2, ParallelConfig(ep=2), {}, "adapter"),
    f"1 process, {WITH_MODULES}": (1, ParallelConfig(), {}, WITH_MODULES),
    f"TP2+SP, {WITH_MODULES}": (2, ParallelConfig(tp=2), {}, WITH_MODULES),
    f"PP2, {WITH_MODULES}, recomputed": (2, ParallelConfig(pp=2), FULL, WITH_MODULES),
    "1 process, adapter of experts": (1, ParallelConfig(), {}, "adapter of experts"),
    "1 process, adapter of experts' down": (1, ParallelConfig(), {}, "adapter of experts' down"),
    "EP2, adapter of experts": (2, ParallelConfig(ep=2), {}, "adapter of experts"),
    "EP2, adapter of experts, recomputed": (2, ParallelConfig(ep=2), FULL, "adapter of experts"),
    "TP2+SP, adapter of experts": (2, ParallelConfig(tp=2), {}, "adapter of experts"),
    "TP2+SP·EP2, adapter of experts": (2, ParallelConfig(tp=2, ep=2), {}, "adapter of experts"),
    "PP2, adapter of experts": (2, ParallelConfig(pp=2), {}, "adapter of experts"),
}


# in `make test`, of Gemma3
OFTEN = (
    "1 process, adapter with DoRA",
    "TP2+SP, adapter, recomputed",
    "CP2, adapter",
    f"TP2+SP, {WITH_MODULES}",
)


def factors(name: str) -> tuple[str, str]:
    """What a name says beside its family and its parallelism: the adapter, and what is recomputed."""
    _, _, model, adapter = LAYOUTS[name]
    return adapter, model.get("recompute", "none")


def layouts_of(family: str) -> list[str]:
    from megatron_vlm.models.families import load

    if load(family).has_experts:
        return [name for name in LAYOUTS if "TP2, " not in name]
    return [name for name in LAYOUTS if "EP" not in name and "experts" not in name]


def peft_model(path: Path | str, settings: dict[str, Any], seed: int = 7) -> Any:
    """The Transformers model in fp32 with an adapter of peft, whose numbers are all random and not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    model = parity.as_meant(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32))
    model = get_peft_model(model, LoraConfig(**settings))
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "magnitude" in name:
                param.mul_(1 + 0.3 * torch.randn(param.shape, generator=numbers))
            elif "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=numbers) * 0.1)
            elif SAVED in name:
                param.mul_(1 + 0.1 * torch.randn(param.shape, generator=numbers))
    return model


def named_for_peft(settings: dict[str, Any], description: Any) -> dict[str, Any]:
    """The settings with whole names of modules, where peft would take ends of names for experts, or "all" for
    linears that are carried and not trained.

    It replaces a regex, too, by the last parts of the names that it fits.
    """
    if not (description.peft_experts or description.carried_keys):
        return settings
    wanted = AdapterConfig(**settings)
    if settings["target_modules"] == "all-linear":
        modules = hf_modules(description.hf_config)
        wanted.exclude_modules = [name for name in description.peft_experts[:3] if fitting([name], modules)]
    targets = find_targets(wanted, description)
    return settings | {"target_modules": [target.module for target in targets if not target.experts]}


def modules_to_save(description: Any) -> list[str]:
    """Some of tower, projector and language model, also such as tensor parallelism cuts."""
    names = ["multi_modal_projector", "connector", "visual.merger", "model.merger"]
    names += ["language_model.norm", "text_model.norm"]
    names += ["layers.1.self_attn", "layers.1.linear_attn"]
    names += [] if "num_moe_experts" in description.architecture else ["layers.0.mlp"]
    names += [] if description.hf_config.tie_word_embeddings else ["embed_tokens", "lm_head"]
    modules = hf_modules(description.hf_config)
    return [name for name in names if any(module.endswith(name) for module in modules)]


def cases(_: str, path: Path, wanted: Sequence[str] = ()) -> dict[str, dict[str, dict[str, Any]]]:
    """Adapter (all, or those `wanted`) -> input -> peft's logits, loss and gradients (by its keys), as
    `parity.case_for` has HF's; the adapters are beside the checkpoint."""
    from transformers import AutoConfig, AutoProcessor

    from megatron_vlm.models.families import describe

    processor, description = AutoProcessor.from_pretrained(path), describe(AutoConfig.from_pretrained(path))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for adapter, settings in (
        ADAPTERS | (OF_EXPERTS if "num_moe_experts" in description.architecture else {})
    ).items():
        if wanted and adapter not in wanted:
            continue
        if adapter == WITH_MODULES:
            settings = settings | {"modules_to_save": modules_to_save(description)}
        model = peft_model(path, named_for_peft(settings, description))
        model.save_pretrained(path.parent / adapter)
        for name in (*INPUTS, *PACKED):
            rows = parity.INPUTS.get(name) or parity.PACKED[name]
            hf, batch, single = parity.encode(processor, description, rows)
            model.zero_grad()
            output = model(**hf, use_cache=False)
            output.loss.backward()
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            case = {
                "batch": batch,
                "rows": single,
                "logits": output.logits.detach(),
                "loss": output.loss.item(),
                "grads": {
                    n.replace(".default", "").replace("vector.weight", "vector").replace(SAVED, ""): None
                    if p.grad is None
                    else p.grad.clone()
                    for n, p in trained.items()
                },
                "adapter": str(path.parent / adapter),
            }
            found.setdefault(adapter, {})[name] = parity.packed(case) if name in PACKED else case
    return found


def measure(wanted: dict[str, list[str]], path: str, references: str) -> list[dict]:
    """Every wanted layout on its inputs, or on all where none is named: rows for reports/parity.json."""
    from megatron_vlm.parallel import setup

    if not torch.distributed.is_initialized():
        setup.init_distributed(LAYOUTS[next(iter(wanted))][1], seed=1)
    cases = saved_cases.read(references)
    rows = []
    for name, inputs in wanted.items():
        _, layout, model, adapter = LAYOUTS[name]
        setup.reset_layout(layout, seed=1)
        [start] = {case["adapter"] for case in cases[adapter].values()}
        made = parity.Model(layout, path, start, **model)
        rows += [
            {"layout": name, "input": each} | made.compare(cases[adapter][each])
            for each in inputs or cases[adapter]
        ]
    return rows
