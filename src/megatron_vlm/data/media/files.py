"""The bytes of a media file that a record names, from inside its media root and nowhere else."""

from __future__ import annotations

import base64
import binascii
import functools
from pathlib import Path

from megatron_vlm.data.chatml import BadSample
from megatron_vlm.files import check_file, read_file

LMDB_KEY = ".lmdb::"  # `folder/images.lmdb::key`


def read_media(name: str, root: Path) -> bytes:
    """A file under `root`, a value of an LMDB under `root` (`db.lmdb::key`), or a base64 `data:` address.

    Raises BadSample `missing_media` if it is missing, lies outside of `root`, is not a regular file or is
    over 2 GiB, and ImportError for an LMDB if the package `lmdb` is not installed.
    """
    if name.startswith("data:"):
        return _inline(name)
    if "://" in name:
        raise BadSample("missing_media", f"{name[:200]} is an address; download it and give its path")
    path, is_lmdb, key = name.partition(LMDB_KEY)
    try:
        if not is_lmdb:
            return read_file(_inside(name, root))
        database = _inside(path + LMDB_KEY.removesuffix("::"), root)
        if not database.exists():
            raise BadSample("missing_media", f"there is no database {database}")
        check_file(_inside(str(database / "data.mdb"), root) if database.is_dir() else database)
        value = _from_lmdb(database, key)
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte in the path; links in a circle
        raise BadSample("missing_media", f"{name[:200]} under {root}: {error}") from error
    if value is None:
        raise BadSample("missing_media", f"{database} has no key {key!r}")
    return value


def _inside(name: str, root: Path) -> Path:
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise BadSample("missing_media", f"{name} leads out of {root}")
    return path


def _inline(address: str) -> bytes:
    header, _, content = address.partition(",")
    if not header.endswith(";base64"):
        raise BadSample("missing_media", f"{header[:80]}: only base64 data addresses are read")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadSample("missing_media", f"{header[:80]}: {error}") from error


def _from_lmdb(database: Path, key: str) -> bytes | None:
    try:
        import lmdb
    except ImportError as error:
        raise ImportError(f"data: {database} needs the package lmdb; run `pip install lmdb`.") from error
    try:
        with _open_lmdb(database).begin() as transaction:
            return transaction.get(key.encode())
    except (lmdb.Error, UnicodeEncodeError) as error:  # empty or overlong keys, a damaged file
        raise BadSample("missing_media", f"{database}::{key[:200]}: {error}") from error


@functools.lru_cache(maxsize=16)
def _open_lmdb(database: Path):
    """The open LMDB, cached, as lmdb refuses to open it twice. Read-only and without locks, so that forked
    workers may use it too."""
    import lmdb

    return lmdb.open(
        str(database), subdir=database.is_dir(), readonly=True, lock=False, readahead=False, max_readers=1024
    )
