"""What a turn says of its own training: its weight in the loss."""

from __future__ import annotations

from typing import Any

DOCUMENT = "document"  # the role of a conversation's only turn: interleaved text and images, all text trained
TRAINED = ("assistant", DOCUMENT)
WEIGHTS = ("loss", "weight")  # the first that a turn has counts
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000  # besides 0


def loss_weight(turn: dict) -> float:
    """The weight of a turn's tokens in the loss: what its `loss` or OpenAI's `weight` says, true and false
    being 1 and 0; 1 for a reply that says nothing, 0 for turns that are no replies."""
    if turn["role"] not in TRAINED:
        return 0.0
    return float(next((turn[key] for key in WEIGHTS if turn.get(key) is not None), 1))


def is_trained(turn: dict) -> bool:
    """Whether a turn is a reply to train on."""
    return loss_weight(turn) > 0


def wrong_setting(turn: dict) -> str | None:
    """What is wrong with a turn's weight."""
    for key in WEIGHTS:
        if not _is_weight(turn.get(key)):
            return f"{key} {turn[key]!r}, not true, false or a number from {LEAST_WEIGHT} to {MOST_WEIGHT}"
    return None


def _is_weight(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT)
