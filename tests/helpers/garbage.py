"""What a process must not collect that was forked while it waited for collection."""

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator


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
