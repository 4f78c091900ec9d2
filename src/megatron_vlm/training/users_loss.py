"""A user's function as the loss of trained tokens, in every layout: `train.objective=my_loss.py:focal`.

    def focal(log_probs, weights, gamma=2.0):
        losses = -((1 - log_probs.exp()) ** gamma) * log_probs
        return (weights * losses).sum(), {"nll": -(weights * log_probs).sum()}

The function gets what its parameters name (`INPUTS`), for the trained tokens of a micro batch that this rank
has. It returns a sum over them, and metrics by name, each a sum, too. A step divides these by the weights of
its global batch: so a mean in the function would make the loss depend on the layout.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.batch import IGNORE_INDEX, Batch
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.imports import calling, load_object
from megatron_vlm.models.head import STATISTICS, output_statistics
from megatron_vlm.models.stream import Stream
from megatron_vlm.models.vlm import run_schedule, streams_of
from megatron_vlm.objectives import Objective
from megatron_vlm.parallel.setup import on_device
from megatron_vlm.training.losses import Reports

# labels (n,), weights (n,) fp32, the micro batch on the host, (n,) the indices of its tokens into B * S
INPUTS = (*STATISTICS, "labels", "weights", "batch", "places")
RESERVED = ("loss", "lr", "grad_norm", "seconds", "trained_tokens")  # metrics of every step


@cache
def users_objective(name: str) -> Objective:
    """The objective of a user's function or, as it is, an `Objective` of the user's.

    Raises ConfigError that names the function and its line, if it fails with the two tokens of a trial.
    """
    place = f"train.objective: {name}"
    loaded = load_object(place, name)
    if isinstance(loaded, Objective):
        return loaded
    if not callable(loaded):
        raise ConfigError(f"{place} is a {type(loaded).__name__}; give a function, or an Objective.")
    loss = UsersLoss(name, place, loaded)
    return Objective(loss=loss.of_run, figures=dict.fromkeys(loss.metrics))


class UsersLoss:
    """A `StepLoss` of a user's function. Reports are as `token_loss`'s, with the metrics in `logs`; losses of
    single tokens, for the figures of sources, are -log p."""

    def __init__(self, name: str, place: str, function: Callable[..., Any]):
        self._name, self.place, self._function = name, place, function
        with calling(place, name):
            parameters = inspect.signature(function).parameters.values()
        self._inputs = [p.name for p in parameters if p.name in INPUTS]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            self._inputs = [*INPUTS]
        positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        for p in parameters:
            if p.name not in INPUTS and p.kind in positional and p.default is p.empty:
                names = ", ".join(INPUTS)
                raise ConfigError(f"{place}: it asks for {p.name}; a loss can have {names}.")
        self._statistics = ["log_probs", *(name for name in STATISTICS[1:] if name in self._inputs)]
        self.metrics = self._trial()

    def of_run(self, config: RunConfig, chunks: list[torch.nn.Module]) -> "UsersLoss":
        return self

    def __call__(
        self, chunks: list[torch.nn.Module], micro_batches: list[Batch], forward_only: bool = False
    ) -> tuple[Reports, float]:
        """Reports on the last stage; the gradients are there unless `forward_only`."""
        streams = streams_of(chunks, micro_batches)
        loss = partial(self._loss, iter(micro_batches))  # the last stage asks in their order
        head = partial(output_statistics, self._statistics)
        reports = run_schedule(chunks, streams, loss, head, forward_only=forward_only)
        return reports, sum(stream.trained_weight for stream in streams)

    def _loss(
        self, batches: Iterator[Batch], stream: Stream, output: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        batch = next(batches)
        tokens = dict(zip(self._statistics, output, strict=True))
        log_probs = tokens["log_probs"]
        weights = torch.ones_like(log_probs) if stream.weights is None else stream.weights
        # a micro batch without trained tokens has a loss of 0, with a gradient of 0
        total = output.sum()
        metrics = dict.fromkeys(self.metrics, log_probs.new_zeros((), dtype=torch.float64))
        if len(log_probs):
            trained = np.flatnonzero(batch["labels"].numpy() != IGNORE_INDEX)
            places = on_device(trained, log_probs.device)[stream.output_places]
            tokens |= {"labels": stream.labels, "weights": weights, "batch": batch, "places": places}
            total, metrics = self._of_function(tokens)
        if [*metrics] != self.metrics:
            names = f"{', '.join(metrics) or 'none'}, and at first {', '.join(self.metrics) or 'none'}"
            raise ConfigError(f"{self.place}: it returned metrics {names}; return the same ones always.")
        weight = weights.detach().double().sum()
        count = torch.full_like(weight, len(log_probs))
        return total, {
            "sums": torch.stack([total.detach().double(), weight, count]),
            "logs": {name: torch.stack([value, weight]) for name, value in metrics.items()},
            "losses": -log_probs.detach() * weights,
            "places": stream.output_places,
        }

    def _of_function(self, tokens: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The function's sum, and its metrics in fp64. Raises ConfigError for anything else."""
        with calling(self.place, self._name):
            returned = self._function(**{name: tokens[name] for name in self._inputs})
        match returned:
            case (Tensor() as total, Mapping() as metrics) if total.dim() == 0:
                pass
            case Tensor() as total if total.dim() == 0:
                metrics = {}
            case _:
                raise ConfigError(f"{self.place}: return a sum (a tensor of no axis), or it and metrics.")
        as_tensors = {}
        for name, value in metrics.items():
            if not isinstance(value, Tensor | float | int) or isinstance(value, Tensor) and value.dim():
                raise ConfigError(f"{self.place}: the metric {name} is no number; return a sum over tokens.")
            value = value.detach() if isinstance(value, Tensor) else total.new_full((), value)
            as_tensors[name] = value.double()
        return total, as_tensors

    def _trial(self) -> list[str]:
        """The names of the metrics, by a call with two tokens."""
        # a micro batch of one row, of whose three tokens two are trained
        ids = torch.tensor([[1, 2, 3]])
        labels = torch.tensor([[2, 3, IGNORE_INDEX]])
        batch = {
            "input_ids": ids,
            "labels": labels,
            "loss_mask": (labels > 0).float(),
            "__key__": [["trial"]],
        }
        batch |= {"position_ids": ids - 1, "attention_mask": torch.ones_like(ids), "visual_inputs": None}
        log_probs = torch.tensor([-0.5, -1.5], requires_grad=True)
        tokens = {name: log_probs if name.endswith("log_probs") else -log_probs for name in STATISTICS}
        tokens |= {
            "labels": labels[0, :2],
            "weights": torch.ones(2),
            "batch": batch,
            "places": ids[0, :2] - 1,
        }
        total, metrics = self._of_function(tokens)
        if not total.requires_grad:
            raise ConfigError(
                f"{self.place}: its sum has no gradient; compute it from {', '.join(STATISTICS)}."
            )
        if reserved := [name for name in metrics if name in RESERVED]:
            raise ConfigError(
                f"{self.place}: {reserved[0]} is a metric of every step; give yours another name."
            )
        return list(metrics)
