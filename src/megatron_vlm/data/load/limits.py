"""Ends the run if a dataset drops too much, also if it gives no batch at all, or if a data worker dies."""

import contextlib
import copy
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any

from torch.utils.data import DataLoader

from megatron_vlm.batch import DROPPED, Batch
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import MIN_SAMPLES, DropReport
from megatron_vlm.job.errors import killed_message


def over_epochs(drops: DropReport, place: Sequence[int], settled: Iterable[tuple]) -> Iterator[tuple]:
    """Passes on what a ledger settled, read from `place` on: an epoch, and how much of it is done.

    Raises TooManyDrops when a whole epoch of this rank had nothing to train on and at least MIN_SAMPLES
    were dropped. The rank would read on without a batch, and all others would wait without end.
    """
    epoch, has_sample, dropped = place[0], False, 0
    ends = int(not any(place[1:]))  # of epochs since the last sample; the beginning of the first counts
    for after, sample, reasons in settled:
        has_sample, dropped = has_sample or sample is not None, dropped + len(reasons)
        if after[0] != epoch:
            ends, dropped = (0, 0) if has_sample else (ends + after[0] - epoch, dropped)
            epoch, has_sample = after[0], False
            if ends > 1 and dropped >= MIN_SAMPLES:
                drops.epoch_was_dropped(dropped)
                drops.check()
        yield after, sample, reasons


def with_limited_drops(encoder, data: DataConfig):
    """A copy of `encoder` that counts in the same report and itself raises TooManyDrops."""
    limited = copy.copy(encoder)
    limited.drops = encoder.drops.limited(data.max_drop_share)
    return limited


def with_rest(batches: Iterable[Batch], encoder: Any) -> Iterator[Batch | dict]:
    """The batches of a pass as a worker makes them, and then what was dropped since the last."""
    encoder.taken_drops()  # of a pass that was left before its end, in this same process
    yield from batches
    yield {DROPPED: encoder.taken_drops()}


def next_or_too_many_drops(batches: Iterator[Batch], drops: DropReport, loader: DataLoader) -> Batch | None:
    """The next batch, and its drops have arrived; None after the last. If a worker gave up or was killed, the
    error says why in short."""
    try:
        batch = next(batches, None)
    except (RuntimeError, EOFError, ConnectionError) as error:  # the last two: it died while sending a batch
        drops.check()
        if not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker"):
            raise RuntimeError(worker_death(workers_of(loader))) from error
        raise
    drops.check()
    drops.arrived.update(batch.pop(DROPPED, {}) if batch else {})
    return batch


def workers_of(loader: DataLoader) -> Sequence[BaseProcess]:
    """The processes that read for a loader; none before it is asked for a batch."""
    return getattr(getattr(loader, "_iterator", None), "_workers", ())


def worker_death(workers: Iterable[BaseProcess]) -> str:
    """Return the message about the first of these data workers that has ended; no sample is to blame."""
    workers = list(workers)
    with contextlib.suppress(RuntimeError):  # with which torch interrupts the main thread when one has ended
        ended = wait([worker.sentinel for worker in workers], timeout=5)  # its pipes close a little before
        for worker in workers:
            worker.join(5 if worker.sentinel in ended else 0)
    dead = next((worker for worker in workers if worker.exitcode), None)
    number = -dead.exitcode if dead and dead.exitcode < 0 else signal.SIGKILL
    return killed_message(f"data: a DataLoader worker{f' (pid {dead.pid})' if dead else ''}", number)


def notice_the_dead(loader: DataLoader) -> None:
    """Makes a loader of Energon raise where it would wait without end for the answer of a dead worker."""

    def answer(worker: int, answers: Queue, get: Callable[[], Any]) -> Any:
        asked = workers_of(loader)[worker]
        if answers._reader not in wait([answers._reader, asked.sentinel]):
            raise RuntimeError(worker_death([asked]))
        return get()

    for worker, answers in enumerate(loader.result_queues):
        answers.get = partial(answer, worker, answers, answers.get)


def close_loader(loader: DataLoader) -> None:
    """End the workers at once; garbage collection would take 5 s for each worker of Energon.

    The threads that fed them have ended, too. A worker forked while such a thread closes its pipe would have
    a copy of the pipe, whose number may by then be the worker's own, and would close that.
    """
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        with contextlib.suppress(RuntimeError):  # torch reports a killed worker here, too
            iterator._shutdown_workers()
        for queue in getattr(iterator, "_index_queues", ()):
            if queue._thread is not None:
                queue._thread.join(timeout=5)
