"""A program that calls `train` is told how the run goes on."""

from collections.abc import Mapping
from pathlib import Path


class Callback:
    """Override what you need; each method is called on every rank, after what it tells of.

    An error in one ends the run. One that waits keeps the run waiting, and a rank that takes much longer than
    `train.hang_seconds` is taken for hanging.
    """

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        """After each optimizer step, with the figures of docs/metrics.md except running totals."""

    def on_validation(self, step: int, loss: float, figures: Mapping[str, float]) -> None:
        """After each validation; `figures` are the `valid_` ones of several sources."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """When the checkpoint of a step is complete in its folder `checkpoint`.

        With `train.async_save`, that is after one of the next steps, or at the end. All ranks call it after
        the same step, but do not wait for each other: call `torch.distributed.barrier()` before one of
        them moves or removes the checkpoint.
        """

    def on_end(self, step: int) -> None:
        """After the last step of the run, not after an error."""
