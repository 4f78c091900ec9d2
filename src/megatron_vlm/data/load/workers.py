"""Data workers: the loader that starts them, what ended one that died, and their end."""

import contextlib
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_vlm.data.load.shared_memory import through_arenas
from megatron_vlm.job.errors import is_for_users, killed_message
from megatron_vlm.job.watchdog import AGAIN
from megatron_vlm.messages import join_lines


def loader_of(rows: Dataset, order: Iterable, num_workers: int, prefetch_factor: int = 2) -> DataLoader:
    """A loader whose workers look up each entry of an order in `rows`."""
    loader = DataLoader(
        rows,
        batch_size=None,
        sampler=order,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0,  # keeps the iterator where `close_loader` finds it
        collate_fn=lambda item: item,
        generator=torch.Generator(),  # the run's own random numbers stay as they are
        multiprocessing_context="fork" if num_workers else None,
    )
    return through_arenas(loader)


class SampleError(RuntimeError):
    """A sample ends the run for a reason that the user can mend."""


def raise_naming_samples(error: Exception, keys: Sequence[Any]) -> NoReturn:
    """Raise what happened to these samples: a SampleError for the user's eyes, or a bug with a note."""
    samples = f"data: sample {', '.join(map(str, keys))}"
    if is_for_users(error):
        raise SampleError(f"{samples}: {error}") from error
    error.add_note(samples)
    raise error


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
    who = f"data: a DataLoader worker{f' (pid {dead.pid})' if dead else ''}"
    if dead and dead.exitcode > 0:  # see `shared_memory._end`
        full = "could not send what it read: /dev/shm is full (`df -h /dev/shm`)"
        return join_lines([f"{who} {full}.", f"{AGAIN.capitalize()}."])
    number = -dead.exitcode if dead else signal.SIGKILL
    return killed_message(who, number)


def raise_on_dead_worker(loader: DataLoader) -> None:
    """Makes a loader of Energon raise where it would wait without end for the answer of a dead worker."""

    def answer(worker: int, answers: Queue, get: Callable[[], Any]) -> Any:
        process = workers_of(loader)[worker]
        if answers._reader not in wait([answers._reader, process.sentinel]):
            raise RuntimeError(worker_death([process]))
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
