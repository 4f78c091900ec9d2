"""Steps whose loss or gradient norm is far above those before them, for `train.on_spike`.

As in OLMo-core's SkipStepOptimizer (`optim/skip_step_optimizer.py`, its default values), a spike is more than
SIGMAS standard deviations above the mean of the last WINDOW trained steps, once there are half as many.
"""

import math
from collections import deque
from collections.abc import Iterator
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.callbacks.samples import keys_of, named, replay_command
from megatron_vlm.parallel import setup

WINDOW = 128  # steps
SIGMAS = 6
LEAST_SPREAD = 1e-3  # of a mean: of steps that are alike, rounding is no spike
MOST_IN_A_ROW = 10  # skipped steps, after which it is no spike but the model


class Spikes(Callback):
    """Judges each step by its loss and gradient norm, which are the same on every rank.

    `why` says why the last step is a spike, and is empty if it is none; `skipped`: it was not trained.
    """

    def __init__(self, on_spike: str):
        self._on_spike = on_spike
        self._before: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self.count = 0
        self._in_a_row = 0
        self.why = ""
        self.skipped = False

    def state_dict(self) -> dict[str, Any]:
        return {"before": [*self._before], "spikes": self.count, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before.extend(map(tuple, state["before"]))
        self.count = state["spikes"]
        self._in_a_row = state["in_a_row"]

    def before_optimizer_step(self, run: Run, loss: float, grad_norm: float) -> bool:
        return self.trains(loss, grad_norm)

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Add the count of spikes and say the spike; a skipped step keeps no sums of sources."""
        if self.skipped:
            for name in [name for name in metrics if "/" in name]:
                del metrics[name]
        metrics["spikes"] = self.count
        if self.why:
            keys = dict.fromkeys(chain(*setup.from_all_ranks(keys_of(run.micro_batches))))
            look = replay_command(run.config.run_dir, run.step)
            run.message(f"step {run.step}: {self.why}; {named(keys)}; {look}")

    def trains(self, loss: float, norm: float) -> bool:
        """Whether a step of this loss and gradient norm is to change the weights. Call it once a step.

        Raises ValueError for a spike with `on_spike` "stop", and with "skip" after MOST_IN_A_ROW of them.
        """
        high = [*self._high(("loss", "gradient norm"), (loss, norm))]
        self.skipped = bool(high) and self._on_spike != "warn"
        self.why = "; ".join([*high, "not trained" if self.skipped else "trained"]) if high else ""
        self.count += bool(self.why)
        self._in_a_row = self._in_a_row + 1 if self.skipped else 0
        if self.skipped and (self._on_spike == "stop" or self._in_a_row > MOST_IN_A_ROW):
            before = f", as in the {MOST_IN_A_ROW} steps before, which were skipped" * (self._in_a_row > 1)
            raise ValueError(
                f"training: {'; '.join(high)}{before}; the weights were not changed. Start again with a "
                "lower optimizer.lr, or with train.on_spike=skip or without these samples."
            )
        if not self.skipped:
            self._before.append((loss, norm))
        return not self.skipped

    def _high(self, names: tuple[str, ...], values: tuple[float, ...]) -> Iterator[str]:
        if len(self._before) < WINDOW // 2:
            return
        for name, value, before in zip(names, values, zip(*self._before, strict=True), strict=True):
            mean = fmean(before)
            spread = max(stdev(before), LEAST_SPREAD * abs(mean))
            if math.isfinite(value) and value > mean + SIGMAS * spread:
                usual = f"{mean:.4g} ± {spread:.2g} in the {len(before)} trained steps before"
                yield f"the {name} is {value:.4g}, and was {usual}"
