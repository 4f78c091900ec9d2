"""The objectives that `train.objective` can name; docs/adding-an-objective.md tells how to add another."""

from megatron_vlm.config import RunConfig
from megatron_vlm.objectives.base import Objective
from megatron_vlm.objectives.dpo import DPO

TOKENS = Objective(loss="megatron_vlm.training.losses.tokens:of_run")  # their mean loss, by their weights
OBJECTIVES = {"tokens": TOKENS, "dpo": DPO}


def objective_of(config: RunConfig) -> Objective:
    """The objective that the run's `train.objective` names."""
    return OBJECTIVES[config.train.objective]
