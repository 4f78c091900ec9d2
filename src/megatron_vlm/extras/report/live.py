"""The page of a run that goes on: `<run_dir>/report.html`, written again while it is trained."""

import sys
import time
from pathlib import Path

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.extras.report.history import read_history
from megatron_vlm.files import atomic_write
from megatron_vlm.messages import printable

FILE = "report.html"
OFTEN = 10.0  # seconds between two pages, at least
SHARE = 0.01  # of a run's time that its pages may take


class LivePage(Callback):
    """Writes the page of the run in this process, on the first rank.

    A long run's page takes longer to write, so it is then written less often.
    """

    ends_run = False

    def on_train_begin(self, run: Run) -> None:
        self._folder = Path(run.config.run_dir)
        self._next = 0.0

    def on_log(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        if time.monotonic() >= self._next or "valid_loss" in metrics:
            self._write(running=True)

    def on_save(self, run: Run, checkpoint: Path) -> None:
        self._write(running=True)

    def close(self) -> None:
        error = sys.exception()  # what the run ends by, see `job.errors.closing`
        problem = printable(f"{type(error).__name__}: {error}") if error else ""
        self._write(running=False, ended_by=problem)

    def _write(self, running: bool, ended_by: str = "") -> None:
        began = time.monotonic()
        from megatron_vlm.extras.report.page import report_page  # it imports what reads drops

        history = read_history(self._folder, running, ended_by)
        atomic_write(self._folder / FILE, report_page([history]))
        took = time.monotonic() - began
        self._next = began + took + max(OFTEN, took / SHARE)
