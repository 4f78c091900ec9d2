"""When a run ends, evaluates and saves, counted in steps, whatever its configuration counts in."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count, takewhile
from math import ceil

from megatron_vlm.config import EPOCH, ConfigError, RunConfig, TrainConfig
from megatron_vlm.messages import listed


class Epochs:
    """The rows that epochs of the training data have, on all ranks together.

    `rows_in(n)` are the batch rows of the first n epochs.
    """

    def __init__(self, rows_in: Callable[[int], int]) -> None:
        self.rows_in = rows_in
        self._whole = 0  # epochs that `at` found to be over

    def rows(self, epochs: float) -> int:
        """The rows of so many epochs; of a part of an epoch, rounded up."""
        full_epochs, part = divmod(Fraction(str(epochs)), 1)
        rows = self.rows_in(int(full_epochs))
        return rows + ceil(part * (self.rows_in(int(full_epochs) + 1) - rows)) if part else rows

    def at(self, rows: int) -> float:
        """How many epochs so many rows are; call it with growing numbers."""
        while self.rows_in(self._whole + 1) <= rows:
            self._whole += 1
        before, after = map(self.rows_in, (self._whole, self._whole + 1))
        return self._whole + (rows - before) / (after - before)

    def notes(self, config: RunConfig, last: int, rows: int) -> Iterator[str]:
        """Lines about the steps of an epoch; and of the run, if it is counted in epochs. It trains `rows`
        rows in its `last` steps."""
        batch, epoch_rows = config.train.global_batch_size, self.rows_in(1)
        yield f"data: an epoch has {epoch_rows / batch:,.2f} steps: {epoch_rows:,} rows, {batch} in a step"
        if (epochs := config.train.epochs) is None:
            return
        more = rows - self.rows(epochs)
        if more >= batch:
            yield f"train.epochs: the run is at step {last:,}, beyond {epochs:g} epochs; raise it to train on"
            return
        filled = f"; {more:,} rows of the epoch after them fill the last" if more else ""
        ends = "epoch ends" if epochs == 1 else "epochs end"
        yield f"train.epochs: {epochs:g} {ends} with step {last:,}{filled}"
        data = config.data
        if data.dataset_type == "energon" and data.shuffle_buffer_size > 1:
            yield (
                "train.epochs: Energon shuffles across the end of an epoch, so for each data worker up to "
                f"{data.shuffle_buffer_size:,} samples come once more and as many once less; "
                "data.shuffle_buffer_size=1 prevents that"
            )


def check_validation(
    train: TrainConfig, has_data: bool, sources: Sequence[str] = (), has_questions: bool = False
) -> None:
    """Raise ConfigError if nothing can tell the best checkpoint, an early end or a score.

    Args:
        train: The settings that ask for them.
        has_data: Whether there is validation data.
        sources: The names of its sources; `valid_loss/SOURCE` ends with one of them.
        has_questions: Whether there are conversations for scores alone (`data.score_path`).
    """
    # scores need conversations
    needing = [name for name in ("keep_best", "patience") if getattr(train, name)]
    scores = [*needing, "best_by"] if needing and train.best_is_score else []
    scores += ["score_every"] if train.score_every else []
    if scores and not (has_data or has_questions):
        raise ConfigError(
            f"train.{scores[-1]}: there are no conversations to score answers by; give data.score_path, "
            "data.valid_data_path or data.validation_share."
        )
    # losses need validation data, and a source of the name that is given
    if needing and not train.best_is_score and not has_data:
        raise ConfigError(
            f"train.{needing[0]}: there is no validation data to tell which step is the best; give "
            "data.valid_data_path or data.validation_share."
        )
    name = train.best_figure[0]
    losses = ["valid_loss", *(f"valid_loss/{source}" for source in sources)]
    if needing and name.startswith(losses[0]) and name not in losses:
        raise ConfigError(
            f"train.best_by: {name} is no loss of the validation data; give {listed(losses, 8)}."
        )


def validation_notes(train: TrainConfig, has_data: bool) -> Iterator[str]:
    """Lines for the user if there is validation data but no time for it, or the other way round."""
    if train.eval_every and not has_data:
        yield (
            "train.eval_every: there is no validation data, so nothing is validated; data.valid_data_path or "
            "data.validation_share give some"
        )
    if has_data and not (train.eval_every or train.keep_best):
        yield "train.eval_every: 0, so the validation data is not used; set a number of steps, or epoch"


@dataclass(frozen=True)
class StepSchedule:
    """The last step of a run, the steps in which an epoch ends, and what is done after each step."""

    train: TrainConfig
    steps: int
    epoch_ends: frozenset[int] = frozenset()
    stop: int | None = None  # the step after which the run ends early, with a checkpoint; see `stops`
    why: str = ""  # why `steps` are fewer than were asked for

    @property
    def last(self) -> int:
        """The step after which training ends."""
        return self.steps if self.stop is None else self.stop

    def notes(self, done: int) -> Iterator[str]:
        """Lines about a run that has trained so many steps, if it is at its end."""
        if done >= self.steps:
            yield (
                f"train.steps: {done} of {self.steps} are trained, so none is left; to go on, raise "
                "train.steps or train.epochs"
            )

    def stopping_soon(self, step: int) -> "StepSchedule":
        """These with an early end: after `step`, or after the next if that has begun already."""
        stop = step + self.has_step_after(step) if self.stop is None else self.stop
        return replace(self, stop=stop) if stop < self.steps else self

    def ending(self, step: int, reason: str) -> "StepSchedule":
        """These, with `step` as the last one, and the reason."""
        if step >= self.steps:
            return self
        reason = f"ended after step {step} of {self.steps}: {reason}"
        return replace(self, steps=step, stop=None, why=reason)

    def evaluates_after(self, step: int) -> bool:
        by_loss = self.train.keep_best and not self.train.best_is_score
        return self._due(self.train.eval_every, step) or (by_loss and self._save_is_due(step))

    def scores_after(self, step: int) -> bool:
        by_score = self.train.keep_best and self.train.best_is_score
        return self._due(self.train.score_every, step) or (by_score and self._save_is_due(step))

    def saves_after(self, step: int) -> bool:
        return step == self.stop or self._save_is_due(step)

    def _save_is_due(self, step: int) -> bool:
        return step == self.steps or self._due(self.train.save_every, step)

    def exports_after(self, step: int) -> bool:
        return self._due(self.train.export_every, step)

    def has_step_after(self, step: int) -> bool:
        """Whether the next step follows at once."""
        done = (self.evaluates_after, self.scores_after, self.saves_after, self.exports_after)
        return not any(is_due(step) for is_due in done)

    def _due(self, every: int | str, step: int) -> bool:
        if not every or step == self.steps:
            return bool(every)
        return step in self.epoch_ends if every == EPOCH else step % every == 0


def milestones(train: TrainConfig, epochs: Epochs | None, done: int = 0, rows: int = 0) -> StepSchedule:
    """The milestones of a run that has trained `done` steps, and `rows` rows of its data.

    With `train.epochs`, the last step is the first after which every row of these epochs has had its place in
    a global batch. If the rows do not fill that batch, rows of the following epoch do, so no row is left out
    and every step has `global_batch_size` rows. `epochs` None: their rows are not known before reading, which
    ConfigError says if the configuration counts in epochs.
    """
    every = ("eval_every", "score_every", "save_every", "export_every")
    counted = [name for name in every if getattr(train, name) == EPOCH]
    counted += ["epochs"] if train.epochs is not None else []
    if not counted:
        return StepSchedule(train, train.steps)
    if epochs is None:
        raise ConfigError(
            f"train.{counted[-1]}: this data draws its samples by weights, so it has no epochs; count steps, "
            "or make it a blend_epochized."
        )

    def step_of(done_rows: int) -> int:
        return done + max(0, -((rows - done_rows) // train.global_batch_size))

    steps = train.steps if train.epochs is None else step_of(epochs.rows(train.epochs))
    ends = takewhile(lambda end: step_of(end) <= steps, map(epochs.rows_in, count(1)))
    before = rows - train.global_batch_size  # epochs that ended until there ended in earlier steps
    return StepSchedule(train, steps, frozenset(step_of(end) for end in ends if end > before))
