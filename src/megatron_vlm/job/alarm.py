"""An error that only one rank has, in the middle of what all do together, ends the other ranks in seconds.

These wait in a collective, where no error can reach them, and gloo cannot abort a wait. So the rank that
fails says why in the store that all ranks share. A thread of every other looks there, and ends its process.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_vlm.job.failures import end_after
from megatron_vlm.job.ranks import AnotherRankFailed
from megatron_vlm.job.reasons import is_anothers_end, without_traceback
from megatron_vlm.messages import printable

LOOKS_EVERY = 0.5  # seconds
PATIENCE = 3.0  # seconds for a wait to end by itself, as it may when the other process ends
LONGEST = 500  # characters of what a rank raised
_KEY = "megatron_vlm: a rank has failed"


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """Ends the processes of all ranks when one of them raises inside, as soon as they are inside, too.

    Their last words quote it. Afterwards the ranks have lost each other, so to enter again raises
    AnotherRankFailed. In a single process, this does nothing.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    store, left = own_connection(distributed_c10d._get_default_store()), threading.Event()
    if store.check([_KEY]):
        raise AnotherRankFailed(f"{_said(store)}; start again, as the ranks have lost each other.")
    threading.Thread(target=_listen, args=(store, left), name="alarm", daemon=True).start()
    try:
        yield
    except Exception as error:
        if is_anothers_end(error) and not store.check([_KEY]):
            raise  # it does not know why; who does may still say so
        text = printable(f"{type(error).__name__}: {without_traceback(str(error))}"[:LONGEST])
        reason = f"rank {dist.get_rank()} has failed: {text}"
        if (first := store.compare_set(_KEY, "", reason).decode()) != reason:
            raise AnotherRankFailed(first) from error
        raise
    finally:
        left.set()


def _listen(store: dist.Store, left: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the store has ended, and with it its process
        while not left.wait(LOOKS_EVERY):
            if store.check([_KEY]) and not left.wait(PATIENCE):
                end_after(_said(store))


@functools.lru_cache(maxsize=1)
def own_connection(store: dist.Store) -> dist.Store:
    """A connection of its own, as one that waits for a key blocks all others who use it. `setup.shutdown`
    forgets it."""
    return store.clone()


def _said(store: dist.Store) -> str:
    return store.get(_KEY).decode()
