"""Folders of a store in the cache of the Hugging Face hub, as far as files are wanted: each version once."""

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from megatron_vlm import stores
from megatron_vlm.files import folder_aside
from megatron_vlm.messages import printable


def fetched(url: str, wanted: Iterable[str]) -> Path:
    """The folder on disk with the files right in the store's folder whose names fit one of `wanted` patterns.

    Processes of a machine fetch it together once, with a progress bar. Raises StoreError.
    """
    from filelock import FileLock
    from huggingface_hub.constants import HF_HUB_CACHE
    from tqdm import tqdm

    url = stores.folder(url)
    with stores.at(url) as (client, path):
        start = f"{path}/" if path else ""
        there = {one.key.lstrip("/").removeprefix(start): one for one in client.list_recursive(start)}
        files = {
            name: one
            for name, one in sorted(there.items())
            if "/" not in name and any(fnmatch(name, pattern) for pattern in wanted)
        }
        versions = [(name, one.content_length, one.etag or one.last_modified) for name, one in files.items()]
        which = hashlib.sha256(repr((url, versions)).encode()).hexdigest()[:24]
        folder = Path(HF_HUB_CACHE, "stores", which)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                with folder_aside(folder) as aside:
                    for name in tqdm(files, f"fetching {printable(url)}", unit="file"):
                        client.download_file(start + name, str(aside / name))
    return folder
