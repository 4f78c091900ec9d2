"""Rewards of answers by the user's functions, called as TRL's GRPOTrainer calls its `reward_funcs`."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import TrainerState

from megatron_vlm.config import ConfigError
from megatron_vlm.data.encode.chat_template import text_of
from megatron_vlm.imports import calling, load_function
from megatron_vlm.job import watchdog

PLACE = "train.rewards"


@dataclass
class AnswerRewards:
    """The rewards of some answers by each function.

    rewards  (answers, functions) fp64, NaN where a function returned None
    metrics  what they gave to `log_metric`, by name
    extra    what they gave to `log_extra`: name -> a text for each answer
    """

    rewards: np.ndarray
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[AnswerRewards]) -> AnswerRewards:
        """The rewards of several ranks, one after another, without `extra`."""
        names = sorted({name for part in parts for name in part.metrics})
        metrics = {name: [v for part in parts for v in part.metrics.get(name, [])] for name in names}
        return cls(np.concatenate([part.rewards for part in parts]), metrics)

    def log_metric(self, name: str, value: float) -> None:
        """Add to the mean of a figure of the step, as TRL's `log_metric`."""
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, name: str, values: Sequence[Any]) -> None:
        """Log a value for each answer, as TRL's `log_extra`. Raises ValueError for more or fewer."""
        values = [str(value) for value in values]
        if len(values) != len(self.rewards):
            counts = f"{len(values)} values for {len(self.rewards)} answers"
            raise ValueError(f"log_extra({name!r}): {counts}; give one for each")
        self.extra[name] = values


class Rewards:
    """The functions that `train.rewards` names; `names` are what figures call them.

    Each is called with lists of one length: `prompts` and `completions` as messages, `completion_ids`,
    `reference` and `references` (the reply that a record ends with, and all right ones), a list for each
    column of the records, and with `trainer_state`, `log_extra` and `log_metric`. It returns a number for
    each answer, or None for one that it does not judge. It may be a coroutine function.
    """

    def __init__(self, names: Sequence[str]):
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise ConfigError(
                f"{PLACE}: {twice[0]} is given twice; give it once, and its weight in grpo.reward_weights."
            )
        self._functions = [(name, load_function(f"{PLACE}: {name}", name)) for name in names]
        short = [name.rpartition(":")[2] for name in names]
        self.names = [s if short.count(s) == 1 else n for s, n in zip(short, names, strict=True)]

    def __call__(
        self,
        prompts: Sequence[Mapping[str, Any]],
        answers: Sequence[str],
        answer_ids: Sequence[list[int]],
        state: TrainerState,
        columns: Collection[str],
    ) -> AnswerRewards:
        """The rewards of answers, each to its prompt, which is a row's `asked` (`megatron_vlm.batch`).

        `columns` names the columns of a step's records, on any rank. A record without one has None there.

        Raises:
            ConfigError: A function fails, returns another thing, or needs a column that no record of the
                first step has.
        """
        scored = AnswerRewards(np.full((len(answers), len(self._functions)), np.nan))
        rows = [_columns_of(prompt) for prompt in prompts]
        # what TRL's trainer passes: columns first, so that none takes the place of what follows
        arguments = {
            **{name: [row.get(name) for row in rows] for name in {"reference", "references", *columns}},
            "prompts": [[_plain(turn) for turn in prompt["prompt"]] for prompt in prompts],
            "completions": [[{"role": "assistant", "content": answer}] for answer in answers],
            "completion_ids": list(answer_ids),
            "trainer_state": state,
            "log_extra": scored.log_extra,
            "log_metric": scored.log_metric,
        }
        for index, (name, function) in enumerate(self._functions):
            place = f"{PLACE}: {name}"
            watchdog.beat("computing rewards")
            passed = _arguments_of(function, arguments)
            if lacking := _lacking(function, passed):
                # The first step alone is checked: a rare column may be in no record of a later one, and a
                # run that goes on there would end again and again.
                if not state.global_step:
                    column_names = ", ".join(sorted(columns)) or "none"
                    raise ConfigError(
                        f"{place}: no record of the first step has {lacking[0]}; columns are {column_names}. "
                        "Name one of these, or give the parameter a default."
                    )
                passed |= {name: [None] * len(answers) for name in lacking}
            with calling(place, name):
                returned = function(**passed)
                returned = asyncio.run(returned) if inspect.isawaitable(returned) else returned
            scored.rewards[:, index] = _numbers(place, returned, len(answers))
        return scored


def _columns_of(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the prompt's record, and the right answers unless these are columns."""
    columns = {name: value for name, value in prompt["columns"].items() if value is not None}
    return {"reference": prompt["reference"], "references": prompt["references"]} | columns


def _plain(turn: dict) -> dict:
    """The turn as TRL has it: its content is a text where it has no media."""
    if any(part["type"] != "text" for part in turn["content"]):
        return turn
    return turn | {"content": text_of(turn)}


def _arguments_of(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = arguments.keys()
    passed = {name: value for name, value in arguments.items() if name in names}
    # lists of its own: another function may change its
    return {name: [*value] if isinstance(value, list) else value for name, value in passed.items()}


def _lacking(function: Any, passed: Collection[str]) -> list[str]:
    """The parameters without a default that are not given."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in passed
    ]


def _numbers(place: str, returned: Any, count: int) -> np.ndarray:
    try:
        if isinstance(returned, Mapping | Set):
            raise TypeError(f"returned a {type(returned).__name__}")
        numbers = np.array([_number(value) for value in returned])
    except (TypeError, ValueError, RuntimeError) as error:  # the last: a tensor of several numbers
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


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(f"a reward is the text {value!r:.40}")
    return np.nan if value is None else float(value)
