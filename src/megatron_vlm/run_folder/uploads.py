"""A run's whole checkpoints and exports in a store, `train.upload_to`, with the names of the run folder.

A folder there is whole if it has its state.json or config.json, which comes last. What lies beside it, such
as config.yaml and metrics.jsonl, is as it was at the last copy; so a copy of all is a run folder.
"""

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_vlm import stores
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import MOST_TEXT, naming, read_file, sync
from megatron_vlm.job import watchdog
from megatron_vlm.messages import printable
from megatron_vlm.run_folder import folder as run_folder
from megatron_vlm.run_folder import starts
from megatron_vlm.run_folder.checkpoint_files import STATE

BESIDE = ("config.yaml", "metrics.jsonl", "starts.jsonl", "checkpoints/adapter_start/*")
OWNER = "copied_by.txt"  # the mark of the start that copies there
# the files that are fetched
OF_A_RUN = re.compile(
    r"checkpoints/(step_\d{8}|adapter_start)/[\w.-]*\w|config\.yaml|(metrics|starts)\.jsonl"
)
MAKE_WHOLE = (STATE, "config.json", "adapter_config.json")
LOOKS_EVERY, AGAIN_AFTER = 1.0, 30.0  # seconds; the latter after a failure


class AnothersCopy(Exception):
    """Another start copies to the address now."""


def restore(config: RunConfig) -> bytes:
    """Fetches the newest whole checkpoint of the store into a run folder that has none. Returns the mark that
    makes the copy this start's, see `Uploads`.

    The run holds its folder's lock. Raises ConfigError, and leaves the folder as it was, if the store is
    ahead of it or holds another run; StoreError, also if nothing can be written there; and OSError.
    """
    if config.train.upload_to is None:
        return b""
    url = stores.folder(config.train.upload_to)
    run_dir = os.path.abspath(config.run_dir)
    watchdog.beat(f"fetching the last checkpoint of {printable(url)}", files=True)
    _to_fetch(config, url)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    mark = f"{run_dir} on {socket.gethostname()} since {since}, start {secrets.token_hex(4)}".encode()
    stores.write(f"{url}/{OWNER}", mark)
    if there := _to_fetch(config, url):  # again, as the owner before may just have copied one
        _fetch(url, there, Path(run_dir))
    return mark


def _to_fetch(config: RunConfig, url: str) -> dict[str, int]:
    """The files, with their bytes, that a run folder without checkpoints needs of a store. Raises ConfigError
    if the two are not of one run."""
    run_dir = Path(config.run_dir)
    there = {name: size for name, size in stores.names(url).items() if OF_A_RUN.fullmatch(name)}
    states = [name for name in there if name.startswith("checkpoints/step_") and name.endswith(f"/{STATE}")]
    newest = max(states, default="/").split("/")[1]
    mine = run_folder.complete_checkpoints(run_dir)
    begun = run_dir / starts.FILE
    remedy = "give a new run_dir to go on from the store, or another upload_to"
    if begun.is_file() and starts.FILE in there:
        theirs = stores.read(f"{url}/{starts.FILE}", MOST_TEXT)
        if theirs.partition(b"\n")[0] != read_file(begun).partition(b"\n")[0]:
            raise ConfigError(
                f"train.upload_to: {printable(url)} holds another run than {printable(run_dir)}; {remedy}."
            )
    if newest and mine and mine[-1] < newest:
        fact = f"{printable(url)} has {newest}, and {printable(run_dir)} only {mine[-1]}"
        raise ConfigError(f"train.upload_to: {fact}; {remedy}.")
    if mine or not newest:
        return {}
    if "config.yaml" in there:
        text = stores.read(f"{url}/config.yaml", MOST_TEXT)
        run_folder.check_model("train.upload_to", url, text, config.model.hf_path)
    steps = "checkpoints/step_"
    return {name: there[name] for name in there if f"/{newest}/" in name or not name.startswith(steps)}


def _fetch(url: str, names: dict[str, int], run_dir: Path) -> None:
    """The checkpoint appears when all of it, and all that lies beside it, is there."""
    [newest] = {name.split("/")[1] for name in names if name.startswith("checkpoints/step_")}
    partial = run_folder.begin(run_dir, int(newest.removeprefix("step_")), sum(names.values()))
    for name in sorted(names, key=lambda name: newest not in name):
        watchdog.beat(f"fetching {newest} of {printable(url)}", files=True)
        file = run_dir / name.replace(f"/{newest}/", f"/{partial.name}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        with naming(file), stores.at(f"{url}/{name}") as (client, path):
            client.download_file(path, str(file))
            sync(file)
    run_folder.make_latest(partial)


class Uploads:
    """A thread of the rank that logs copies what is whole in the run folder and not yet in the store.

    What goes wrong is told and tried again; it does not end the run. Each start puts its mark into the store.
    Who finds there another's than its own, before any change or after the last, tells it and copies no more:
    it was started elsewhere since, or a second run has the same address.
    """

    def __init__(self, config: RunConfig, mark: bytes, is_writer: bool, tell: Callable[[str], None]):
        self._run_dir = Path(config.run_dir)
        self._to = config.train.upload_to and stores.folder(config.train.upload_to)
        self._mark = mark
        self._tell = tell
        self._there: dict[str, int] = {}  # folders, each with the time of its last file
        self._said: set[str] = set()
        self._last_look = threading.Event()
        self._ended = threading.Event()
        if is_writer and self._to:
            threading.Thread(target=self._run, name="uploads", daemon=True).start()
        else:
            self._ended.set()

    def wait(self) -> None:
        """Waits until all is in the store, or the last try has failed. Nothing collective may follow."""
        self._last_look.set()
        while not self._ended.wait(1):
            watchdog.beat(f"copying to {printable(self._to)}")

    def _run(self) -> None:
        last = False
        try:
            while not last:
                last = self._last_look.is_set()
                self._last_look.wait(LOOKS_EVERY if self._copy_all() else AGAIN_AFTER)
        except (AnothersCopy, OSError, ValueError) as error:
            self._tell(f"train.upload_to: {error}")
        finally:
            self._ended.set()

    def _copy_all(self) -> bool:
        """Whether all is in the store now; what is not is told."""
        copied = True
        for marker in self._whole():
            place = str(marker.parent.relative_to(self._run_dir))
            try:
                self._copy(place, marker)
            except (OSError, ValueError) as error:
                why = error if marker.exists() else "it was removed meanwhile; raise train.keep_checkpoints"
                if (said := f"train.upload_to: {place} is not copied: {why}") not in self._said:
                    self._tell(said)
                self._said.add(said)
                copied = False
        return copied

    def _whole(self) -> list[Path]:
        """The file of each whole folder that makes it so, the newest checkpoint's first."""
        checkpoints = run_folder.complete_checkpoints(self._run_dir)
        folders = [self._run_dir / "checkpoints" / name for name in reversed(checkpoints)]
        folders += self._run_dir.glob("exports/step_*")
        return [folder / name for folder in folders for name in MAKE_WHOLE if (folder / name).is_file()]

    def _copy(self, place: str, marker: Path) -> None:
        version = marker.stat().st_mtime_ns
        if self._there.get(place) == version:
            return
        url = f"{self._to}/{place}"
        self._check_mark()
        if place in self._there or not self._is_there(url, marker):
            for file in (each for name in BESIDE for each in self._run_dir.glob(name)):
                stores.write(f"{self._to}/{file.relative_to(self._run_dir)}", read_file(file))
            stores.upload(marker.parent, url, marker.name, self._check_mark)
            try:
                self._check_mark()
            except AnothersCopy:  # who may have begun before it was whole
                if self._is_there(url, marker):
                    stores.remove(url, [marker.name])
                raise
        self._there[place] = version
        names = run_folder.complete_checkpoints(self._run_dir)
        if marker.name == STATE and marker.parent.name == names[-1]:
            stores.write(f"{self._to}/checkpoints/latest", f"{names[-1]}\n".encode())
            there = stores.names(f"{self._to}/checkpoints")
            gone = [each for each in there if each.startswith("step_") and each.split("/")[0] not in names]
            stores.remove(f"{self._to}/checkpoints", sorted(gone, key=lambda each: not each.endswith(STATE)))

    def _check_mark(self) -> None:
        """Raises AnothersCopy unless the copy is this start's, as it is again where the mark was removed."""
        try:
            there = stores.read(f"{self._to}/{OWNER}", MOST_TEXT)
        except stores.NotThere:
            self._there.clear()  # somebody has emptied the address
            return stores.write(f"{self._to}/{OWNER}", self._mark)
        if there != self._mark:
            raise AnothersCopy(
                f"{printable(self._to)} is now the copy of {printable(there.decode(errors='replace'))}; "
                f"nothing of {printable(self._run_dir)} is copied there any more; give each its own address."
            )

    def _is_there(self, url: str, marker: Path) -> bool:
        url = f"{url}/{marker.name}"
        return stores.is_file(url) and stores.read(url, MOST_TEXT) == read_file(marker)
