"""A recipe for a checkpoint and data that no recipe names, with the reason for each setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_vlm.config import ConfigError, RunConfig, all_settings
from megatron_vlm.data.on_disk.paths import paths_of
from megatron_vlm.extras.plan.notes import ways_to_fit
from megatron_vlm.extras.plan.plan import make_plan
from megatron_vlm.extras.plan.search import planned_layouts
from megatron_vlm.extras.plan.step_time import Gpu
from megatron_vlm.messages import printable, readable_size
from megatron_vlm.models.description import Description
from megatron_vlm.overrides import apply_overrides, split_override
from megatron_vlm.run_folder.adapter_start import begun

ROWS_IN_A_STEP = 32
STEPS_BETWEEN_SAVES = 500  # as in the recipes
LR_OF_ADAPTERS = 2e-4  # as in recipes/*_lora.yaml
LAYOUT = "parallel.", "model.recompute"  # who sets one of these chooses the layout


@dataclass(frozen=True)
class Proposal:
    """A recipe as settings by dotted key, and why each is what it is, where there is a reason."""

    settings: dict[str, Any]
    reasons: dict[str, str]
    processes: int

    def config(self) -> RunConfig:
        return apply_overrides(RunConfig(), self.settings)

    def to_yaml(self, command: str) -> str:
        """A file for --config with the reasons as comments; `command` is the line that made it."""
        lines = [f"# Made by `{printable(command, 10_000)}`; edit it, and start it by --config."]
        section = ""
        for key, value in self.settings.items():
            *parts, name = key.split(".")
            if parts and parts[0] != section:
                section = parts[0]
                lines.append(f"{section}:")
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
            reason = self.reasons.get(key)
            lines.append(f"{'  ' * len(parts)}{name}: {text}" + (f"  # {reason}" if reason else ""))
        return "\n".join(lines) + "\n"


def propose(
    source: Mapping[str, Any],
    description: Description,
    gpus: Sequence[int],
    said: Mapping[str, Any],
    processes: int | None = None,
) -> Proposal:
    """The recipe for full fine-tuning with `gpus`, their bytes of memory; without any, for a processor.

    `source` are the settings that name checkpoint and data. `said` are the user's own settings, which stay as
    they are; who sets a part of the layout chooses all of it. Raises ConfigError if no layout fits.
    """
    model = source["model.hf_path"]
    first = paths_of(source["data.train_data_path"])[0]
    name = said.get("name") or f"{Path(model).name}-{Path(first).name.partition('.')[0]}"
    chosen: dict[str, tuple[Any, str]] = {
        "name": (name, ""),
        "run_dir": (f"runs/{name}", "here the run lives, and from here it goes on if started again"),
        **{key: (value, "") for key, value in source.items()},
        "model.hf_path": (model, f"{description.model_type}, as its config.json says"),
    }
    processes = processes or len(gpus) or 1
    if not gpus:
        chosen["model.dtype"] = "fp32", "there is no GPU here"
    rows = -(-ROWS_IN_A_STEP // processes) * processes
    chosen["train.global_batch_size"] = rows, f"{rows // processes} for each GPU" if processes > 1 else ""
    if not {"train.steps", "train.epochs"} & set(said):
        chosen |= {"train.steps": (None, ""), "train.epochs": (1, "every row once")}
    if apply_overrides(RunConfig(), said).adapter.used:
        chosen["optimizer.lr"] = LR_OF_ADAPTERS, "adapters take more than whole weights do"
    chosen["optimizer.warmup_steps"] = None, "a tenth of the run, at most 50"
    chosen["train.save_every"] = STEPS_BETWEEN_SAVES, "so much is lost at most if the run is interrupted"
    if {"data.valid_data_path", "data.validation_share"} & set(said):
        chosen["train.eval_every"] = STEPS_BETWEEN_SAVES, "and at the end"
    chosen |= {key: (value, "") for key, value in said.items()}
    if gpus and not any(key.startswith(LAYOUT) for key in said):
        chosen |= _layout({key: value for key, (value, _) in chosen.items()}, description, gpus, processes)
    values = {key: value for key, (value, _) in chosen.items()}
    config = dict(all_settings(apply_overrides(RunConfig(), values)))  # of the settings' own types
    keys = dict.fromkeys(_setting(key, config) for key in chosen)
    order = sorted(keys, key=lambda key: ("." in key, key.split(".")[0]))
    reasons = {key: reason for key, (_, reason) in chosen.items() if reason}
    return Proposal({key: config[key] for key in order}, reasons, processes)


def _setting(key: str, config: Mapping[str, Any]) -> str:
    """The setting that a key sets; a setting that is a mapping has keys of its own after its name."""
    while key not in config:
        key = key.rpartition(".")[0]
    return key


def _layout(
    settings: Mapping[str, Any], description: Description, gpus: Sequence[int], processes: int
) -> dict[str, tuple[Any, str]]:
    """The settings of the quickest layout that fits, by its plan."""
    config = begun(apply_overrides(RunConfig(), settings))
    capacity = min(gpus)
    there = f"{processes} GPUs" if processes > 1 else "a GPU"
    there += f" of {readable_size(capacity)}"
    plans = planned_layouts(config, description, processes, capacity, Gpu())
    if not plans:
        plan = make_plan(config, description, processes)
        ways = [f"{change} on {plan.gpus} GPUs" for change, plan in ways_to_fit(plan, capacity)]
        raise ConfigError(
            f"--model: all of {printable(config.model.hf_path)} cannot be trained on {there}, as it needs "
            f"{readable_size(plan.memory)}. Try {' or '.join(ways[:2]) or 'more GPUs'}; or train "
            "adapters alone, by adapter.r=16, or a part, by model.freeze=[tower,language_model]."
        )
    layout, plan = plans[0]
    usual = dict(all_settings(RunConfig()))
    values = dict(map(split_override, layout))
    unusual = {key: (value, "") for key, value in values.items() if value != str(usual[key])}
    reason = f"the quickest of {len(plans)} layouts that fit on {there}, with {readable_size(plan.memory)}"
    return unusual | {"parallel.tp": (values["parallel.tp"], reason)}
