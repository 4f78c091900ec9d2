"""What can be wrong with what a run trains on."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_vlm.config import RunConfig


def objective_problems(config: RunConfig) -> Iterator[str]:
    """What does not go with `train.objective`."""
    if config.train.objective != "dpo":
        return
    if config.data.over_length == "truncate":
        yield (
            "data.over_length: truncate would cut one answer of a pair and leave the other; with "
            "train.objective=dpo, raise data.seq_length for both together, or drop pairs."
        )
    if not config.model.load_weights:
        yield (
            "train.objective: dpo compares with the weights of model.hf_path, and model.load_weights is "
            "false; set it to true."
        )
    if config.train.dpo_beta == 0:
        yield "train.dpo_beta: 0 trains nothing; give a number above 0, such as 0.1."
