"""Hugging Face folders that a run writes while it trains (`train.export_every`), in `<run_dir>/exports`.

<run_dir>/exports/step_00000100/            a whole folder, as `megatron-vlm export` writes it
<run_dir>/on_export/step_00000100.txt       what `train.on_export` printed about it
<run_dir>/on_export/step_00000100.running   the same until the command has ended
<run_dir>/exports/.step_00000200.*.partial/ being written, or removed as its step was trained again
"""

import json
import math
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from itertools import compress
from pathlib import Path

from torch.nn import Module

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.callbacks.run_log import last_lines
from megatron_vlm.config import RunConfig
from megatron_vlm.files import add_path_to_errors, need_room, open_to_write, temporary_name
from megatron_vlm.job import stops, watchdog
from megatron_vlm.models.hf import Source
from megatron_vlm.models.publishing import export_model
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.parallel import setup
from megatron_vlm.run_folder import remove_leftovers

# what would make a program take itself for a rank of this job, beside what begins with TORCHELASTIC_
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_RANKS += (watchdog.LAUNCHER, stops.STARTED)
# runs the command "$0", and kills its group when this process is gone, which holds the other end of stdin
_ENDS_WITH_US = 'exec 3<&0 </dev/null; ((read _ <&3 || kill -KILL 0) &); exec 3<&-; exec sh -c "$0"'
PATIENCE = 3.0  # seconds for a command to end in when it is asked to


class Exports(Callback):
    """Writes the exports of a run, and starts `train.on_export` for each on the first rank.

    If the last line that a command printed is a JSON object of numbers, they are logged at the step of its
    export. What goes wrong is told and does not end the run. A command that did not end is started again by
    the next run in the folder; one that has ended is not.
    """

    def __init__(self) -> None:
        self.commands: dict[int, subprocess.Popen] = {}  # by the step of the export

    def on_train_begin(self, run: Run) -> None:
        self._run = run
        if run.step and run.milestones.exports_after(run.step):
            self._export(replace=False)  # an export that a kill interrupted
        self._start_due()

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.milestones.exports_after(run.step):
            self._export()
        self._log_ended()
        self._start_due()

    def on_train_end(self, run: Run) -> None:
        """Wait for the commands, unless the run was asked to stop."""
        if not run.stopped_by:
            run.stopped_by = self._wait()

    def close(self) -> None:
        """Ends the commands that still run."""
        self._log_ended()
        for process in self.commands.values():
            self._tell(process.args[-1], "ended with the run, and started again with it")
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(PATIENCE)

    def _export(self, replace: bool = True) -> None:
        run = self._run
        export_step(run.config, run.source, run.model, run.step, replace)

    def _wait(self) -> list[str]:
        """Wait until all commands have ended, or a rank is asked to stop; return how it was asked then."""
        while True:
            self._log_ended()
            states = setup.from_all_ranks((list(self.commands), stops.stop_flags()))
            waiting_steps = states[0][0]
            flags_of_any = [any(flags) for flags in zip(*(flags for _, flags in states), strict=True)]
            if not waiting_steps or any(flags_of_any):
                return list(compress(stops.WAYS, flags_of_any)) if waiting_steps else []
            watchdog.beat(f"waiting for train.on_export of step {waiting_steps[0]}")
            for process in list(self.commands.values())[:1]:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)

    def _start_due(self) -> None:
        if not (self._run.config.train.on_export and self._run.is_first_rank):
            return
        markers = running(self._run.config.run_dir, 0).parent.glob("step_*.running")
        for exported in sorted(int(file.stem[5:]) for file in markers):
            if exported <= self._run.step and exported not in self.commands:
                self._start(exported)

    def _start(self, step: int) -> None:
        output = running(self._run.config.run_dir, step)
        folder = Path(self._run.config.run_dir, "exports", output.stem).resolve()
        words = f"{self._run.config.train.on_export} {shlex.quote(str(folder))}"
        process_options = {"stdin": subprocess.PIPE, "start_new_session": True}
        rank_variables = {name for name in os.environ if name in OF_RANKS or name.startswith("TORCHELASTIC_")}
        process_options["env"] = {
            name: value for name, value in os.environ.items() if name not in rank_variables
        }
        try:
            with open_to_write(output) as file:
                self.commands[step] = subprocess.Popen(
                    ["sh", "-c", _ENDS_WITH_US, words], stdout=file, stderr=file, **process_options
                )
        except (OSError, ValueError) as error:
            self._tell(words, str(error))

    def _log_ended(self) -> None:
        for step in [step for step, process in self.commands.items() if process.poll() is not None]:
            process = self.commands.pop(step)
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(b"\n")  # what the command left running may go on
            output = running(self._run.config.run_dir, step).with_suffix(".txt")
            try:
                if process.returncode:
                    raise ValueError(f"exit code {process.returncode}")
                lines = last_lines(output.with_suffix(".running"))
                scores = scores_in(next(filter(str.strip, reversed(lines)), ""))
                if scores:
                    self._log(step, {f"on_export/{name}": scores[name] for name in scores})
            except (OSError, ValueError) as error:
                self._tell(process.args[-1], f"{error}; its output is in {output}")
            # Only now, so that the next run starts the command again after a kill before this line.
            with suppress(OSError):
                os.replace(output.with_suffix(".running"), output)

    def _log(self, step: int, scores: dict[str, float]) -> None:
        self._run.log(scores, step)
        words = [f"{name} {score:.4f}" for name, score in scores.items()]
        self._run.message(f"step {step}: {' · '.join(words)}")

    def _tell(self, words: str, problem: str) -> None:
        self._run.message(f"train.on_export: {words}: {problem}")


def scores_in(line: str) -> dict[str, float]:
    """Return the numbers by name in a line that is a JSON object; none if it does not begin as one.

    Raises:
        ValueError: The object is not whole, a value is no finite number, or a name has a line break.
    """
    if line[:1] != "{":
        return {}
    try:
        scores = json.loads(line)
        for name, value in scores.items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"{name} is {json.dumps(value)}; print a finite number")
            if not name.isprintable():
                raise ValueError(f"{name} is no name; print one without line breaks and escapes")
        return {name: float(value) for name, value in scores.items()}
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"its last line is no JSON object of numbers: {error}") from error


def running(run_dir: str | Path, step: int) -> Path:
    """The output of a command until it ends. It is there before the export, so no kill loses a command."""
    return Path(run_dir, "on_export", f"step_{step:08d}.running")


def export_step(
    config: RunConfig, source: Source, model: list[Module], step: int, replace: bool = True
) -> None:
    """Write the model of a step as a Hugging Face folder, which appears when it is whole. Collective. A run
    that trains adapters writes them alone, as peft does.

    A folder of the step that is there already is replaced, or left if not `replace`. Raises OSError as
    `need_room`.
    """
    from megatron.core.utils import unwrap_model  # here, as it is slow before `parallel.cpu` is imported

    folder = Path(config.run_dir, "exports", f"step_{step:08d}")
    if not replace and setup.on_first_rank(folder.exists):
        return
    watchdog.beat(f"exporting step {step} to {folder}")
    files = HFCheckpoint(source.folder, source.weight_map.renames)
    setup.on_first_rank(_make_room, folder, 0 if config.adapter.used else files.nbytes)  # adapters are small
    if config.train.on_export and setup.is_first_rank():
        running(config.run_dir, step).parent.mkdir(exist_ok=True)
        running(config.run_dir, step).touch()
    chunks = unwrap_model(model)
    export_model(chunks, folder, config, source, step, adapters_alone=config.adapter.used)


def _make_room(folder: Path, needed: int) -> None:
    with add_path_to_errors(folder):
        folder.parent.mkdir(exist_ok=True)
        if folder.exists():
            folder.rename(temporary_name(folder))
        remove_leftovers(folder.parent)
        need_room(folder, needed)
