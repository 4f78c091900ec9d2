"""Opens files: it reads only regular ones of a bounded size, and it writes through no link.

A pipe or a device could block without end, and a link could lead out of the folder that is written. A file or
a folder that appears whole is written aside under a name of its own, synced, and then renamed.
"""

import contextlib
import errno
import importlib.util
import json
import os
import re
import secrets
import shutil
import stat
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from megatron_vlm.config import ConfigError
from megatron_vlm.messages import readable_size

MOST_TEXT = 1 << 28  # of a file that describes something; the largest tokenizer.json have 40 MB
MOST_BYTES = 1 << 31  # of an image or a video; a clip of an hour has half as many
# How the pages and the pictures begin that commands write.
PAGE_START = b'<!doctype html>\n<meta name="generator" content="megatron_vlm">'
PICTURE_MARK_AT = 37  # a PNG has its signature, IHDR and the length of the first text before it
PICTURE_MARK = b"tEXtSoftware\0megatron_vlm"
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class NotAFile(ValueError):
    """The path leads to something that is not a regular file."""


def check_file(path: str | Path) -> None:
    """Raises NotAFile unless `path` is a regular file or a link to one, OSError if it does not exist."""
    _check_kind(path, os.stat(path))


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, opened for reading. Raises NotAFile as `check_file`, and OSError."""
    check_file(path)  # before opening it: opening a device may start it
    file = open(path, "rb", opener=_open_at_once)
    try:
        _check_kind(path, os.fstat(file.fileno()))
    except NotAFile:
        file.close()
        raise
    return file


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


def read_template(template: str) -> str:
    """Return the text of a Jinja template, which is given as it stands or as the path of its file.

    Raises ValueError if the file has no Jinja, and as `read_text`.
    """
    if "{{" in template or "{%" in template:
        return template
    text = read_text(os.path.expanduser(template))
    if "{{" not in text and "{%" not in text:
        raise ValueError(f"{template} has no {{{{ and no {{%; give a file with a Jinja template.")
    return text


def open_to_write(
    path: str | Path, *, append: bool = False, keep: bool = False, new: bool = False, buffering: int = -1
) -> BinaryIO:
    """A regular file, made if it is missing, opened to be written: emptied, or at its end (`append`), or from
    its beginning over what it holds (`keep`). Raises FileExistsError if it should be `new` and exists,
    NotAFile if the path is a link or anything else that is not a regular file, and OSError.
    """
    flags = (
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if append else 0) | (os.O_EXCL if new else 0)
    )
    try:
        descriptor = _open_at_once(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotAFile(f"{path} is a link, and nothing is written through links; remove it.") from error
        raise
    file = open(descriptor, "ab" if append else "r+b" if keep else "wb", buffering=buffering)
    try:
        _check_kind(path, os.fstat(descriptor))
        if not (append or keep):
            file.truncate(0)
    except BaseException:
        file.close()
        raise
    return file


def copy_file(source: str | Path, target: str | Path) -> None:
    """A new file with what a regular file holds, of any size, on disk. Raises as `open_file`."""
    with open_file(source) as original, open_to_write(target, new=True) as file:
        shutil.copyfileobj(original, file)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: str | Path, content: str | bytes | Iterable[bytes]) -> None:
    """Writes a file that holds all of the old or all of the new content, whenever this process is killed.

    A link at `path` is replaced, not followed. Raises OSError that names the path and the remedy.
    """
    path, content = Path(path), content.encode(errors="replace") if isinstance(content, str) else content
    with naming(path):
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
def folder_aside(output: str | Path) -> Iterator[Path]:
    """A new folder beside `output`, under a name of its own, which becomes `output` when the block ends.

    If the block fails, nothing is left; a process that is killed leaves `.NAME.*.partial`. Raises
    FileExistsError if `output` exists when the block begins or ends (an empty folder does not count), and
    OSError that names the path and the remedy.
    """
    output = Path(output)
    made = [folder for folder in output.parents if not folder.exists()]
    with naming(output):
        refuse_existing(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        aside = temporary_name(output)
        aside.mkdir()
        try:
            yield aside
            refuse_existing(output)
            for folder, _, names in os.walk(aside):
                for path in (*(Path(folder, name) for name in names), Path(folder)):
                    sync(path)
            os.rename(aside, output)
            sync(output.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            with contextlib.suppress(OSError):  # they hold the output, or another's
                for folder in made:
                    folder.rmdir()


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder of a cache. `make` fills a new one if it is missing, in one process of a machine."""
    from filelock import FileLock

    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        for leftover in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if not folder.is_dir():
            with folder_aside(folder) as aside:
                make(aside)
    return folder


def check_output(path: str | Path) -> None:
    """Raise ConfigError unless a command may write a page or a picture there.

    It may make a new file, and replace one that this package wrote before.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file to write.")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist; make it, or give another file.")
    if not os.path.lexists(path):
        return
    with open_file(path) as file:
        start = file.read(PICTURE_MARK_AT + len(PICTURE_MARK))
    if not (start.startswith(PAGE_START) or start[PICTURE_MARK_AT:] == PICTURE_MARK):
        raise ConfigError(f"{path} exists, and is no page or picture of megatron-vlm; give a new name.")


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write a page or a picture that a command makes. Raises as `check_output` and `write_whole`."""
    check_output(path)
    write_whole(path, content)


def refuse_existing(output: Path) -> None:
    """Raises FileExistsError unless nothing, or an empty folder, has this name."""
    if os.path.lexists(output) and (output.is_symlink() or not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists; give a new name or remove it.")


def refuse_odd(folder: Path, *, links: bool) -> None:
    """Raises NotAFile for an entry that is neither a file nor a folder and, unless `links`, for a link.

    Names that begin with a dot do not count: file systems and editors have such ones, and nothing reads them.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not links:
                raise NotAFile(
                    f"{entry.path} is a link, and nothing is written through links; move what it "
                    "leads to there, or remove it."
                )
            with contextlib.suppress(OSError):  # a link that leads nowhere
                if not entry.is_dir():
                    _check_kind(entry.path, entry.stat())


@contextlib.contextmanager
def naming(path: Path, remedy: str = "give another path") -> Iterator[None]:
    """Names in an error of the disk: what could not be written and, if that is why, how much is free.
    Libraries in Rust raise errors of their own, with the number in their text."""
    try:
        yield
    except Exception as error:
        told = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else told and int(told[1])
        if number is None:  # our own error, or none of the disk
            raise
        place = re.sub(
            r"(?<![^/])\.([^/]+)\.[0-9a-f]{8}\.partial", r"\1", str(getattr(error, "filename", None) or path)
        )
        if number in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"{readable_size(free_bytes(path))} are free there; make room and start again"
        if number == errno.EFBIG:
            remedy = "the limit of a file's size (`ulimit -f`) is reached; raise it and start again"
        kind = type(error) if isinstance(error, OSError) else OSError
        raise kind(f"{place}: {os.strerror(number)}; {remedy}.") from error


def free_bytes(path: Path) -> int:
    """Bytes that may still be written to the file system of a path; the path need not exist."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def need_room(path: Path, needed: int) -> None:
    """Raises OSError unless so many bytes are free for what is to be written there."""
    if needed > (free := free_bytes(path)):
        raise OSError(
            f"{path} takes {readable_size(needed)}, of which {readable_size(free)} are free; make "
            "room and start again, or give another path."
        )


def sync(path: str | Path) -> None:
    """Returns when a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The JSON objects, each with a `step`, of a file to which a run adds lines. A last line that was cut
    short is left out. Raises ConfigError that names any other bad line."""
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not (isinstance(row, dict) and type(row.get("step")) is int):  # True is no step
                raise ConfigError(
                    f"{path}: line {number} is not what a run wrote; take the line out, or move "
                    "the file away to go on without it."
                )
            yield row


def last_lines(path: str | Path, most_bytes: int = 1 << 22) -> list[str]:
    """The lines at the end of a text, as far as they are in its last `most_bytes`; the first may be cut."""
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes).decode(errors="replace").splitlines()


def keep_rows_before(path: Path, step: int) -> None:
    """Takes the rows of `step` and of later steps out of a file of `read_rows`, if it is there."""
    if path.exists():
        rows = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] < step]
        write_whole(path, "".join(rows))


def object_of(place: str, file: Path, name: str) -> Any:
    """The object that a user's Python file, which is run, calls so; None for nothing. Raises ConfigError."""
    spec = importlib.util.spec_from_file_location(f"users_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    with calling(place, file):
        spec.loader.exec_module(module)
    return getattr(module, name, None)


def optional_package(name: str, needed_by: str) -> ModuleType:
    """A package that an extra of the same name installs. Raises ImportError that says so."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        wanted = f"{needed_by} needs the package {name} ({error})"
        raise ImportError(f"{wanted}; run `pip install 'megatron-vlm[{name}]'`.") from error


@contextlib.contextmanager
def calling(place: str, file: Path) -> Iterator[None]:
    """Raises ConfigError, with the line of the file, for whatever its code raises; our own errors stay."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if type(error).__module__.startswith("megatron_vlm."):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" in line {frame.lineno}" for frame in frames if Path(frame.filename) == file.absolute()]
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{place}: {said}{lines[-1] if lines else ''}; correct the file.") from error


def _open_at_once(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens without waiting, also if the file was replaced by a pipe after `check_file`."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that nothing has: what carries it was left by a killed process, and may go."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.partial")


def _check_kind(path: str | Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise NotAFile(f"{path} is {kind}, not a file; give a file in its place.")
