"""Sends batches from the one rank that reads to all ranks of its TP x CP x PP group."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.batch import HOST_FIELDS, Batch
from megatron_vlm.data.accounts.drops import DropReport
from megatron_vlm.job import watchdog
from megatron_vlm.job.errors import named
from megatron_vlm.messages import PrintableText, join_lines
from megatron_vlm.parallel.setup import collective_timeout, from_all_ranks, parallel_state

_HOST = torch.device("cpu")


class ReadFailed(RuntimeError):
    """A rank could not read its data. The text says which rank and why; it is the same on every rank."""


class BatchBroadcaster:
    """Sends the batches of one reading rank to all ranks that share its data-parallel rank.

    All ranks create one, as it creates process groups. They are its own and on the host, so that a thread can
    read while the model's collectives run. All ranks of a group call `next` or `take` the same number of
    times, one call at a time.
    """

    def __init__(self):
        data = parallel_state.get_data_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self._all = _group_of(0)
        self._group = _group_of(data)
        self._stage_group = _group_of((data, stage))
        self._source = dist.get_process_group_ranks(self._group)[0]
        self._pins = torch.cuda.is_available()  # so that a copy to the device waits for nothing
        self._first_stage = stage == 0

    @property
    def reads(self) -> bool:
        """Whether this rank is the one that reads."""
        return dist.get_rank() == self._source

    def take(
        self, iterator: Iterator[Batch] | None, count: int, counts: DropReport | None = None
    ) -> list[Batch]:
        """Up to `count` batches, fewer if the iterator ends; all ranks of the run call it together.

        If any rank could not read, all raise ReadFailed with the reason. The `counts` of a reading rank are
        told what the others have counted.
        """
        batches, failure = [], None
        try:
            while len(batches) < count and (batch := self.next(iterator)) is not None:
                batches.append(batch)
                watchdog.beat()
        except ReadFailed as error:
            failure = error
        self._agree(failure, counts)
        return batches

    def _agree(self, failure: ReadFailed | None, counts: DropReport | None) -> None:
        """Raises on all ranks if one failed; else the others would wait for it in the model's collectives."""
        counts_here = counts.local_counts() if counts is not None else [0, 0, 0]
        total = torch.tensor([failure is not None, *counts_here], dtype=torch.int64)
        dist.all_reduce(total, group=self._all)
        failures, *everywhere = total.tolist()
        if counts is not None:
            counts.set_remote_counts(
                [total - count_here for total, count_here in zip(everywhere, counts_here, strict=True)]
            )
        if not failures:
            return
        texts = from_all_ranks(failure and failure.args[0], self._all)
        raise ReadFailed(join_lines(dict.fromkeys(filter(None, texts)))) from failure

    def next(self, iterator: Iterator[Batch] | None) -> Batch | None:
        """The next batch; None on every rank when the iterator has ended.

        The reading rank passes its iterator, the others None. All tensors and plain values arrive bit-equal
        on the host of all ranks, except `visual_inputs`, which arrives in pinned memory on the first pipeline
        stage and is None beyond. If it raises, every rank of the group raises ReadFailed with the same text.
        """
        batch: Batch | dict = {}
        header = None
        if self.reads:
            try:
                batch = next(iterator, {})
                header = _header(batch) if batch else None
            except Exception as error:
                reason = named(error).removeprefix("data: ")
                text = PrintableText(f"data: rank {self._source} could not read a batch: {reason}")
                self._exchange_header({"error": text})
                raise ReadFailed(text) from error
        header = self._exchange_header(header)
        if header is None:
            return None
        if "error" in header:
            raise ReadFailed(header["error"])
        return self._deliver(header, batch)

    def _exchange_header(self, header: dict[str, Any] | None) -> dict[str, Any] | None:
        box = [header]
        if self._group.size() > 1:
            dist.broadcast_object_list(box, self._source, group=self._group, device=_HOST)
        return box[0]

    def _deliver(self, header: dict[str, Any], batch: Batch | dict) -> Batch:
        received = {
            name: self._broadcast(batch.get(name), value, self._group) if isinstance(value, Tensor) else value
            for name, value in header.items()
        }
        visual = received.get("visual_inputs")
        received["visual_inputs"] = None
        if visual is not None and self._first_stage:
            visual_inputs = batch.get("visual_inputs")
            pixels = {
                name: self._broadcast(
                    getattr(visual_inputs, name, None), empty, self._stage_group, self._pins
                )
                for name, empty in visual.as_model_kwargs().items()
                if empty.is_meta
            }
            received["visual_inputs"] = dataclasses.replace(visual, **pixels)
        return received

    def _broadcast(
        self, tensor: Tensor | None, empty: Tensor, group: dist.ProcessGroup, pins: bool = False
    ) -> Tensor:
        tensor = torch.empty(empty.shape, dtype=empty.dtype) if tensor is None else tensor.contiguous()
        tensor = tensor.pin_memory() if pins else tensor
        if group.size() > 1 and tensor.numel():
            # as bytes: gloo does not know every dtype
            dist.broadcast(tensor.view(-1).view(torch.uint8), self._source, group=group)
        return tensor


def _group_of(key: Any) -> dist.ProcessGroup:
    """A new group on the host of all ranks with the same `key`."""
    keys = from_all_ranks(key)
    members = [
        [rank for rank, rank_key in enumerate(keys) if rank_key == group_key]
        for group_key in sorted(set(keys))
    ]
    return dist.new_subgroups_by_enumeration(members, timeout=collective_timeout(), backend="gloo")[0]


def _header(batch: Batch) -> dict[str, Any]:
    """The batch with tensors on `meta`, which the others allocate. Small visual ones are in it."""
    header = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in batch.items()}
    if (visual := batch.get("visual_inputs")) is not None:
        pixels = {name: v for name, v in visual.as_model_kwargs().items() if name not in HOST_FIELDS}
        empty = {name: v.to("meta") for name, v in pixels.items()}
        header["visual_inputs"] = dataclasses.replace(visual, **empty)
    return header
