"""Tensors out of data workers through memory that is used again."""

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_vlm.data.accounts.drops import DropReport, LostSample
from megatron_vlm.data.load.base import next_or_too_many_drops
from megatron_vlm.data.load.workers import PLACES, SMALL, Arena, close_loader, through_arenas

COUNT = 5 * PLACES


def numbered(number):
    """Large and small, of several types and shapes; each element says whose it is."""
    large = torch.full((3, SMALL), number, dtype=torch.uint8)
    return {
        "large": large,
        "transposed": large.t(),
        "floats": torch.full((SMALL,), number / 3).bfloat16(),
        "small": torch.tensor([[number]]),
        "empty": torch.zeros(0, 3, dtype=torch.int32),
        "part": torch.arange(4 * SMALL)[number:],
        "text": str(number),
    }


class Numbered(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        return numbered(number)


@pytest.fixture
def loader():
    return through_arenas(
        DataLoader(Numbered(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    )


def arenas(loader):
    return loader.worker_init_fn.args[0]


def equal(sample, number):
    expected = numbered(number)
    assert sample.keys() == expected.keys() and sample["text"] == expected["text"]
    for name, tensor in expected.items():
        if name != "text":
            assert sample[name].dtype == tensor.dtype and sample[name].equal(tensor), name
    return True


def test_what_is_still_used_is_never_written_over(loader):
    """More than there are places for; a view is enough to keep one."""
    samples = list(loader)
    views = [(number, sample["large"][1, 5:]) for number, sample in enumerate(samples)]
    assert all(equal(sample, number) for number, sample in enumerate(samples))
    assert all(arena.taken.sum() == PLACES for arena in arenas(loader))
    del samples
    assert all(view.equal(torch.full_like(view, number)) for number, view in views)
    del views
    gc.collect()
    assert all(arena.taken.sum() == 0 for arena in arenas(loader))


def test_places_are_used_again(loader):
    most = 0
    for number, sample in enumerate(loader):
        assert equal(sample, number)
        del sample
        most = max([most, *(arena.taken.sum() for arena in arenas(loader))])
    assert 0 < most < PLACES
    (arena, _) = arenas(loader)
    used = torch.from_numpy(arena._memory.reshape(PLACES, -1)[:, 0].copy())
    assert arena.taken.sum() == 0 and (used > 0).sum() < PLACES


def test_a_forked_process_lets_go_of_nothing(loader):
    """As a worker of another loader does, which was forked while a batch was trained on."""
    sample = next(iter(loader))
    taken = [arena.taken.sum() for arena in arenas(loader)]
    if not (child := os.fork()):
        del sample
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert any(taken)
    assert all(arena.taken.sum() >= before for arena, before in zip(arenas(loader), taken, strict=True))
    assert equal(sample, 0)


@pytest.mark.parametrize("received_before", [True, False])
def test_memory_written_over_while_in_use_is_an_error(received_before):
    """At the next tensor, or at the one itself when it is not received yet."""
    arena, large = Arena(), numbered(1)["large"]
    receive, message = arena.reduce(large)
    used = receive(*message) if received_before else None
    arena.taken[:] = 0  # what no code does
    arena.reduce(large)
    if received_before:
        assert used is not None
        del used
        receive, message = arena.reduce(large)
    with pytest.raises(LostSample, match="written over while in use"):
        receive(*message)


class Aborts:
    """A cycle, which ends every process but its own when it is collected."""

    def __init__(self) -> None:
        self.me, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os.abort()


@contextlib.contextmanager
def garbage_that_aborts() -> Iterator[None]:
    """Within the block, this process does not collect it, as it is frozen, or too new."""
    gc.disable()
    frozen = weakref.ref(Aborts())
    gc.freeze()
    new = weakref.ref(Aborts())
    try:
        yield
    finally:
        for left in filter(None, (frozen(), new())):
            left.me = None  # which ends it, here
        gc.enable()


class Tidy(Numbered):
    def __getitem__(self, number):
        gc.collect()
        return super().__getitem__(number)


def test_a_worker_leaves_the_garbage_of_its_parent_alone():
    """Much of it was made to be ended once, by the process that made it."""
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = through_arenas(DataLoader(Tidy(), batch_size=None, **workers))
    with garbage_that_aborts():
        assert all(equal(sample, number) for number, sample in enumerate(loader))


class Crashing(Numbered):
    def __getitem__(self, number):
        return os.abort() if number == 5 else super().__getitem__(number)


def test_a_worker_that_crashes_prints_its_stacks(capfd):
    """Also where no run has a file for them."""
    workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = through_arenas(DataLoader(Crashing(), batch_size=None, **workers))
    batches = iter(loader)
    with pytest.raises(RuntimeError, match=r"signal 6 \(SIGABRT\): .* stacks are in errors/"):
        while True:
            next_or_too_many_drops(batches, DropReport(), loader)
    close_loader(loader)
    assert "__getitem__" in capfd.readouterr().err.partition("Fatal Python error: Aborted")[2]


def test_workers_end_with_their_parent_also_stopped_ones(loader):
    """Who kills a process that was stopped finds nothing left of it."""
    ours, theirs = multiprocessing.Pipe()

    def read():
        iterator = iter(loader)
        next(iterator), next(iterator)  # one of each worker, so both have begun
        theirs.send([worker.pid for worker in iterator._workers])
        time.sleep(60)

    parent = multiprocessing.get_context("fork").Process(target=read)
    parent.start()
    workers = [psutil.Process(pid) for pid in ours.recv()]
    workers[1].suspend()
    parent.kill()
    alive = psutil.wait_procs(workers, timeout=3)[1]
    for worker in alive:
        worker.kill()
    assert not alive


def test_two_threads_of_a_worker_never_write_to_one_place():
    """Its batches and its answers to commands are sent by a thread each."""
    sent, switch = {}, sys.getswitchinterval()

    def send(arena: Arena, number: int) -> None:
        for count in range(PLACES // 2):
            rebuild, arguments = arena.reduce(torch.full((2 * SMALL,), number, dtype=torch.uint8))
            sent[number, count] = rebuild(*arguments)

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            arena = Arena()
            threads = [threading.Thread(target=send, args=(arena, number)) for number in (1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(sent) == arena.taken.sum() == PLACES
            assert all((tensor == number).all() for (number, _), tensor in sent.items())
    finally:
        sys.setswitchinterval(switch)
