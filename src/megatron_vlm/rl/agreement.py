"""Lets every rank know of the others: an error of one is an error of all, and no rank waits for it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_vlm.parallel.setup import from_all_ranks
from megatron_vlm.rl.micro_batches import Document, MicroBatch


class CallInputs(NamedTuple):
    """The input of a rank to a call: `rows` of micro batches, and a checksum of its samples."""

    rows: int
    normalizer: float
    samples: int
    checksum: int
    model: int

    @classmethod
    def of(cls, documents: Sequence[Document], rows: int, normalizer: float) -> CallInputs:
        checksum = 0
        for document in documents:
            for tensor in (document.input_ids, document.scored):
                checksum = zlib.crc32(tensor.numpy().tobytes(), checksum)
        model = parallel_state.get_data_parallel_rank()
        return cls(max(1, rows), float(normalizer), len(documents), checksum, model)


def gather(value_here: Any, error: Exception | None = None) -> list[Any]:
    """Lists what each rank has, by rank. Collective.

    If a rank has an error, it raises that, and the others ValueError that quotes it.
    """
    every = from_all_ranks((value_here, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(every):
        if problem is not None:
            raise ValueError(f"rank {rank} has failed: {problem}")
    return [value for value, _ in every]


def most_rows(call_inputs: CallInputs | None, error: Exception | None) -> int:
    """The most rows that a rank has. Collective.

    Raises an error of any rank as `gather` does, and ValueError on every rank if the normalizers differ, or
    the samples of ranks that share a model.
    """
    every = gather(call_inputs, error)
    if len(normalizers := sorted({inputs.normalizer for inputs in every})) > 1:
        shown_normalizers = ", ".join(f"{number:g}" for number in normalizers)
        raise ValueError(
            f"normalizer: ranks give {shown_normalizers}; give one on all ranks, such as the "
            "number of samples, or of trained tokens, of the whole step."
        )
    models = [inputs.model for inputs in every]
    for rank, inputs in enumerate(every):
        first = models.index(inputs.model)
        if (inputs.samples, inputs.checksum) != (every[first].samples, every[first].checksum):
            raise ValueError(
                f"samples: ranks {first} and {rank} share a model, but give {every[first].samples} and "
                f"{inputs.samples} samples that differ; give the same on all ranks of one tp, cp and pp "
                "group."
            )
    return max(inputs.rows for inputs in every)


def means(
    reports: list[dict[str, Tensor]], rows: list[MicroBatch], failed: list[Exception]
) -> dict[str, float]:
    """Name -> mean over all data-parallel ranks of what the rows' losses logged; `loss` is a sum. Collective.

    Raises the first of what `failed`, and ValueError for a loss that is not finite, as `gather` does.
    """
    sums: dict[str, np.ndarray] = {}
    wrong: list[int] = []
    odd: list[str] = []
    logged = [pair.double() for report in reports for pair in report.values()]
    pairs = iter(torch.stack(logged).cpu().numpy() if logged else ())  # one wait for all
    for row, report in zip(rows, reports, strict=False):  # only the last stage has reports
        for name, pair in zip(report, pairs, strict=False):
            sums[name] = sums.get(name, 0) + pair
            if name == "loss" and not math.isfinite(pair[0]):
                wrong += [document.number for document in row.documents]
                odd += row.odd_fields()
    if wrong:
        fields = f"; correct the fields: {', '.join(odd)}." if odd else "; step with a lower lr."
        failed = [*failed, ValueError(f"the loss of samples {wrong} is not finite{fields}")]
    model = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    total = {"loss": np.zeros(2)}  # there may be no samples
    for of_rank in gather(sums if model == (0, 0) else {}, failed[0] if failed else None):
        for name, pair in of_rank.items():
            total[name] = total.get(name, 0) + pair
    return {name: float(value / (count or 1.0)) for name, (value, count) in total.items()}
