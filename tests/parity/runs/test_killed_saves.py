"""A run is killed at each of its file operations; the next start goes on as if nothing had happened.

Processes are forked from one that has imported everything: dozens of them take less than two that import.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import launches
import pytest

from megatron_vlm.callbacks.checkpoints import CheckpointWriter
from megatron_vlm.config import ParallelConfig
from tiny.distributed import run_distributed

STEPS = 3  # saved after each; all but the newest are removed
MODEL = "models/tiny"


class Killer:
    """Kills this process at the `at`-th operation that changes files under `folder`, 0: never.

    The operations are those that Python reports to audit hooks, every fsync, and the moment in which a file
    is open for writing and still empty.
    """

    NAMES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")

    def __init__(self, folder: str, at: int):
        self.folder, self.at, self.count = folder, at, 0
        sys.addaudithook(self._hear)
        fsync, opened = os.fsync, builtins.open

        def counted_fsync(descriptor):
            self._point()
            return fsync(descriptor)

        def counted_open(path, *args, **options):
            file = opened(path, *args, **options)
            if file.writable() and self._is_inside(path):
                self._point()
            return file

        os.fsync, builtins.open, io.open = counted_fsync, counted_open, counted_open

    def _hear(self, event: str, args: tuple) -> None:
        if event == "open":
            writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and self._is_inside(args[0]):
                self._point()
        elif event in self.NAMES:
            in_open_folder = isinstance(args[-1], int) and args[-1] > 0  # as rmtree removes
            if in_open_folder or self._is_inside(args[0]):
                self._point()

    def _is_inside(self, path) -> bool:
        return f"{path}/".startswith(f"{self.folder}/")

    def _point(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(run_dir: str, progress: Path, kill_at: int, last: int = STEPS + 1) -> dict:
    """From what the folder holds to step `last`, as a run does; what it resumed from and ended in."""
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint

    setup.init_distributed(ParallelConfig(), 1)
    run = launches._start("dp", seed=1)
    config = launches.run_config("dp")
    config.run_dir, config.train.keep_checkpoints = run_dir, 1
    writer = CheckpointWriter(config, *run)  # on its thread, while the next step is trained
    killer = Killer(run_dir, kill_at) if kill_at >= 0 else None
    lock = checkpoint.claim(run_dir, MODEL)
    state = checkpoint.load_latest(run_dir, *run)
    first = state.step if state else 0
    digests, points = {first: launches._digest(run)}, 0
    for step in range(first, last):
        launches._train(run, [step])
        digests[step + 1] = launches._digest(run)
        writer.save(step + 1, {"step": step + 1}, {})
        _replace_digit(progress, step)  # the one before is on disk
        if step + 1 in (STEPS, last):
            writer.wait()
            _replace_digit(progress, step + 1)
        points = killer.count if killer and step + 1 <= STEPS else points
    writer.close()
    lock.close()
    files = sorted(os.listdir(os.path.join(run_dir, "checkpoints")))
    return {"first": first, "digests": digests, "files": files, "points": points}


def _in_fork(do: Callable, result: Path) -> int:
    """The signal that ended a forked process, or 0; what `do` returned is then in `result`, as JSON."""
    pid = os.fork()
    if pid == 0:
        try:
            result.write_text(json.dumps(do()))
        finally:
            os._exit(0 if result.exists() else 1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed, see above"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


IMPORTED = (
    *("tiny_gpt", "megatron_vlm.parallel.setup", "megatron_vlm.training.checkpoint"),
    *("torch._dynamo.convert_frame", "torch._inductor.utils"),
)


def _replace_digit(file: Path, step: int) -> None:
    """In one operation: another thread may kill this process while a file is written anew, and empty."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"%d" % step)
    os.close(descriptor)


def _kill_everywhere(root: str, every: int) -> dict:
    for name in IMPORTED:
        importlib.import_module(name)
    os.environ.pop("RANK")  # each process forked from here is a run of its own
    folder = Path(root)
    whole = folder / "whole.json"
    _in_fork(lambda: _train(str(folder / "whole"), folder / "progress", 0), whole)
    points = json.loads(whole.read_text())["points"]
    outcomes = []
    for at in sorted({*range(1, points, every), points}):  # the last one, too: all is saved, not all removed
        run_dir, progress, result = (folder / f"{at}{kind}" for kind in ("", ".progress", ".json"))
        progress.write_text("0")
        killed = _in_fork(lambda: _train(str(run_dir), progress, at, STEPS), folder / "killed.json")  # noqa: B023
        saved = int(progress.read_text())
        _in_fork(lambda: _train(str(run_dir), progress, -1), result)  # noqa: B023
        outcomes.append({"at": at, "killed": killed, "saved": saved, **json.loads(result.read_text())})
    return {"points": points, "whole": json.loads(whole.read_text()), "outcomes": outcomes}


@pytest.mark.parametrize(
    "every", [29, pytest.param(11, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.soak)]
)
def test_killed_at_any_file_operation_a_run_goes_on_bit_equal_and_leaves_nothing_behind(tmp_path, every):
    (found,) = run_distributed(1, _kill_everywhere, str(tmp_path), every, timeout=900)
    whole = found["whole"]
    assert found["points"] > 60 and len(set(whole["digests"].values())) == STEPS + 2
    assert whole["files"] == ["latest", f"step_{STEPS + 1:08d}"]
    assert {0, 1, 2, 3} == {outcome["first"] for outcome in found["outcomes"]}
    for outcome in found["outcomes"]:
        assert outcome["killed"] == signal.SIGKILL, outcome["at"]
        assert outcome["saved"] <= outcome["first"] <= outcome["saved"] + 2, outcome
        for step, digest in outcome["digests"].items():
            assert digest == whole["digests"][step], (outcome["at"], step)
        assert outcome["files"] == whole["files"], outcome["at"]
