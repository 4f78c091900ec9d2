"""An error that only one rank has, in the middle of what all do together, ends it on every rank in seconds.

The others wait in a collective, where no error can reach them. So the rank that fails says why in the store
that all ranks share. A thread of every other rank looks there, and aborts the process groups in which its
rank waits. Then the wait raises. If it does not, the process ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_vlm.job.failures import end_after, without_traceback
from megatron_vlm.job.ranks import AnotherRankFailed
from megatron_vlm.messages import printable

LOOKS_EVERY, PATIENCE = 0.5, 5.0  # seconds; for an aborted wait to raise
LONGEST = 500  # characters of what a rank raised
_KEY = "megatron_vlm: a rank has failed"


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """What one rank raises inside is raised there, and on the others as AnotherRankFailed, which quotes it.

    Process groups cannot be used afterwards, so this also raises AnotherRankFailed when it is entered again.
    In a single process, it does nothing.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    store, left = distributed_c10d._get_default_store().clone(), threading.Event()
    if store.check([_KEY]):
        raise AnotherRankFailed(f"{_said(store)}; start again, as the ranks have lost each other.")
    threading.Thread(target=_listen, args=(store, left), name="alarm", daemon=True).start()
    try:
        yield
    except Exception as error:
        text = printable(f"{type(error).__name__}: {without_traceback(str(error))}"[:LONGEST])
        own = f"rank {dist.get_rank()} has failed: {text}"
        first = store.compare_set(_KEY, "", own).decode()
        _abort_groups()
        if first != own:
            raise AnotherRankFailed(first) from error
        raise
    finally:
        left.set()


def _listen(store: dist.Store, left: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the store has ended, and with it its process
        while not left.wait(LOOKS_EVERY):
            if store.check([_KEY]):
                said = _said(store)
                _abort_groups()
                if not left.wait(PATIENCE):
                    end_after(said)


def _said(store: dist.Store) -> str:
    return store.get(_KEY).decode()


def _abort_groups() -> None:
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # this group is aborted already
            group.abort()
