"""Samples of any length and with any images as micro batches of packed rows, and the way back."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.batch import HOST_FIELDS, IGNORE_INDEX, Batch, DataNeeds, GenericVisualInputs, check
from megatron_vlm.data.encode.packing import pack
from megatron_vlm.models.hf import Source
from megatron_vlm.models.positions import Kinds
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.setup import on_device
from megatron_vlm.rl.containers import VISUAL_FIELDS, TensorBatch


@dataclass
class Document:
    """One sample: its tokens, what they see, and what the caller says of them."""

    number: int  # in the caller's samples
    sample: Mapping[str, Any]
    needs: DataNeeds

    @cached_property
    def input_ids(self) -> Tensor:
        """(T,)"""
        ids = torch.as_tensor(self.sample.get("input_ids", ())).cpu()
        if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
            raise ValueError(
                f"sample {self.number}: input_ids are {ids.dtype} {tuple(ids.shape)}; give whole numbers, "
                "(T,), without padding."
            )
        return ids.long()

    @cached_property
    def visual(self) -> GenericVisualInputs | None:
        """Its images and videos; an entry of no rows is as good as none."""
        seen = {k: torch.as_tensor(v) for k, v in self.sample.items() if k in VISUAL_FIELDS and v is not None}
        # what was made under `inference_mode` cannot be kept for a backward pass
        seen = {key: value.clone() if value.is_inference() else value for key, value in seen.items()}
        outputs = self.needs.of_processor({k: v for k, v in seen.items() if len(v)})
        visual_fields = {key: outputs[key] for key in self.needs.visual_keys if outputs.get(key) is not None}
        visual_fields = {
            key: value.cpu() if key in HOST_FIELDS else value for key, value in visual_fields.items()
        }
        return GenericVisualInputs(**visual_fields) if visual_fields else None

    @cached_property
    def scored(self) -> Tensor:
        """(T,) bool: the tokens whose log-probability is wanted; the first has none."""
        ids = self.input_ids
        mask = self.sample.get("loss_mask")
        mask = torch.ones(len(ids)) if mask is None else torch.as_tensor(mask).cpu()
        if mask.shape != ids.shape or ((mask != 0) & (mask != 1)).any():
            raise ValueError(
                f"sample {self.number}: loss_mask is {tuple(mask.shape)} for {len(ids)} tokens, or holds "
                "more than 0 and 1; give one of these for each token, and weights as a field for the loss."
            )
        mask = mask.bool().clone()
        mask[0] = False
        return mask

    @cached_property
    def position_ids(self) -> Tensor:
        """(T,) or (3, T)"""
        return self.needs.position_ids(self.input_ids, self.visual)

    def field(self, name: str) -> Tensor:
        """(n,) what the sample says under this name of its scored tokens, as `of_scored` reads it."""
        if name not in self.sample:
            raise ValueError(f"sample {self.number}: lacks {name}, which other samples have.")
        try:
            value = torch.as_tensor(self.sample[name])
        except (TypeError, ValueError, RuntimeError) as error:
            place = f"sample {self.number}: {name}"
            raise ValueError(f"{place} is no tensor ({error}); give one, or a number.") from None
        return self.of_scored(name, value.detach())

    def of_scored(self, name: str, value: Tensor) -> Tensor:
        """(n,) the value of each scored token.

        A number holds for all of them. A tensor (T,) has an entry for each token, (T - 1,) for each but the
        first, (n,) for each scored one. Raises ValueError for another shape, and for T - 1 entries if these
        may also be one for each token of `loss_mask`, the first included, which is never scored.
        """
        if value.dim() == 0:
            return value.expand(int(self.scored.sum()))
        tokens, scored = len(self.input_ids), self.scored
        masks = {scored.sum().item(): scored[scored], tokens - 1: scored[1:], tokens: scored}
        masked = self.sample.get("loss_mask")
        if masked is not None and masked[0] and scored.sum() == tokens - 2:
            del masks[tokens - 1]  # which may be all but the first, or those of loss_mask
        if value.dim() > 1 or len(value) not in masks:
            raise ValueError(
                f"sample {self.number}: {name} is {tuple(value.shape)} for {tokens} tokens, "
                f"{int(scored.sum())} of them scored; give a number, or one entry for each token, and only "
                "where it is clear which are meant, for each but the first, or for each scored one."
            )
        return value[masks[len(value)].to(value.device)]


@dataclass
class MicroBatch:
    """One row of documents, and whose they are."""

    batch: Batch
    documents: list[Document]
    given: dict[str, Tensor] = field(default_factory=dict)  # what the loss of the row gets, see `fields`

    def fields(self, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
        """name -> (N,) over the scored tokens of the row; `sample` is the number of each one's sample."""
        fields = {
            name: on_device(torch.cat([document.field(name) for document in self.documents]), device)
            for name in names
        }
        counts = torch.tensor([int(document.scored.sum()) for document in self.documents])
        numbers = torch.tensor([document.number for document in self.documents])
        return fields | {"sample": on_device(numbers.repeat_interleave(counts), device)}

    def odd_fields(self) -> list[str]:
        """The fields for the loss with a number that is not finite, each with a sample. Waits for them."""
        odd = []
        for name, value_N in self.given.items():
            wrong = (~value_N.isfinite()).nonzero().flatten()
            if len(wrong):
                sample = self.given["sample"][wrong[0]].item()
                odd.append(f"{name} of sample {sample} is {value_N[wrong[0]].item()}")
        return odd


def documents_of(samples: Sequence[Mapping[str, Any]] | TensorBatch, needs: DataNeeds) -> list[Document]:
    """Raises ValueError for what has no length, and for one sample, or fields, in place of samples."""
    samples = samples.samples() if isinstance(samples, TensorBatch) else samples
    if isinstance(samples, Mapping) or not isinstance(samples, Sized):
        kind = type(samples).__name__
        raise ValueError(f"samples are of type {kind}; give a list of samples, each a mapping of its fields.")
    return [Document(number, samples[number], needs) for number in range(len(samples))]


def check_tokens(documents: list[Document], source: Source) -> None:
    """Raises ValueError for a sample that the model cannot take: padding, tokens that it does not have, more
    or fewer placeholders than its images and videos have features."""
    size, kinds = source.description.text.vocab_size, source.description.visual_kinds
    needs = source.needs
    for document in documents:
        place, ids = f"sample {document.number}:", document.input_ids
        visual = torch.as_tensor(kinds(ids)) != 0
        if (wrong := ids[~visual & ((ids < 0) | (ids >= size))]).numel():
            raise ValueError(
                f"{place} token {wrong[0].item()} is none of the model's {size}; give its tokenizer's ids."
            )
        mask = document.sample.get("attention_mask")
        if mask is not None and (padding := int((torch.as_tensor(mask) == 0).sum())):
            raise ValueError(
                f"{place} attention_mask has {padding} zeros; give its tokens and fields without padding."
            )
        if problem := needs.misfit(ids, document.visual):
            raise ValueError(
                f"{place} {problem}; give all that the processor made of them, and input_ids that "
                "are not cut."
            )


def micro_batches(documents: list[Document], max_tokens: int) -> list[MicroBatch]:
    """The documents in rows of at most `max_tokens`; a longer one has a row for itself. The same documents
    have the same rows."""
    documents = sorted(documents, key=lambda document: -len(document.input_ids))
    lengths = [len(document.input_ids) for document in documents]
    room = min(max_tokens, sum(lengths))  # `pack` takes memory for each token of a row
    rows = pack([min(length, room) for length in lengths], room)
    return [_packed([documents[number] for number in row]) for row in rows]


def _packed(documents: list[Document]) -> MicroBatch:
    labels = [
        torch.where(document.scored.roll(-1), document.input_ids.roll(-1), IGNORE_INDEX)
        for document in documents
    ]
    numbers = [torch.full_like(document.input_ids, n) for n, document in enumerate(documents, start=1)]
    row = torch.cat(labels)[None]
    visual = [document.visual for document in documents if document.visual is not None]
    batch: Batch = {
        "input_ids": torch.cat([document.input_ids for document in documents])[None],
        "labels": row,
        "loss_mask": (row != IGNORE_INDEX).float(),
        "position_ids": torch.cat([document.position_ids for document in documents], dim=-1).unsqueeze(-2),
        "attention_mask": torch.cat(numbers)[None].int(),
        "visual_inputs": GenericVisualInputs.cat(visual),
        "__key__": [[str(document.number) for document in documents]],
        "__restore_key__": None,
    }
    return MicroBatch(check(batch), documents)


def blank(needs: DataNeeds, kinds: Kinds) -> MicroBatch:
    """A row of one token that asks for nothing, for a rank that has too few."""
    every = torch.arange(1000)
    token = every[torch.as_tensor(kinds(every)) == 0][:1]  # no placeholder
    row = _packed([Document(-1, {"input_ids": token}, needs)])
    return MicroBatch(row.batch, [])


# ---- the way back -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The number of absolute differences of log-probabilities; which sample has the largest (None: no
    token)."""

    tokens: int
    mean: float
    max: float
    worst_sample: int | None


def by_sample(reports: list[dict[str, Tensor]], documents: list[Document], kinds: int) -> list[Tensor]:
    """The scores (kinds, T - 1) of each sample, 0 where none was wanted; `reports` have the last stage's, of
    rows that hold these documents. Collective over pipeline stages."""
    counts = [int(document.scored.sum()) for document in documents]
    scores = torch.zeros(kinds, sum(counts), device=setup.device())
    if reports:
        scores = torch.cat([report["scores"] for report in reports], dim=1)
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(scores, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    placed: list[Tensor] = [torch.empty(0)] * len(documents)
    for document, of_document in zip(documents, scores.split(counts, dim=1), strict=True):
        places = on_device(document.scored[1:].nonzero().flatten(), scores.device)
        zeros = scores.new_zeros(kinds, len(document.input_ids) - 1)
        placed[document.number] = zeros.index_copy_(1, places, of_document)
    return placed


def differences(
    documents: list[Document], scores: list[Tensor], rollout: Sequence[Tensor], kinds: Kinds
) -> dict[str, Difference]:
    """See `Policy.compare`; `scores` (T - 1,) are the policy's."""
    compared = []
    for document, ours, engine_scores in zip(documents, scores, rollout, strict=True):
        is_scored = document.scored[1:]
        rollout_scores = document.of_scored("rollout", torch.as_tensor(engine_scores).cpu().float())
        seen = (torch.as_tensor(kinds(document.input_ids)) != 0).cumsum(0)[1:][is_scored] > 0
        compared.append((document.number, (ours.cpu()[is_scored] - rollout_scores).abs(), seen))
    return {
        name: _difference([(number, off[seen == after]) for number, off, seen in compared])
        for name, after in (("text", False), ("after image", True))
    }


def _difference(parts: list[tuple[int, Tensor]]) -> Difference:
    every = torch.cat([off for _, off in parts]) if parts else torch.empty(0)
    if not len(every):
        return Difference(0, 0.0, 0.0, None)
    largest = torch.stack([off.max() for _, off in parts if len(off)])
    worst = [number for number, off in parts if len(off)][int(largest.argmax())]  # NaN is above all
    return Difference(len(every), every.mean().item(), largest.max().item(), worst)
