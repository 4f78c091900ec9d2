"""The outputs of all streams by sample, and how far they are from an engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.models.positions import Kinds
from megatron_vlm.parallel import setup
from megatron_vlm.rl.micro_batches import Document


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
    counts = [int(each.scored.sum()) for each in documents]
    found = torch.zeros(kinds, sum(counts), device=setup.device())
    if reports:
        found = torch.cat([report["scores"] for report in reports], dim=1)
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(found, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    placed: list[Tensor] = [torch.empty(0)] * len(documents)
    for each, part in zip(documents, found.split(counts, dim=1), strict=True):
        placed[each.number] = found.new_zeros(kinds, len(each.input_ids) - 1)
        placed[each.number][:, each.scored[1:].to(found.device)] = part
    return placed


def differences(
    documents: list[Document], scores: list[Tensor], rollout: Sequence[Tensor], kinds: Kinds
) -> dict[str, Difference]:
    """See `Policy.compare`; `scores` (T - 1,) are the policy's."""
    found = []
    for document, ours, given in zip(documents, scores, rollout, strict=True):
        wanted = document.scored[1:]
        theirs = document.of_scored("rollout", torch.as_tensor(given).cpu().float())
        seen = (torch.as_tensor(kinds(document.input_ids)) != 0).cumsum(0)[1:][wanted] > 0
        found.append((document.number, (ours.cpu()[wanted] - theirs).abs(), seen))
    return {
        name: _difference([(number, off[seen == after]) for number, off, seen in found])
        for name, after in (("text", False), ("after image", True))
    }


def _difference(parts: list[tuple[int, Tensor]]) -> Difference:
    every = torch.cat([off for _, off in parts]) if parts else torch.empty(0)
    if not len(every):
        return Difference(0, 0.0, 0.0, None)
    largest = torch.stack([off.max() for _, off in parts if len(off)])
    worst = [number for number, off in parts if len(off)][int(largest.argmax())]  # NaN is above all
    return Difference(len(every), every.mean().item(), largest.max().item(), worst)
