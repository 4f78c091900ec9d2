"""A callback that logs a metric, keeps a state for exact resume, and ends the run.

megatron-vlm train … --callbacks examples/extend/callbacks.py:StopAtLoss
"""

from pathlib import Path

from megatron_vlm.callbacks import Callback, Run


class StopAtLoss(Callback):
    """Ends the run when the loss was below 0.1 in ten steps."""

    def __init__(self) -> None:
        self.below = 0

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.below += metrics["loss"] < 0.1
        run.log({"mine/steps_below": self.below})
        if self.below == 10:
            run.stop("the loss was ten times below 0.1")

    def on_save(self, run: Run, checkpoint: Path) -> None:
        run.message(f"saved in {checkpoint}")

    def state_dict(self) -> dict[str, int]:
        return {"below": self.below}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.below = state["below"]
