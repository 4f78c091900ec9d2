"""The mean loss of the trained tokens, by their weights."""

from __future__ import annotations

from megatron_vlm.objectives.base import Objective

TOKENS = Objective(loss="megatron_vlm.training.losses.tokens:of_run")
