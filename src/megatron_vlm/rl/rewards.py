"""Rewards of answers by the user's functions, called as TRL's GRPOTrainer calls its `reward_funcs`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import TrainerState

from megatron_vlm.config import ConfigError
from megatron_vlm.data.encode.chat_template import text_of
from megatron_vlm.imports import calling, load_function

PLACE = "train.rewards"


@dataclass
class AnswerRewards:
    """The rewards of some answers by each function.

    rewards  (answers, functions) fp64, NaN where a function returned None
    metrics  what they gave to `log_metric`, by name
    extra    what they gave to `log_extra`: name -> a value for each answer
    """

    rewards: np.ndarray
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[AnswerRewards]) -> AnswerRewards:
        """The rewards of several ranks, one after another, without `extra`."""
        names = sorted({name for part in parts for name in part.metrics})
        metrics = {name: [v for part in parts for v in part.metrics.get(name, [])] for name in names}
        return cls(np.concatenate([part.rewards for part in parts]), metrics)


class Rewards:
    """The functions that `train.rewards` names; `names` are what figures call them.

    Each is called with lists of one length: `prompts` and `completions` as messages, `completion_ids`, a list
    for each column of the records, `reference` (the reply that a record ends with) unless there is such a
    column, and with `trainer_state`, `log_extra` and `log_metric`. It returns a number for each answer, or
    None for one that it does not judge; a coroutine function may.
    """

    def __init__(self, names: Sequence[str]):
        self._functions = [(name, load_function(f"{PLACE}: {name}", name)) for name in names]
        short = [name.rpartition(":")[2] for name in names]
        self._columns: dict[str, None] = {}  # of all records so far; a few records may lack some
        self.names = [s if short.count(s) == 1 else n for s, n in zip(short, names, strict=True)]

    def __call__(
        self,
        prompts: Sequence[Mapping[str, Any]],
        answers: Sequence[str],
        answer_ids: Sequence[list[int]],
        state: TrainerState,
    ) -> AnswerRewards:
        """The rewards of answers, each to its prompt, which is a row's `asked` (`megatron_vlm.batch`).

        Raises:
            ConfigError: A function fails, or returns something else; the message names its line.
        """
        # what TRL's trainer passes: columns first, so that none takes the place of what follows
        scored = AnswerRewards(np.full((len(answers), len(self._functions)), np.nan))
        self._columns |= dict.fromkeys(name for prompt in prompts for name in prompt["columns"])
        arguments = {
            "reference": [prompt["reference"] for prompt in prompts],
            **{name: [prompt["columns"].get(name) for prompt in prompts] for name in self._columns},
            "prompts": [[_plain(turn) for turn in prompt["prompt"]] for prompt in prompts],
            "completions": [[{"role": "assistant", "content": answer}] for answer in answers],
            "completion_ids": list(answer_ids),
            "trainer_state": state,
            "log_extra": lambda name, values: scored.extra.update({name: list(values)}),
            "log_metric": lambda name, value: scored.metrics.setdefault(name, []).append(float(value)),
        }
        for column, (name, function) in enumerate(self._functions):
            place = f"{PLACE}: {name}"
            with calling(place, name):
                returned = function(**_arguments_of(function, arguments))
                returned = asyncio.run(returned) if inspect.isawaitable(returned) else returned
            scored.rewards[:, column] = _numbers(place, returned, len(answers))
        return scored


def _plain(turn: dict) -> dict:
    """The turn as TRL has it: its content is a text where it has no media."""
    if any(part["type"] != "text" for part in turn["content"]):
        return turn
    return turn | {"content": text_of(turn)}


def _arguments_of(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    return {
        parameter.name: arguments[parameter.name] for parameter in parameters if parameter.name in arguments
    }


def _numbers(place: str, returned: Any, count: int) -> np.ndarray:
    try:
        numbers = np.array([np.nan if value is None else float(value) for value in returned])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{place}: {error}; return a list with a number, or None, for each answer."
        ) from error
    if len(numbers) != count:
        raise ConfigError(
            f"{place}: returned {len(numbers)} rewards for {count} answers; return one for each."
        )
    if np.isinf(numbers).any():
        raise ConfigError(
            f"{place}: the reward of answer {np.isinf(numbers).argmax()} is infinite; return a number."
        )
    return numbers
