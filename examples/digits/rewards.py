"""A reward for `train.rewards=[examples/digits/rewards.py:right]`."""

from __future__ import annotations

from evaluate import without_thoughts


def right(completions: list[list[dict]], reference: list[str], **kwargs) -> list[float]:
    """1 for an answer that is the reply of its record, else 0."""
    answers = [without_thoughts(completion[0]["content"]) for completion in completions]
    return [float(answer == right) for answer, right in zip(answers, reference, strict=True)]
