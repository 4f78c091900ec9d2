"""Data workers: the loader that starts them, the memory through which they send tensors, and their end.

PyTorch sends each tensor in a new piece of shared memory, which the kernel hands out page by page: for the
pixels of a few images this takes longer than to write them several times (1.1 ms more CPU time for each MB).
Here a worker has its own places. It fills a place again when the main process has let go of the tensor in it.
If no place is free, it sends the tensor as PyTorch does; small tensors it sends by value.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import mmap
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader

from megatron_vlm.data.accounts.drops import REMEDY, LostSample
from megatron_vlm.job import watchdog
from megatron_vlm.job.errors import is_for_users, killed_message
from megatron_vlm.job.watchdog import AGAIN
from megatron_vlm.messages import join_lines

PLACES = 16  # of a worker; a place that was never needed takes no memory
PLACE = 1 << 27  # bytes of a place; a larger tensor does not fit
SMALL = 1 << 14  # bytes; tensors up to this are sent by value
MAP_NORESERVE = 0x4000  # Linux's value; Python 3.12 has no name for it
_numbers = itertools.count()
_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


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
    if dead and dead.exitcode > 0:  # see `_end`
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


# -- memory


class Arena:
    """The places of one worker, mapped before it is forked."""

    def __init__(self) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = np.frombuffer(mmap.mmap(-1, PLACES * PLACE, flags=flags), np.uint8)
        self.taken = np.frombuffer(mmap.mmap(-1, PLACES), np.uint8)  # 1 for a place in use
        self._written = np.frombuffer(mmap.mmap(-1, 8 * PLACES), np.int64)  # how often; the worker counts
        self._overwritten = False
        self._choosing = threading.Lock()
        self._number = next(_numbers)
        _arenas[self._number] = self

    def reduce(self, tensor: Tensor) -> tuple[Callable, tuple]:
        """How the worker sends a tensor, for its pickler."""
        if tensor.device.type != "cpu" or tensor.requires_grad or not tensor.is_contiguous():
            return reduce_tensor(tensor)
        size = tensor.nbytes
        shape = tuple(tensor.shape)
        data = tensor.view(-1).view(torch.uint8).numpy()
        if size <= SMALL:
            return _shaped, (data, tensor.dtype, shape)
        with self._choosing:  # a worker's batches and its answers to commands are sent by two threads
            free = np.flatnonzero(self.taken == 0)
            if size > PLACE or len(free) == 0:
                return reduce_tensor(tensor)
            place = int(free[0])
            self.taken[place] = 1
            self._written[place] += 1
            number = int(self._written[place])
        self._bytes(place, size)[:] = data
        return _from_place, (self._number, place, number, size, tensor.dtype, shape)

    def tensor(
        self, place: int, number: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Tensor:
        """In the main process: the tensor at a place, which is free again once nothing refers to the tensor.

        `number` is the place's count of writes at that time. Raises LostSample if the place was written again
        since, or if an earlier tensor was written over while in use.
        """
        if self._overwritten or self._written[place] != number:
            raise LostSample(f"data: the memory of a batch was written over while in use. {REMEDY}")
        data = self._bytes(place, size)
        weakref.finalize(data, self._let_go, place, number, os.getpid()).atexit = False
        return _shaped(data, dtype, shape)

    def _let_go(self, place: int, number: int, process: int) -> None:
        """Frees a place. A process forked meanwhile only lets go of its own copy: this one may still read."""
        if os.getpid() == process:
            self._overwritten |= bool(self._written[place] != number)  # errors end here: `tensor` raises one
            self.taken[place] = 0

    def _bytes(self, place: int, size: int) -> np.ndarray:
        return self._memory[place * PLACE :][:size]


def through_arenas(loader: DataLoader) -> DataLoader:
    """The loader, whose workers now end with the thread that begins to read.

    They send tensors through arenas, unless the system refuses so much memory.
    """
    if loader.num_workers:
        arenas: list[Arena] = []
        with contextlib.suppress(OSError):
            arenas = [Arena() for _ in range(loader.num_workers)]
        loader.worker_init_fn = partial(_begin, arenas, loader.worker_init_fn)
    return loader


def _begin(arenas: list[Arena], then: Callable[[int], None] | None, worker: int) -> None:
    # the parent's garbage stays: a process group would end the worker, or wait for threads that are not here
    gc.freeze()
    watchdog.end_with_parent(os.getppid())  # a worker looks for it every 5 s, and not while it is stopped
    watch = watchdog.watch()
    faulthandler.enable(watch.file if watch else 2)  # the descriptor of stderr
    Queue._on_queue_feeder_error = staticmethod(_end)
    if arenas:
        ForkingPickler.register(Tensor, arenas[worker].reduce)
    if then is not None:
        then(worker)


def _end(error: Exception, item: Any) -> None:
    """End a worker that cannot send a result (no shared memory is left). Python would leave the result out,
    and the main process would wait for it without end."""
    traceback.print_exception(error)
    os._exit(1)


def _from_place(arena: int, *place: Any) -> Tensor:
    return _arenas[arena].tensor(*place)


def _shaped(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)
