"""Preference pairs (DPO, arXiv 2305.18290): the chosen answer is to become likelier than the rejected one."""

from collections.abc import Iterator

from megatron_vlm.config import RunConfig
from megatron_vlm.objectives.base import Objective


def problems(config: RunConfig) -> Iterator[str]:
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


DPO = Objective(
    loss="megatron_vlm.training.losses.preferences:Preferences",
    encoder="megatron_vlm.data.preferences.pairs:PairEncoder",
    documents=2,
    figures={
        "margin": "margin {:.2f}",
        "accuracy": "accuracy {:.0%}",
        "reward_chosen": None,
        "reward_rejected": None,
    },
    reference_passes=1,
    record_part="rejected answer",
    record_keys=("rejected", "rejected_response", "rejected_messages"),  # see `data.chatml.record`
    problems=problems,
)
