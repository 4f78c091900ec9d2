"""Files of object stores, `s3://bucket/path` and `msc://profile/path`: multi-storage-client opens them.

It also asks again when a store does not answer, as often as its profile says. What it says may hold keys, so
messages name only the path and the kind of an error.
"""

import errno
import hashlib
import logging
import posixpath
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megatron_vlm.files import atomic_directory
from megatron_vlm.messages import printable

KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the file of MSC_CONFIG"
_ADDRESS = re.compile(r"((?:s3|msc)://[^/]+)/*(.*)", re.DOTALL)
LONGEST_KEY = 1024  # bytes of a file's path in a bucket, as S3 allows; longer ones are asked for in vain
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # of ours, where a file is fetched


class StoreError(OSError):
    """A store does not give or take something; the message says what, and what to do."""


class NotThere(StoreError):
    """The store has no such file or bucket."""


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
        raise ValueError(f"{name} is no name of a file")
    if path == ".." or path.startswith(("/", "../")):
        raise ValueError(f"{name} leads out of {url}")
    return f"{url}/{path}"


def for_energon(path: str) -> str:
    """The path as Energon takes it: a bucket of `s3://` is a profile that needs no MSC_CONFIG."""
    return path.replace("s3://", "msc://_s3-", 1) if is_store(path) else path


@contextmanager
def at(url: str) -> Iterator[tuple[Any, str]]:
    """multi-storage-client's client, and its name for a path. What it raises inside becomes a StoreError."""
    if (parts := _ADDRESS.fullmatch(url)) is None or ".." in url.split("/"):
        raise StoreError(f"{url} is no address; give s3://BUCKET/PATH or msc://PROFILE/PATH.")
    home, path = parts.groups()
    logging.getLogger("multistorageclient").setLevel(logging.CRITICAL)  # what it logs is in its errors
    try:
        from multistorageclient import resolve_storage_client

        client, _ = resolve_storage_client(home)
    except ImportError as error:
        remedy = "run `pip install 'megatron-vlm[stores]'`"
        raise StoreError(f"{url} needs the package {error.name}; {remedy}.") from error
    except Exception as error:  # noqa: BLE001  libraries raise what they like, and their words may hold keys
        fact = f"AWS_ENDPOINT_URL or MSC_CONFIG cannot be used ({type(error).__name__})"
        raise StoreError(f"{url}: {fact}; correct the address or the profile.") from None
    try:
        yield client, path
    except (StoreError, ValueError, tarfile.TarError):
        raise
    except Exception as error:  # noqa: BLE001  libraries raise what they like, and their words may hold keys
        if isinstance(error, OSError) and (error.filename or error.errno in OF_THE_DISK):
            raise  # of a file here
        raise _without_keys(url, error) from None


def _without_keys(url: str, error: Exception) -> StoreError:
    cause = error.__cause__ or error
    response = getattr(cause, "response", None)
    kind = response["Error"].get("Code") if isinstance(response, dict) else type(cause).__name__
    if isinstance(error, FileNotFoundError) or kind == "NoSuchBucket":
        return NotThere(f"{url} is not in the store; correct the bucket or the path.")
    if isinstance(error, PermissionError) or kind in ("AccessDenied", "NoCredentialsError"):
        return StoreError(f"{url}: the store refuses the keys ({kind}); see {KEYS}.")
    return StoreError(f"{url}: the store does not answer ({kind}); see AWS_ENDPOINT_URL or MSC_CONFIG.")


def read(url: str, most_bytes: int) -> bytes:
    """The bytes of a file. Raises StoreError, and ValueError for more than `most_bytes`."""
    with at(url) as (client, path):
        if (size := client.info(path).content_length) > most_bytes:
            raise ValueError(f"{url} has {size} bytes, more than {most_bytes}")
        return client.read(path)


def is_file(url: str) -> bool:
    with at(url) as (client, path):
        return client.is_file(path)


def fetched(url: str, patterns: Sequence[str]) -> Path:
    """Return the folder in the hub's cache with those files of a store's folder that fit a pattern.

    Processes of a machine fetch each version once. Raises StoreError, also if a file is changed meanwhile,
    and OSError if the cache cannot be written.
    """
    from huggingface_hub.constants import HF_HUB_CACHE
    from tqdm import tqdm

    url = folder(url)
    versions = _versions(url, patterns)

    def fetch(target: Path) -> None:
        with at(url) as (client, path):
            for name in tqdm(versions, printable(f"fetching {url}"), unit="file"):
                client.download_file(f"{path}/{name}", str(target / name))
        if _versions(url, patterns) != versions:
            raise StoreError(f"{url} changed while it was fetched; start again.")

    key = hashlib.sha256(repr((url, versions)).encode()).hexdigest()[:24]
    return made_once(Path(HF_HUB_CACHE, "stores", key), fetch)


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
            with atomic_directory(folder) as aside:
                make(aside)
    return folder


def _versions(url: str, patterns: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Return size and tag of each file that fits. Names that no disk takes are left out."""
    with at(url) as (client, path):
        entries = [
            entry for entry in client.list(path=path, include_directories=True) if entry.type == "file"
        ]
    return {
        name: (entry.content_length, entry.etag or str(entry.last_modified))
        for entry in entries
        if len((name := posixpath.basename(entry.key)).encode()) < 200
        and any(fnmatch(name, pattern) for pattern in patterns)
    }
