"""The error for rows that were neither trained on nor counted as dropped: they end the run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_vlm.messages import listed

REMEDY = "This is a bug: please report it; nothing is lost when you start again from the last checkpoint."


class LostSample(RuntimeError):
    """A row was neither trained on nor counted as dropped."""


def lost_samples(keys: Sequence[Any], happened: str) -> LostSample:
    """The error that says what `happened` to the rows with `keys`."""
    return LostSample(f"data: {listed([*map(str, keys)])}: {happened}. {REMEDY}")


def check_each_once(documents: ArrayLike, count: int, noun: str) -> None:
    """Raises LostSample unless `documents` are 0 … count - 1, in any order."""
    times = np.bincount(np.asarray(documents, int), minlength=count)
    if len(times) > count or (times != 1).any():
        raise lost_samples(np.flatnonzero(times != 1).tolist(), f"of {count} {noun}, not taken exactly once")
