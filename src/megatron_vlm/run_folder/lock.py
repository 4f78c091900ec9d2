"""Allows one run at a time in a run folder: each process of it holds a part of `<run_dir>/lock` while alive.

The parts are POSIX record locks. The kernel frees them when the process ends, however it ends, and processes
forked from it (DataLoader workers) do not hold them. Other hosts see them if the file system shares locks
(NFS, GPFS, Lustre mounted with `flock`); mounted with `nolock` or `localflock`, it hides other hosts.
"""

import errno
import fcntl
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import BinaryIO

from megatron_vlm.config import ConfigError
from megatron_vlm.files import open_file, open_to_write

FILE = "lock"
OF_A_RUN = "run_dir: a run"  # a setting, and whose folder it names
OF_AN_EVALUATION = "--output: an evaluation"
RECORD = 128  # bytes of a rank's part, which says who it is
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_TO_THE_END = 0
_FLOCK = "hhqqi4x"  # Linux's struct flock: type, whence, start, length, process


def take(run_dir: str | Path, patience: float = 5.0, whose: str = OF_A_RUN) -> BinaryIO:
    """The lock of rank 0, held until it is closed or this process ends; the other ranks then `join`. `whose`
    folder it is stands in the error.

    Raises ConfigError that names the processes of another run if that is still alive after `patience` seconds
    (the kernel needs time to end a killed process). The run folder must exist. Do not open the lock elsewhere
    in this process: closing any descriptor of the file frees it.
    """
    file = open_to_write(Path(run_dir) / FILE, "r+b")
    _lock_all(file, run_dir, patience, whose)
    file.truncate(0)
    _sign(file, 0)
    fcntl.lockf(file, fcntl.LOCK_UN, _TO_THE_END, RECORD)  # the parts of the other ranks
    return file


def join(run_dir: str | Path, rank: int) -> BinaryIO:
    """The lock of a rank other than 0, taken after rank 0's. A run is alive as long as any of its ranks."""
    file = open_to_write(Path(run_dir) / FILE, "r+b")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, RECORD, rank * RECORD)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # rank 0 has reported those
            raise
    _sign(file, rank)
    return file


def is_there(run_dir: str | Path) -> bool:
    """Whether a run, also one that failed before it wrote anything else, has made the lock of this folder."""
    file = Path(run_dir) / FILE
    if not file.is_file():
        return False
    with open_file(file) as content:
        return content.read(5) in (b"", b"rank ")


def check_free(run_dir: str | Path) -> None:
    """Raises ConfigError as `take` does, but takes no lock."""
    if (Path(run_dir) / FILE).exists():
        with open_to_write(Path(run_dir) / FILE, "r+b") as file:
            _lock_all(file, run_dir, patience=1.0)


def is_held(run_dir: str | Path) -> bool:
    """Whether a process of a run holds a part of the lock; takes none, writes nothing, and needs no right to.

    Not for a process that holds a part itself: closing the file would free it.
    """
    if not (Path(run_dir) / FILE).exists():
        return False
    with open_file(Path(run_dir) / FILE) as file:
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, _TO_THE_END, 0)
        try:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
    return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK


def _lock_all(file: BinaryIO, run_dir: str | Path, patience: float, whose: str = OF_A_RUN) -> None:
    setting, owner = whose.split(": ")
    deadline = time.monotonic() + patience
    while not _try(file, _TO_THE_END, 0):
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"{setting}: {run_dir} belongs to {owner} that lives: {_holders(file)}. "
                f"Wait until it ends, end it with `kill` on its host, or give another {setting}."
            )
        time.sleep(0.05)


def _try(file: BinaryIO, length: int, start: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        print(
            f"run_dir: no locks on this file system ({error.strerror}); a second run in this folder would "
            "not be noticed.",
            file=sys.stderr,
        )
    return True


def _holders(file: BinaryIO) -> str:
    records = os.pread(file.fileno(), 1 << 20, 0)
    alive = [
        records[start : start + RECORD].decode(errors="replace").strip("\0 \n")
        for start in range(0, len(records), RECORD)
        if not _try(file, RECORD, start)
    ]
    more = f" and {len(alive) - 2} more" if len(alive) > 2 else ""
    return "; ".join(filter(None, alive[:2])) + more or "its processes have not said who they are yet"


def _sign(file: BinaryIO, rank: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"rank {rank} is process {os.getpid()} on {socket.gethostname()[:60]} since {since}"
    os.pwrite(file.fileno(), f"{text:<{RECORD - 1}}\n".encode(), rank * RECORD)
