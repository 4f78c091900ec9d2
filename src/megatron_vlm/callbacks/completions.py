"""Some of the answers of each step of GRPO, with their rewards: `<run_dir>/completions.jsonl`.

A line holds `step`, the `key` and `prompt` of a sample, its `reference` and `pictures`, and `answers`: of
each its `text`, the `rewards` by function, the `advantage`, its number of `tokens`, whether it `ended`, and
what functions gave to `log_extra`, as texts (`extra`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_vlm.callbacks.run_log import keep_rows_before, last_lines
from megatron_vlm.files import open_to_write

COMPLETIONS = "completions.jsonl"
PROMPTS_LOGGED = 2  # of a step


class CompletionsLog:
    """Lines of steps from `first_step` on, of an interrupted run, are dropped."""

    def __init__(self, run_dir: str | Path, first_step: int):
        path = Path(run_dir, COMPLETIONS)
        keep_rows_before(path, first_step)
        self._file = open_to_write(path, "ab")

    def write(
        self,
        step: int,
        prompts: Sequence[Any],
        samples: Sequence[Mapping[str, Any]],
        rewards: Mapping[str, Sequence[float]],
        extra: Mapping[str, Sequence[str]],
    ) -> None:
        """Log the first prompts of a step; lists have an entry for each sample."""
        # a line for each prompt, with all answers to it
        for number, prompt in enumerate(prompts[:PROMPTS_LOGGED]):
            answers = [
                {
                    "text": sample["text"],
                    "rewards": {name: _number(values[index]) for name, values in rewards.items()},
                    "advantage": sample["advantage"],
                    "tokens": int(sample["loss_mask"].sum()),
                    "ended": sample["ended"],
                    "extra": {name: values[index] for name, values in extra.items()},
                }
                for index, sample in enumerate(samples)
                if sample["prompt"] == number
            ]
            row = {"step": step, "key": prompt.key, "prompt": _as_text(prompt.messages)}
            row |= {name: prompt.facts[name] for name in ("reference", "pictures")} | {"answers": answers}
            self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def last_answers(run_dir: str | Path, count: int) -> list[dict[str, Any]]:
    """The last lines of a run's file, as far as they are whole; none if it has no such file."""
    path = Path(run_dir, COMPLETIONS)
    rows = []
    for line in last_lines(path) if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows[-count:]


def _number(reward: float) -> float | None:
    return reward if reward == reward else None  # of an answer that the function does not judge


def _as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The conversation to be read: media are names in angle brackets."""
    lines = []
    for turn in messages:
        content = "".join(part.get("text", f"<{part['type']}>") for part in turn["content"])
        lines.append(f"{turn['role']}: {content}")
    return "\n".join(lines)
