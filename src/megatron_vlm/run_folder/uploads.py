"""A run's whole checkpoints and exports in a store, `train.upload_to`, with the names of the run folder.

A folder there is whole if it has its state.json or config.json, which comes last. What lies beside it, such
as config.yaml and metrics.jsonl, is as it was at the last copy; so a copy of all is a run folder.
"""

import re
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_vlm import stores
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import MOST_TEXT, read_file, write_whole
from megatron_vlm.job import watchdog
from megatron_vlm.messages import printable
from megatron_vlm.overrides import to_yaml
from megatron_vlm.run_folder import folder as run_folder
from megatron_vlm.run_folder import starts
from megatron_vlm.run_folder.checkpoint_files import STATE

BESIDE = ("config.yaml", "metrics.jsonl", "starts.jsonl", "checkpoints/adapter_start/*")
# the files that are fetched
OF_A_RUN = re.compile(
    r"checkpoints/(step_\d{8}|adapter_start)/[\w.-]*\w|config\.yaml|(metrics|starts)\.jsonl"
)
MAKE_WHOLE = (STATE, "config.json", "adapter_config.json")
LOOKS_EVERY, AGAIN_AFTER = 1.0, 30.0  # seconds; the latter after a failure


def restore(config: RunConfig) -> None:
    """Fetches the newest whole checkpoint of the store into a run folder that has none.

    The run holds its folder's lock. Raises ConfigError if the store is ahead of the folder or holds another
    run, and StoreError, also if nothing can be written there.
    """
    if config.train.upload_to is None:
        return
    url = stores.folder(config.train.upload_to)
    run_dir = Path(config.run_dir)
    watchdog.beat(f"fetching the last checkpoint of {printable(url)}", files=True)
    there = [name for name in stores.names(url) if OF_A_RUN.fullmatch(name)]
    newest = max((Path(name).parent for name in there if Path(name).name == STATE), default=None)
    mine = run_folder.complete_checkpoints(run_dir)
    begun = run_dir / starts.FILE
    if mine and begun.is_file() and starts.FILE in there:
        theirs = stores.read(f"{url}/{starts.FILE}", MOST_TEXT)
        if theirs.partition(b"\n")[0] != read_file(begun).partition(b"\n")[0]:
            raise ConfigError(
                f"train.upload_to: {printable(url)} holds another run than {printable(run_dir)}; "
                "give another upload_to."
            )
    if newest and mine and mine[-1] < newest.name:
        raise ConfigError(
            f"train.upload_to: {printable(url)} has {newest.name}, and {printable(run_dir)} only {mine[-1]}; "
            "give a new run_dir to go on from the store, or another upload_to."
        )
    if newest and not mine:
        wanted = [Path(name) for name in there if Path(name).parent == newest]
        wanted += [Path(name) for name in there if not name.startswith("checkpoints/step_")]
        for name in sorted(wanted, key=lambda name: name.name == STATE):
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            with stores.at(f"{url}/{name}") as (client, path):
                client.download_file(path, str(run_dir / name))
        write_whole(run_dir / "checkpoints/latest", f"{newest.name}\n")
        run_folder.check_owner(run_dir, config.model.hf_path)
    with stores.at(f"{url}/config.yaml") as (client, path):
        client.write(path, to_yaml(config).encode())


class Uploads:
    """A thread of the rank that logs copies what is whole in the run folder and not yet in the store.

    What goes wrong is told and tried again; it does not end the run.
    """

    def __init__(self, config: RunConfig, is_writer: bool, tell: Callable[[str], None]):
        self._run_dir = Path(config.run_dir)
        self._to = config.train.upload_to and stores.folder(config.train.upload_to)
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
        while not last:
            last = self._last_look.is_set()
            pause = LOOKS_EVERY
            for marker in self._whole():
                place = str(marker.parent.relative_to(self._run_dir))
                try:
                    self._copy(place, marker)
                except (OSError, ValueError) as error:
                    why = (
                        error if marker.exists() else "it was removed meanwhile; raise train.keep_checkpoints"
                    )
                    if (said := f"train.upload_to: {place} is not copied: {why}") not in self._said:
                        self._tell(said)
                    self._said.add(said)
                    pause = AGAIN_AFTER
            self._last_look.wait(pause)
        self._ended.set()

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
        if place in self._there or not self._is_there(f"{url}/{marker.name}", marker):
            for file in (each for name in BESIDE for each in self._run_dir.glob(name)):
                with stores.at(f"{self._to}/{file.relative_to(self._run_dir)}") as (client, path):
                    client.write(path, read_file(file))
            stores.upload(marker.parent, url, marker.name)
        self._there[place] = version
        names = run_folder.complete_checkpoints(self._run_dir)
        if marker.name == STATE and marker.parent.name == names[-1]:
            with stores.at(f"{self._to}/checkpoints") as (client, path):
                client.write(f"{path}/latest", f"{names[-1]}\n".encode())
            there = stores.names(f"{self._to}/checkpoints")
            gone = [each for each in there if each.startswith("step_") and each.split("/")[0] not in names]
            older = [each for each in gone if each < names[-1]]
            stores.remove(f"{self._to}/checkpoints", sorted(older, key=lambda each: not each.endswith(STATE)))

    def _is_there(self, url: str, marker: Path) -> bool:
        return stores.is_file(url) and stores.read(url, MOST_TEXT) == read_file(marker)
