"""A model as a policy: log-probabilities of given tokens, gradients of any loss on them, weights out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.inputs import check_number
from megatron_vlm.models.adapters.model import adapter_tensors, with_adapters
from megatron_vlm.models.head import of_all_context_ranks, output_statistics
from megatron_vlm.models.hf import Source, open_source
from megatron_vlm.models.language_model import check_positions
from megatron_vlm.models.opened import open_model
from megatron_vlm.models.stream import Stream
from megatron_vlm.models.vlm import in_evaluation, run_schedule, streams_of
from megatron_vlm.models.weights.by_part import parameters_by_part
from megatron_vlm.models.weights.exporting import from_every_stage, hf_weights
from megatron_vlm.parallel import setup
from megatron_vlm.rl.agreement import CallInputs, means, most_rows
from megatron_vlm.rl.losses import Loss, checked
from megatron_vlm.rl.memory import GRADS, KINDS, MODEL, Memory
from megatron_vlm.rl.micro_batches import (
    Difference,
    MicroBatch,
    blank,
    by_sample,
    check_tokens,
    differences,
    documents_of,
    micro_batches,
)
from megatron_vlm.rl.routes import add_routes, of_samples, recorded
from megatron_vlm.run_folder import with_own_start
from megatron_vlm.training import checkpoint
from megatron_vlm.training.optimizer import build_optimizer
from megatron_vlm.training.step import (
    clip_and_step,
    data_parallel,
    empty_gradients,
    reduce_gradients,
)

SMALLEST_TEMPERATURE = 1e-4  # fp32 logits, divided by less, have no digits left that tell tokens apart
Samples = Sequence[Mapping[str, Any]]
# (log-probabilities (N,), entropies (N,) or None, fields by name (N,)) of a micro batch -> its loss, a sum
LossFunction = Callable[[Tensor, Tensor | None, dict[str, Tensor]], Loss]


@dataclass(frozen=True)
class Scores:
    """The scores (T - 1,) fp32 of each sample, entry t for token t + 1; 0 if unwanted. `routes` (T, layers,
    k) int16 are the experts of each token, -1 in layers without, to be given with the sample."""

    log_probs: list[Tensor]
    entropies: list[Tensor] | None
    routes: list[Tensor] | None = None


class Scorer:
    """A model that scores samples, under any layout; `Policy` is one that also learns from them.

    Each method is a collective of all ranks. What a sample is, see `Policy`.
    """

    def __init__(self, config: RunConfig, source: Source, chunks: list[nn.Module], max_tokens: int):
        self.config, self.source = config, source
        self.chunks, self.max_tokens = chunks, max_tokens

    def need(self, method: str, *kinds: str) -> None:
        """Raises ValueError if memory of these kinds is away, which only a `Policy` sends there."""

    @torch.no_grad()
    def logprobs(
        self, samples: Samples, temperature: float = 1.0, entropy: bool = False, routes: bool = False
    ) -> Scores:
        """Scores the wanted tokens of this rank's samples, with logits divided by `temperature`.

        Rows and operations are the same as in `forward_backward` on the same samples: equal to the bit. With
        `routes`, also which experts each token went to.
        """
        self.need("logprobs", MODEL)
        head = scores_head(temperature, entropy)
        rows = self.rows(samples)
        recording = recorded(self.chunks) if routes else nullcontext({})
        with in_evaluation(self.chunks), recording as chosen:
            streams = streams_of(self.chunks, [row.batch for row in rows])
            reports = run_schedule(self.chunks, streams, _reported, head, forward_only=True)
            placed = by_sample(reports, [item for row in rows for item in row.documents], 1 + entropy)
            return Scores(
                [item[0] for item in placed],
                [item[1] for item in placed] if entropy else None,
                of_samples(chosen, rows, self.chunks) if routes else None,
            )

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every weight as the hub's checkpoint has them, for an engine's `load_weights`;
        adapters are merged into them, one weight after another, as a merged export has them.

        Every rank gets all and iterates to the end.
        """
        self.need("hf_weights", MODEL)
        chunks = [chunk.module for chunk in self.chunks]
        value = with_adapters(chunks) if self.config.adapter.used else torch.detach
        return hf_weights(chunks, self.source.folder, self.source.weight_map, value)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, tensor) of the adapters and of what is trained whole beside them; an engine that has
        the base model loads them as LoRA. Every rank gets all and iterates to the end."""
        self.need("adapter_weights", MODEL)
        if not self.config.adapter.used:
            raise ValueError("adapter_weights: the model has no adapters; its weights are in hf_weights.")
        adapters = adapter_tensors([chunk.module for chunk in self.chunks])
        return from_every_stage(adapters)

    def compare(
        self, samples: Samples, rollout: Sequence[Tensor], temperature: float = 1.0
    ) -> dict[str, Difference]:
        """How far an engine's log-probabilities of this rank's samples are from the model's.

        `rollout` has one tensor a sample, of the wanted tokens or of all but the first, at `temperature`. The
        result has `text` for tokens before any image or video, `after image` for the others, over this rank's
        samples: what an engine prepares or places differently shows in the second alone.
        """
        scores = self.logprobs(samples, temperature).log_probs
        documents = documents_of(samples, self.source.needs)
        if len(rollout) != len(documents):
            raise ValueError(
                f"rollout: {len(rollout)} tensors for {len(documents)} samples; give one for each."
            )
        return differences(documents, scores, rollout, self.source.description.visual_kinds)

    def rows(self, samples: Samples, fields: Sequence[str] = (), normalizer: float = 1.0) -> list[MicroBatch]:
        """This rank's micro batches: as many as on every other rank, and as virtual stages need."""
        needs = self.source.needs
        rows: list[MicroBatch] = []
        call_inputs = error = None
        try:
            expectation = "a number above 0, the same on all ranks"
            check_number("normalizer", normalizer, lambda n: 0 < n < math.inf, expectation)
            if isinstance(fields, str):
                raise ValueError(f"fields is {fields!r}; give a list of names.")
            documents = documents_of(samples, needs)
            check_tokens(documents, self.source)
            most_positions = get_model_config(self.chunks[0]).most_positions
            for document in documents:
                check_positions(int(document.position_ids.max()), most_positions, f"sample {document.number}")
            rows = micro_batches(documents, self.max_tokens)
            add_routes(rows, self.chunks)
            for row in rows:
                row.given = row.fields(fields, setup.device())
            call_inputs = CallInputs.of(documents, len(rows), normalizer)
        except Exception as problem:  # noqa: BLE001 - all ranks raise it; now they wait for this one
            error = problem
        pp = self.config.parallel.pp if self.config.parallel.vpp > 1 else 1
        missing = -(-most_rows(call_inputs, error) // pp) * pp - len(rows)
        return rows + [blank(needs, self.source.description.visual_kinds)] * missing


class Policy(Scorer):
    """A model that scores samples and takes gradients from them, under any layout.

    A sample is a mapping with `input_ids` (T,), what the HF processor made of its images, `loss_mask` (T,) if
    not all tokens are wanted, `routes` if its experts are given, and any fields for losses. `samples` is a
    sequence of them: a list, a lazy stack of tensordict, or `TensorBatch.samples()`. Each data-parallel rank
    gives its own, any number, also none; the ranks of one model give the same. Every method but `to` is a
    collective of all ranks: where one raises alone, in the middle of a pass, its process must end, so that
    the others, which wait for it, end too.
    """

    def __init__(self, config: RunConfig, source: Source, chunks: list[nn.Module], max_tokens: int):
        super().__init__(config, source, chunks, max_tokens)
        described = source.description
        by_part = parameters_by_part(chunks, config.optimizer.by_part, described.groups, described.rules)
        self.optimizer, self.scheduler = build_optimizer(chunks, config, by_part=by_part)
        self.memory = Memory(chunks, self.optimizer)
        self._empty()

    def need(self, method: str, *kinds: str) -> None:
        self.memory.need(method, *kinds)

    @classmethod
    def from_hf(cls, config: RunConfig, max_tokens: int = 8192) -> Policy:
        """The model of `config.model.hf_path`, with new or given adapters if `config.adapter` says so.

        `max_tokens` is the length of a packed row; a longer sample has a row for itself, of any length.
        """
        config = _without_balancing_loss(config, max_tokens)
        source = open_source(config.model.hf_path, data=config.data)
        chunks = open_model(config, source)
        return cls(config, source, data_parallel(chunks, config, one_backward=False), max_tokens)

    @classmethod
    def from_run(cls, config: RunConfig, max_tokens: int = 8192) -> Policy:
        """The model of the latest checkpoint in `config.run_dir`, with a new optimizer."""
        config = setup.on_first_rank(
            with_own_start, _without_balancing_loss(config, max_tokens)
        )  # whose disk may be ahead
        source = open_source(config.model.hf_path, checkpoint.saved(config.run_dir).tied, config.data)
        chunks = open_model(config, source, resumes=True)
        if checkpoint.load_latest(config.run_dir, chunks) is None:
            raise FileNotFoundError(
                f"{config.run_dir}: no complete checkpoint in this run folder; train it, or use from_hf."
            )
        return cls(config, source, data_parallel(chunks, config, one_backward=False), max_tokens)

    def forward_backward(
        self,
        samples: Samples,
        loss_function: LossFunction,
        normalizer: float,
        temperature: float = 1.0,
        entropy: bool = False,
        fields: Sequence[str] = (),
    ) -> dict[str, float]:
        """Adds the gradient of the losses' sum over all ranks' samples / `normalizer`, equal on all ranks.

        `loss_function` gets, for the wanted tokens of a micro batch, log-probabilities, entropies if asked
        for, and the samples' `fields`, with `sample`, the number of each token's sample. Any number of calls
        may come before `step`. Returns the means of what the losses log over all ranks, and `loss`.

        Raises on every rank what `loss_function` raises on one, and ValueError for a loss that is not finite.
        Then all gradients since the last step are gone.
        """
        self.need("forward_backward", MODEL, GRADS)
        head = scores_head(temperature, entropy)
        rows = self.rows(samples, fields, normalizer)
        remaining_rows = iter(rows)  # the last stage asks for losses in the order of the rows
        failed: list[Exception] = []

        def loss(stream: Stream, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            row, scores = next(remaining_rows), of_all_context_ranks(output, stream, dim=1)
            if not row.documents:
                return scores.sum(), {}
            try:
                of_row = checked(loss_function(scores[0], scores[1] if entropy else None, row.given))
            except Exception as error:  # noqa: BLE001 - all ranks raise it below; now they wait for this one
                failed.append(error)
                return scores.sum(), {}
            total = of_row.total / normalizer
            return total, of_row.logs | {"loss": torch.stack([total.detach(), total.new_zeros(())])}

        try:
            streams = streams_of(self.chunks, [row.batch for row in rows])
            reports = run_schedule(self.chunks, streams, loss, head)
            return means(reports, rows, failed)
        except BaseException:
            self._empty()  # some rows' gradients are there, others are not
            raise

    def step(self) -> float:
        """One optimizer step with the gradients since the last; they are reduced over ranks here, once.

        Returns their norm. Without any call of `forward_backward` they are zero. Raises ValueError on every
        rank if the norm is not finite; then the weights stay as they are, and the gradients are gone.
        """
        self.need("step", *KINDS)
        reduce_gradients(self.chunks)
        _, norm, _ = clip_and_step(self.optimizer)
        self._empty()
        if not math.isfinite(norm):
            raise ValueError(
                f"step: the norm of the gradients is {norm}, so no step was taken and they are gone; lower "
                "optimizer.lr, or leave out the samples of these calls of forward_backward."
            )
        self.scheduler.step(increment=1)
        return norm

    def to(self, device: str, model: bool = True, optimizer: bool = True, grads: bool = True) -> None:
        """With "cpu", copies what is named to host memory and releases the device's; with "cuda", brings it
        back to the device as it was, to the bit, gradients between two calls of `forward_backward` included.

        What needs it raises ValueError meanwhile. Every rank acts for itself. A policy that runs on a CPU
        releases and fills its memory in the same way.
        """
        if device not in ("cpu", "cuda"):
            raise ValueError(f'device is {device!r}; give "cpu" to offload, or "cuda" to bring back.')
        for kind, is_on_device in zip(KINDS, (model, optimizer, grads), strict=True):
            if is_on_device:
                self.memory.offload(kind) if device == "cpu" else self.memory.onload(kind)

    def _empty(self) -> None:
        for chunk in self.chunks:
            empty_gradients(chunk)
        self.optimizer.zero_grad()


def scores_head(temperature: float, entropy: bool) -> Callable[..., Tensor]:
    """The model's head that gives log-probabilities and, with `entropy`, entropies of wanted tokens.

    Raises ValueError for a temperature that is too small for fp32.
    """
    expectation = f"one from {SMALLEST_TEMPERATURE:g} upwards"
    check_number("temperature", temperature, lambda t: SMALLEST_TEMPERATURE <= t < math.inf, expectation)
    names = ("log_probs", "entropies") if entropy else ("log_probs",)
    return partial(output_statistics, names, temperature)


def _without_balancing_loss(config: RunConfig, max_tokens: int) -> RunConfig:
    """The configuration without a load-balancing loss, which would be weighed by tokens, not by `normalizer`.
    Several policies may live in one process; they have one layout."""
    check_number("max_tokens", max_tokens, lambda n: index(n) >= 1, "a whole number above 0")
    if config.model.load_balancing:
        raise ConfigError(
            f"model.load_balancing: is {config.model.load_balancing}, but a policy's gradients are those of "
            "its losses alone; leave it out."
        )
    if not parallel_state.model_parallel_is_initialized():
        setup.init_distributed(config.parallel, config.train.seed)
    have, names = checkpoint.layout(), ("tp", "pp", "vpp", "cp", "ep")
    if other := [f"{name} {have[name]}" for name in names if getattr(config.parallel, name) != have[name]]:
        raise ConfigError(f"parallel: this process has {', '.join(other)} already; give all policies that.")
    return replace(config, model=replace(config.model, load_balancing=0.0))


def _reported(stream: Stream, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return output.sum(), {"scores": of_all_context_ranks(output, stream, dim=1)}
