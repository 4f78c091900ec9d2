"""Trains the steps of a run, and evaluates, saves and logs after them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from megatron_vlm.config import RunConfig
from megatron_vlm.feed import Feed
from megatron_vlm.job import watchdog
from megatron_vlm.run_folder.batch_log import naming_samples
from megatron_vlm.run_folder.run_log import RunLogger
from megatron_vlm.training import checkpoint
from megatron_vlm.training.evaluate import validation_loss
from megatron_vlm.training.figures import StepFigures
from megatron_vlm.training.losses.tokens import StepLoss
from megatron_vlm.training.optimizer import learning_rates
from megatron_vlm.training.step import train_step


@dataclass(frozen=True)
class Run:
    """A run on one rank, when all is there that its steps need."""

    config: RunConfig
    feed: Feed
    model: list[Module]
    optimizer: Any  # Megatron's, like the scheduler
    scheduler: Any
    step_loss: StepLoss
    figures: StepFigures
    log: RunLogger

    def train(self, step: int) -> None:
        """One optimizer step with the next global batch."""
        began = time.monotonic()
        rates_of_parts = learning_rates(self.scheduler)
        lr = rates_of_parts.pop("lr")
        micro_batches = self.feed.train(step)
        waited = time.monotonic() - began
        watchdog.beat(f"training step {step}")
        with naming_samples(self.config.run_dir, step, micro_batches):
            loss, tokens, grad_norm = train_step(
                self.model,
                self.optimizer,
                self.scheduler,
                micro_batches,
                step_loss=self.step_loss,
                figures=self.figures,
                goes_on=self.feed.milestones.goes_on_after(step),
            )
        watchdog.beat(step=step)
        seconds = time.monotonic() - began
        self.log.log_step(
            step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            trained_tokens=tokens,
            seconds=seconds,
            dropped=self.feed.dropped_everywhere(),
            figures=self.figures.of_step(seconds, waited) | self.feed.epoch_after(step) | rates_of_parts,
        )

    def evaluate(self, step: int) -> float | None:
        """The validation loss after a step, which is logged."""
        watchdog.beat(f"evaluating after step {step}")
        loss, figures = validation_loss(
            self.config, self.model, self.step_loss, take=self.feed.valid(), sources=self.feed.valid_sources
        )
        self.log.log_eval(step, loss, figures)
        return loss

    def save(self, step: int, valid_loss: float | None) -> None:
        """Write a checkpoint of a step, and the pictures of the run so far."""
        extra = {**self.log.totals, "rows": self.feed.rows_after(step), "valid_loss": valid_loss}
        extra["dropped"] = self.feed.dropped_by_reason()
        checkpoint.save(
            self.config.run_dir,
            step,
            self.model,
            self.optimizer,
            self.scheduler,
            loader_state=self.feed.state(),
            keep=self.config.train.keep_checkpoints,
            extra=extra,
            keep_best=self.config.train.keep_best,
        )
        self.log.save()
