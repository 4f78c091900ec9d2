"""The objectives that `train.objective` can name; docs/how-to/extend.md tells how to add another.

No torch is imported here, so that a wrong setting is answered in a second.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

from megatron_vlm.config import RunConfig
from megatron_vlm.imports import load_function


@dataclass(frozen=True)
class Objective:
    """An entry of `OBJECTIVES`. What computes is named as "module:name" and imported when it is needed.

    loss              a function (config, chunks) -> `training.losses.StepLoss`; the chunks have the
                      starting weights. A StepLoss that is a `Callback`, too, is the run's first
    encoder           a class that takes the place of `data.encode.encoder.DocumentEncoder`, created with the
                      one that it replaces and the RunConfig; None: that one encodes
    documents         how many documents a sample has; they lie in one row, one after another
    figures           the names in `logs` of the loss's reports, and how the progress bar shows each; None:
                      not at all
    reference_passes  forward passes of each micro batch by the starting weights
    record_part       what every record must have, in words, in one of the fields `record_keys`
    problems          the lines about settings that do not go with it
    """

    loss: str | Callable[[RunConfig, list[Any]], Callable[..., Any]]
    encoder: str | None = None
    documents: int = 1
    figures: Mapping[str, str | None] = field(default_factory=dict)
    reference_passes: int = 0
    record_part: str = ""
    record_keys: tuple[str, ...] = ()
    problems: Callable[[RunConfig], Iterable[str]] = lambda config: ()

    def step_loss(self, config: RunConfig, chunks: list[Any]) -> Callable[..., Any]:
        """The function that makes the gradients of a run that begins with these chunks' weights."""
        loss = resolve_name(self.loss) if isinstance(self.loss, str) else self.loss
        return loss(config, chunks)

    def sample_encoder(self, documents: Any, config: RunConfig) -> Any:
        """The encoder of samples; `documents` encodes one conversation."""
        return resolve_name(self.encoder)(documents, config) if self.encoder else documents


def _dpo_problems(config: RunConfig) -> Iterator[str]:
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


# preference pairs (arXiv 2305.18290): the chosen answer is to become likelier than the rejected one
DPO = Objective(
    loss="megatron_vlm.training.losses:Preferences",
    encoder="megatron_vlm.data.preferences:PairEncoder",
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
    problems=_dpo_problems,
)


def _grpo_problems(config: RunConfig) -> Iterator[str]:
    grpo, data = config.grpo, config.data
    names = config.train.reward_names
    if not names:
        yield "train.rewards: grpo learns from rewards, and there are none; give [FILE.py:NAME]."
    for setting, name in [*(("train.rewards", name) for name in names), ("grpo.engine", grpo.engine)]:
        if name is not None:
            load_function(f"{setting}: {name}", name)  # which raises ConfigError
    if grpo.reward_weights and len(grpo.reward_weights) != len(names):
        yield f"grpo.reward_weights: {len(grpo.reward_weights)} of them; give one for each of train.rewards."
    if data.packing != "none" or data.group_by_length:
        yield (
            "data.packing: with train.objective=grpo a row is one prompt, and answers are packed in any "
            "case; set data.packing=none and data.group_by_length=false."
        )
    if grpo.max_completion_length >= data.seq_length:
        yield (
            f"grpo.max_completion_length: {grpo.max_completion_length} leaves no room for a prompt in "
            f"data.seq_length {data.seq_length}, which is for both; raise that."
        )
    if config.model.load_balancing:
        yield "model.load_balancing: grpo trains by rewards alone; leave it out."
    if grpo.beta and not config.model.load_weights:
        yield (
            "grpo.beta: it compares with the weights of model.hf_path, and model.load_weights is false; "
            "set it to true."
        )
    if grpo.delta is not None and grpo.delta <= 1 + (grpo.epsilon_high or grpo.epsilon):
        yield f"grpo.delta: {grpo.delta} is within the clipping by epsilon; raise it above 1 + epsilon_high."


# answers that get rewards, relative to other answers to the same prompt (arXiv 2402.03300)
GRPO = Objective(
    loss="megatron_vlm.rl.grpo:Grpo",
    encoder="megatron_vlm.data.encode.questions:PromptEncoder",
    figures={
        "reward": "reward {:.2f}",
        "ratio": None,
        "clip_ratio/region_mean": None,
        "entropy": None,
        "kl": None,
    },
    problems=_grpo_problems,
)
TOKENS = Objective(loss="megatron_vlm.training.losses:token_objective")  # their mean loss, by their weights
OBJECTIVES = {"tokens": TOKENS, "dpo": DPO, "grpo": GRPO}


def objective_of(config: RunConfig) -> Objective:
    """The objective that the run's `train.objective` names, or a user's (`training.users_loss`).

    Raises ConfigError, for a user's.
    """
    name = config.train.objective
    if name == "grpo" and config.grpo.beta:
        return replace(GRPO, reference_passes=1)
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    return resolve_name("megatron_vlm.training.users_loss:users_objective")(name)
