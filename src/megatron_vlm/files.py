"""Opens files: it reads only regular ones of a bounded size, and it writes through no link.

A pipe or a device could block without end, and a link could lead out of the folder that is written. A file or
a folder that appears whole is written under a temporary name beside it, synced, and then renamed.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_vlm.config import ConfigError
from megatron_vlm.messages import readable_size

MOST_TEXT = 1 << 28  # of a file that describes something; the largest tokenizer.json have 40 MB
MOST_BYTES = 1 << 31  # of an image or a video; a clip of an hour has half as many
PAGE_START = b'<!doctype html>\n<meta name="generator" content="megatron_vlm">'
# how the pages and the PNGs begin that commands write; a PNG has IHDR and a length before its first text
OURS = re.compile(PAGE_START + b"|(?s:.{37})tEXtSoftware\0megatron_vlm")


class NotAFile(ValueError):
    """The path leads to something that is not a regular file."""


def check_file(path: str | Path) -> None:
    """Raises NotAFile unless `path` is a regular file or a link to one, OSError if it does not exist."""
    _check_kind(path, os.stat(path))


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, opened for reading. Raises NotAFile as `check_file`, and OSError."""
    check_file(path)  # before opening it: opening a device may start it
    return open(path, "rb", opener=_open_at_once)


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file.

    Raises NotAFile as `check_file`, OSError, and ValueError for a file of more than `most_bytes`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"{path} has {size} bytes, more than {most_bytes}")
        return file.read(most_bytes)


def read_text(path: str | Path, most_bytes: int = MOST_TEXT) -> str:
    """The text of a regular file in UTF-8, with or without a byte order mark. Raises as `read_file`."""
    try:
        return read_file(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text, but a binary file; give a text in UTF-8.") from error


def open_to_write(path: str | Path, mode: str = "wb", buffering: int = -1) -> BinaryIO:
    """A regular file, made if it is missing, opened to be written: emptied ("wb"), at its end ("ab"), or from
    its beginning over what it holds ("r+b"). Raises FileExistsError for "xb" if it exists, NotAFile if the
    path is a link or anything else that is not a regular file, and OSError."""
    if os.path.lexists(path):
        _check_kind(path, os.lstat(path))
    flags = os.O_CREAT | os.O_NOFOLLOW
    return open(path, mode, buffering, opener=lambda name, of_mode: _open_at_once(name, of_mode | flags))


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a regular file of any size to a new name in an `atomic_directory`. Raises as `open_file`."""
    with open_file(source) as original, open_to_write(target, "xb") as file:
        shutil.copyfileobj(original, file)


def atomic_write(path: str | Path, content: str | bytes | Iterable[bytes]) -> None:
    """Write a file that holds all of the old or all of the new content, whenever this process is killed.

    A link at `path` is replaced, not followed. Raises OSError that names the path and the remedy.
    """
    path, content = Path(path), content.encode(errors="replace") if isinstance(content, str) else content
    with add_path_to_errors(path):
        aside = temporary_name(path)
        try:
            with open(aside, "xb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync(path.parent)


@contextlib.contextmanager
def atomic_directory(output: str | Path, remedy: str = "give another path") -> Iterator[Path]:
    """Yield a new folder beside `output`, under a temporary name, which becomes `output` when the block ends.

    If the block fails, the folder is removed; a process that is killed leaves `.NAME.*.partial`. Raises
    FileExistsError if `output` exists when the block begins or ends (an empty folder does not count), and
    OSError that names the path and the remedy.
    """
    output = Path(output)
    with add_path_to_errors(output, remedy):
        refuse_existing(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        aside = temporary_name(output)
        aside.mkdir()
        try:
            yield aside
            refuse_existing(output)
            for folder, _, names in os.walk(aside):
                for path in (*(Path(folder, name) for name in names), Path(folder)):
                    if not path.is_symlink():  # what it leads to may lie where nothing can be written
                        sync(path)
            os.rename(aside, output)
            sync(output.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def check_output(path: str | Path) -> None:
    """Raise ConfigError unless a command may write a page or a picture there: as a new file, or over one that
    this package wrote before."""
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file to write.")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist; make it, or give another file.")
    if os.path.lexists(path):
        with open_file(path) as file:
            if not OURS.match(file.read(100)):
                raise ConfigError(
                    f"{path} exists, and is no page or picture of megatron-vlm; give a new name."
                )


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write a page or a picture that a command makes. Raises as `check_output` and `atomic_write`."""
    check_output(path)
    atomic_write(path, content)


def refuse_existing(output: Path) -> None:
    """Raise FileExistsError unless nothing, or an empty folder, has this name."""
    if os.path.lexists(output) and (output.is_symlink() or not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists; give a new name or remove it.")


def refuse_odd(folder: Path, *, links: bool) -> None:
    """Raise NotAFile for an entry that is neither a file nor a folder and, unless `links`, for a link.

    Names that begin with a dot do not count: file systems and editors have such ones, and nothing reads them.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # a link that leads nowhere
                if not entry.name.startswith(".") and not entry.is_dir(follow_symlinks=links):
                    _check_kind(entry.path, entry.stat(follow_symlinks=links))


@contextlib.contextmanager
def add_path_to_errors(path: Path, remedy: str = "give another path") -> Iterator[None]:
    """Name in an error of the disk what could not be written and, if that is why, how much is free.
    Libraries in Rust raise errors of their own, with the number in their text."""
    try:
        yield
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else match and int(match[1])
        if str(error) == "database or disk is full":  # SQLite
            number = errno.ENOSPC
        if number is None:  # our own error, or none of the disk
            raise
        # the temporary name says nothing to a user
        place = str(getattr(error, "filename", None) or path)
        place = re.sub(r"(?<![^/])\.([^/]+)\.[0-9a-f]{8}\.partial", r"\1", place)
        if number in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"{readable_size(free_bytes(path))} are free there; make room and start again"
        kind = type(error) if isinstance(error, OSError) else OSError
        raise kind(f"{place}: {os.strerror(number)}; {remedy}.") from error


def free_bytes(path: Path) -> int:
    """Return the bytes that may still be written to the file system of a path; the path need not exist."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def need_room(path: Path, needed: int) -> None:
    """Raise OSError unless so many bytes are free for what is to be written there."""
    if needed > (free := free_bytes(path)):
        raise OSError(
            f"{path} takes {readable_size(needed)}, of which {readable_size(free)} are free; make "
            "room and start again, or give another path."
        )


def sync(path: str | Path) -> None:
    """Return when a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_at_once(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens without waiting, also if the file was replaced by a pipe after `check_file`."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that nothing has: what carries it was left by a killed process, and may go."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.partial")


def _check_kind(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "a folder, a pipe or a device"
        raise NotAFile(f"{path} is {kind}, not a file; give a file in its place.")
