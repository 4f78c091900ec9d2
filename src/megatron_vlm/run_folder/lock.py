"""Allows one run at a time in a run folder: each process of it holds `<run_dir>/lock` while it is alive.

It is a POSIX record lock, which rank 0 takes alone and then shares with the other ranks. The kernel frees it
when a process ends, however it ends, and processes forked from it (DataLoader workers) do not hold it. Other
hosts see it if the file system shares locks (NFS, GPFS, Lustre mounted with `flock`), and not if that is
mounted with `nolock` or `localflock`.
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
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_FLOCK = "hhqqi4x"  # Linux's struct flock: type, whence, start, length, process


def take(run_dir: str | Path, patience: float = 5.0, whose: str = OF_A_RUN) -> BinaryIO:
    """Take the lock for rank 0, until it is closed or this process ends; the other ranks then `join`.

    Do not open the lock elsewhere in this process: closing any descriptor of the file frees it.

    Args:
        run_dir: An existing folder.
        patience: Seconds; the kernel needs time to end a killed process.
        whose: The setting and whose folder it is, for the error.

    Raises:
        ConfigError: Another run is still alive; its text names a process of it.
    """
    file = open_to_write(Path(run_dir) / FILE, "r+b")
    _lock(file, fcntl.LOCK_EX, run_dir, patience, whose)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.truncate(0)
    text = f"rank 0 is process {os.getpid()} on {socket.gethostname()} since {since}"
    os.pwrite(file.fileno(), text.encode(), 0)
    _lock(file, fcntl.LOCK_SH, run_dir)
    return file


def join(run_dir: str | Path) -> BinaryIO:
    """Share the lock that rank 0 has taken. A run is alive as long as any of its ranks."""
    file = open_to_write(Path(run_dir) / FILE, "r+b")
    _lock(file, fcntl.LOCK_SH, run_dir)
    return file


def is_there(run_dir: str | Path) -> bool:
    """Return whether a run has made this folder's lock, even if it failed before it wrote anything else."""
    file = Path(run_dir) / FILE
    if not file.is_file():
        return False
    with open_file(file) as content:
        return content.read(5) in (b"", b"rank ")


def check_free(run_dir: str | Path) -> None:
    """Raise ConfigError as `take` does, but take no lock."""
    if (Path(run_dir) / FILE).exists():
        with open_to_write(Path(run_dir) / FILE, "r+b") as file:
            _lock(file, fcntl.LOCK_EX, run_dir, patience=1.0)


def is_held(run_dir: str | Path) -> bool:
    """Return whether a process of a run holds the lock; take none, write nothing, and need no right to.

    Not for a process that holds it itself: closing the file would free it.
    """
    if not (Path(run_dir) / FILE).exists():
        return False
    with open_file(Path(run_dir) / FILE) as file:
        return _holder(file) is not None


def _lock(
    file: BinaryIO, kind: int, run_dir: str | Path, patience: float = 0.0, whose: str = OF_A_RUN
) -> None:
    """Lock a file, or change the kind of its lock, within `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return fcntl.lockf(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                if kind == fcntl.LOCK_EX:
                    fact = f"run_dir: no locks on this file system ({error.strerror})"
                    print(f"{fact}; a second run in this folder would not be noticed.", file=sys.stderr)
                return None
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # which say that another has it
                raise
        if time.monotonic() >= deadline:
            setting, owner = whose.split(": ")
            text = os.pread(file.fileno(), 1000, 0).decode(errors="replace").strip("\0 \n")
            raise ConfigError(
                f"{setting}: {run_dir} belongs to {owner} that lives: process {_holder(file)} holds its lock "
                f"({text}). Wait until it ends, end it with `kill` on its host, or give another {setting}."
            )
        time.sleep(0.05)


def _holder(file: BinaryIO) -> int | None:
    """The id of a process that holds the lock, on its own host; None if none does, or none can be asked."""
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, question))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return None if kind == fcntl.F_UNLCK else process
