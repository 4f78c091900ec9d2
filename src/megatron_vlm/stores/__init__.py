"""Object stores: `s3://bucket/path` and `msc://profile/path`, by multi-storage-client, as Energon reads them.

What its libraries say may hold keys, so messages name only the path and the kind of an error.
"""

import errno
import logging
import posixpath
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_vlm.messages import printable

PATIENCE = 60.0  # seconds for which `patiently` asks a store that does not answer
KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the file of MSC_CONFIG"
_ADDRESS = re.compile(r"((?:s3|msc)://[^/]+)/*(.*)", re.DOTALL)
LONGEST_KEY = 1024  # bytes of a file's path in a bucket, as S3 allows; longer ones are asked for in vain
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # of ours, where a file is fetched


class StoreError(OSError):
    """A store does not give or take something; the message says what, and what to do."""


class NotThere(StoreError):
    """The store has no such file or bucket."""


class NoAnswer(StoreError):
    """The store cannot be reached, or fails; it may answer later."""


def is_store(path: object) -> bool:
    """Whether a path is an address, or is meant as one (`S3://x`, `s3:/x`) and is refused by `at`."""
    return isinstance(path, str) and re.match(r"(?i)(s3|msc):/", path) is not None


def folder(path: str | Path) -> str | Path:
    """A folder on disk as a Path, one in a store as its address."""
    return re.sub("(?<=[^/:])/+$", "", path) if is_store(path) else Path(path).expanduser()


def parent(path: str | Path) -> str | Path:
    """The folder of a file, as `folder` gives it."""
    return folder(path.rpartition("/")[0]) if is_store(path) else Path(path).parent


def inside(url: str, name: str) -> str:
    """The address of what a name, relative or whole, means in a folder. Raises ValueError if it leads out, is
    no UTF-8, or cannot be a file's."""
    path = posixpath.normpath(name.removeprefix(f"{url}/"))
    if len(path.encode()) > LONGEST_KEY or "\0" in path:
        raise ValueError(f"{printable(name)} is no name of a file")
    if path == ".." or path.startswith(("/", "../")):
        raise ValueError(f"{printable(name)} leads out of {printable(url)}")
    return f"{url}/{path}"


def for_energon(path: str) -> str:
    """The path as Energon takes it: a bucket of `s3://` is a profile that needs no MSC_CONFIG."""
    return path.replace("s3://", "msc://_s3-", 1) if is_store(path) else path


@contextmanager
def at(url: str) -> Iterator[tuple[Any, str]]:
    """multi-storage-client's client, and its name for a path. What it raises inside becomes a StoreError."""
    shown = printable(url)
    if (parts := _ADDRESS.fullmatch(url)) is None or ".." in url.split("/"):
        raise StoreError(f"{shown} is no address; give s3://BUCKET/PATH or msc://PROFILE/PATH.")
    home, path = parts.groups()
    logging.getLogger("multistorageclient").setLevel(logging.CRITICAL)  # what it logs is in its errors
    try:
        from multistorageclient import resolve_storage_client

        client, _ = resolve_storage_client(home)
    except ImportError as error:
        wanted = f"{shown} needs the package {error.name}; run `pip install 'megatron-vlm[stores]'`."
        raise StoreError(wanted) from error
    except Exception as error:  # noqa: BLE001  libraries raise what they like, and their words may hold keys
        fact = f"AWS_ENDPOINT_URL or MSC_CONFIG cannot be used ({type(error).__name__})"
        raise StoreError(f"{shown}: {fact}; correct the address or the profile.") from None
    try:
        yield client, path
    except (StoreError, ValueError, tarfile.TarError):
        raise
    except Exception as error:  # noqa: BLE001  libraries raise what they like, and their words may hold keys
        if isinstance(error, OSError) and error.errno in OF_THE_DISK:
            raise
        raise _in_short(shown, error) from None


def _in_short(shown: str, error: Exception) -> StoreError:
    cause = error.__cause__ or error
    said = getattr(cause, "response", None)
    kind = said["Error"].get("Code") if isinstance(said, dict) else type(cause).__name__
    if isinstance(error, FileNotFoundError) or kind == "NoSuchBucket":
        return NotThere(f"{shown} is not in the store; correct the bucket or the path.")
    if isinstance(error, PermissionError) or kind in ("AccessDenied", "NoCredentialsError"):
        return StoreError(f"{shown}: the store refuses the keys ({kind}); see {KEYS}.")
    return NoAnswer(f"{shown}: the store does not answer ({kind}); see AWS_ENDPOINT_URL or MSC_CONFIG.")


def patiently(do: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The result of `do`, which is done again, for some time, while a store does not answer."""
    end = time.monotonic() + seconds
    while True:
        try:
            return do()
        except NoAnswer:
            if time.monotonic() > end:
                raise
        time.sleep(1)


def read(url: str, most_bytes: int) -> bytes:
    """The bytes of a file. Raises StoreError, and ValueError for more than `most_bytes`."""
    with at(url) as (client, path):
        if (size := client.info(path).content_length) > most_bytes:
            raise ValueError(f"{printable(url)} has {size} bytes, more than {most_bytes}")
        return client.read(path)


def is_file(url: str) -> bool:
    with at(url) as (client, path):
        return client.is_file(path)


def write(url: str, content: bytes) -> None:
    with at(url) as (client, path):
        client.write(path, content)


def names(url: str) -> dict[str, int]:
    """The files in a folder and in those within it, each by its name from there, with their bytes."""
    with at(url) as (client, path):
        start = f"{path}/" if path else ""
        sizes = {each.key.lstrip("/"): each.content_length for each in client.list_recursive(start)}
        return {key.removeprefix(start): size for key, size in sizes.items() if key.startswith(start)}


def remove(url: str, gone: list[str]) -> None:
    with at(url) as (client, path):
        for name in gone:
            client.delete(f"{path}/{name}")


def upload(
    folder: Path, url: str, last_file: str, check: Callable[[], None] = lambda: None, sums: bytes = b""
) -> None:
    """Copy the files of a folder in place of what is there.

    The file that makes the folder complete is removed first. It is written last, when the sizes of all others
    are right.

    Args:
        folder: The folder on disk.
        url: The address of the folder.
        last_file: The name of the file that makes it complete.
        check: Called before each change, which an error of it stops.
        sums: Written to `<url>.json` before the last file, if it is not empty.
    """
    check()
    remove(url, sorted(names(url), key=lambda name: name != last_file))
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for name in sorted(sizes, key=lambda name: name == last_file):
        check()
        if name == last_file:
            if names(url) != {name: size for name, size in sizes.items() if name != last_file}:
                raise StoreError(f"{printable(url)} has other files than were copied there.")
            if sums:
                write(f"{url}.json", sums)
        with at(f"{url}/{name}") as (client, path):
            client.upload_file(path, str(folder / name))
