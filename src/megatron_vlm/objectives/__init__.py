"""What runs can train for: `train.objective` names one of them; docs/adding-an-objective.md adds another."""

from __future__ import annotations

from megatron_vlm.config import RunConfig
from megatron_vlm.objectives.base import Objective
from megatron_vlm.objectives.dpo import DPO
from megatron_vlm.objectives.tokens import TOKENS

OBJECTIVES = {"tokens": TOKENS, "dpo": DPO}


def objective_of(config: RunConfig) -> Objective:
    """The objective that the run's `train.objective` names."""
    return OBJECTIVES[config.train.objective]
