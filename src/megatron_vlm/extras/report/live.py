"""The page of a run that goes on: `<run_dir>/report.html`, written again while it is trained."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from megatron_vlm.config import RunConfig
from megatron_vlm.extras.report.history import read_history
from megatron_vlm.files import write_whole
from megatron_vlm.messages import printable
from megatron_vlm.run_folder.callbacks import Callback
from megatron_vlm.run_folder.run_log import RunLogger

FILE = "report.html"
OFTEN = 10.0  # seconds between two pages, at least
SHARE = 0.01  # of a run's time that its pages may take


def open_log(
    config: RunConfig,
    total_steps: int,
    first_step: int,
    is_writer: bool,
    totals: dict[str, int],
    callbacks: Iterable[Callback],
) -> RunLogger:
    """The log of a run, which also writes its page unless `logging.report` is false."""
    trackers = [LivePage] if config.logging.report else []
    return RunLogger(config.run_dir, config, total_steps, first_step, is_writer, totals, trackers, callbacks)


class LivePage:
    """Writes the page of the run in this process, as a tracker (`run_folder.trackers`).

    A long run's page takes longer to write, so it is then written less often.
    """

    def __init__(self, config: RunConfig, first_step: int):
        self._folder = Path(config.run_dir)
        self._next = 0.0

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if time.monotonic() >= self._next or "valid_loss" in numbers:
            self._write(running=True)

    def save(self) -> None:
        self._write(running=True)

    def close(self) -> None:
        error = sys.exception()  # what the run ends by, see `job.errors.closing`
        said = printable(f"{type(error).__name__}: {error}") if error else ""
        self._write(running=False, ended_by=said)

    def _write(self, running: bool, ended_by: str = "") -> None:
        began = time.monotonic()
        from megatron_vlm.extras.report.page import report_page  # it imports what reads drops

        history = read_history(self._folder, running, ended_by)
        write_whole(self._folder / FILE, report_page([history]))
        took = time.monotonic() - began
        self._next = began + took + max(OFTEN, took / SHARE)
