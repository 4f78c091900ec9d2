"""Folders of a store in the cache of the Hugging Face hub, as far as files are wanted: each version once."""

import hashlib
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from megatron_vlm import stores
from megatron_vlm.files import folder_aside
from megatron_vlm.messages import printable


def fetched(url: str, wanted: Iterable[str]) -> Path:
    """The folder on disk with the files right in the store's folder whose names fit one of `wanted` patterns.

    Processes of a machine fetch it together once, with a progress bar. Raises StoreError, also if a file is
    changed meanwhile, and OSError if the cache cannot be written.
    """
    from filelock import FileLock
    from huggingface_hub.constants import HF_HUB_CACHE
    from tqdm import tqdm

    url = stores.folder(url)
    versions = _versions(url, wanted)
    folder = Path(HF_HUB_CACHE, "stores", hashlib.sha256(repr((url, versions)).encode()).hexdigest()[:24])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        if not folder.is_dir():
            with folder_aside(folder) as aside:
                for name in tqdm(versions, f"fetching {printable(url)}", unit="file"):
                    with stores.at(f"{url}/{name}") as (client, path):
                        client.download_file(path, str(aside / name))
                if _versions(url, wanted) != versions:
                    raise stores.StoreError(f"{printable(url)} changed while it was fetched; start again.")
    return folder


def _versions(url: str, wanted: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size and tag of each file that is wanted. Names that no disk takes are left out."""
    with stores.at(url) as (client, path):
        start = f"{path}/" if path else ""
        there = {one.key.lstrip("/").removeprefix(start): one for one in client.list_recursive(start)}
    return {
        name: (one.content_length, one.etag or str(one.last_modified))
        for name, one in sorted(there.items())
        if "/" not in name and len(name.encode()) < 200 and any(fnmatch(name, each) for each in wanted)
    }
