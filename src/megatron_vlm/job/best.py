"""The best of a run by `train.best_by`, a figure of its validations or scores, and when to end.

A checkpoint holds `Best.saved`, so a resumed run counts on from there.
"""

from collections.abc import Collection, Mapping
from math import inf, isfinite
from typing import Any

from megatron_vlm.config import ConfigError, TrainConfig
from megatron_vlm.messages import listed, printable

SCORE = "score/"  # begins the names of scores among a run's figures
VALID = "valid_"  # and of those of validations


class Best:
    """The best value so far, its step, and how many ratings after it were none better.

    Equal values are not better. `saved` is what a checkpoint says of it; of another figure it does not count.
    """

    def __init__(self, train: TrainConfig, saved: Mapping[str, Any] | None = None):
        self._train = train
        same = saved is not None and saved["by"] == train.best_by
        self.saved = dict(saved) if same else {"by": train.best_by, "rated": None, "step": 0, "since": 0}

    @property
    def is_over(self) -> bool:
        """Whether `train.patience` is at its end."""
        return 0 < self._train.patience <= self.saved["since"]

    def rate(self, step: int, logged: Mapping[str, float], higher: Collection[str] = ()) -> float | None:
        """The figure in what was logged after a step, as a number of which less is better; None if it was not
        due. More is better of the scores in `higher`.

        Raises ConfigError if figures of its kind were logged, and it is none of them.
        """
        name, more_is_better = self._train.best_figure
        alike = [one for one in logged if one.startswith(SCORE if self._train.best_is_score else VALID)]
        if not alike:
            return None
        if name not in alike:
            raise ConfigError(
                f"train.best_by: {printable(name)} is no figure that there is; there are {listed(alike, 8)}."
            )
        if more_is_better is None:
            more_is_better = name in higher
        rated = -logged[name] if more_is_better else logged[name]
        best = inf if self.saved["rated"] is None else self.saved["rated"]
        if isfinite(rated) and rated < best:
            self.saved |= {"rated": rated, "step": step, "since": 0}
        else:
            self.saved["since"] += 1
        return rated

    def why_over(self) -> str:
        """Why a run ended when `train.patience` was at its end."""
        name, _ = self._train.best_figure
        best = f"was best after step {self.saved['step']}" if self.saved["step"] else "was never finite"
        times = self.saved["since"]
        return f"{name} {best}, and no better in the {times} times since (train.patience)"
