"""Whether the Hugging Face hub can be asked: tried for seconds, where its client tries for half a minute."""

import os
import time
from functools import lru_cache
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from megatron_vlm.messages import printable

SECONDS = 4


def why_not(library: str = "TRANSFORMERS") -> str | None:
    """The reason why the hub is not to be asked; None if it is.

    `library` has a variable of its own that says offline.
    """
    for name in ("HF_HUB_OFFLINE", f"{library}_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    return _unreachable(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), int(time.monotonic() // 60))


@lru_cache(maxsize=1)
def _unreachable(address: str, minute: int) -> str | None:
    """Why `address` does not answer; asked again in another minute."""
    reasons = ["no answer"]

    def ask() -> None:
        try:
            urlopen(Request(address, method="HEAD"), timeout=SECONDS).close()
            reasons.clear()
        except HTTPError:  # an answer
            reasons.clear()
        except (OSError, ValueError) as error:  # URLError is an OSError
            reasons.append(str(getattr(error, "reason", error)))

    asking = Thread(target=ask, daemon=True)  # as the lookup of a name has no limit of its own
    asking.start()
    asking.join(SECONDS)
    return f"{address} cannot be reached ({reasons[-1]})" if reasons else None


def is_cached(name: str, dataset: bool = False) -> bool:
    """Whether files of that name were fetched from the hub before."""
    kind = "datasets" if dataset else "models"
    snapshots = _cache("HF_HUB_CACHE", "hub") / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    made = _cache("HF_DATASETS_CACHE", "datasets") / name.replace("/", "___").lower()
    return snapshots.is_dir() or (dataset and made.is_dir())


def _cache(variable: str, folder: str) -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get(variable) or Path(home, folder)).expanduser()


def not_there(name: str | os.PathLike, reason: str, dataset: bool = False) -> str:
    """The message that a name is neither a folder nor cached, while the hub is not to be asked."""
    kind = "--repo-type dataset " if dataset else ""
    return (
        f"{printable(name)}: neither a folder nor in the hub's cache, and {reason}; where the hub can be "
        f"reached, `hf download {kind}{printable(name)} --local-dir FOLDER` fetches it: give that folder."
    )
