"""How the commands run: as programs with short errors, and in several processes."""

import contextlib
import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from megatron_vlm.config import ConfigError
from megatron_vlm.config_rules.layout import check_gpus
from megatron_vlm.job import guard, ranks
from megatron_vlm.job.failures import LastWords
from megatron_vlm.job.ranks import LAUNCHER_SPEAKS, interrupted, last_words, say
from megatron_vlm.job.stops import AGAIN_AFTER, WARNINGS
from megatron_vlm.messages import PrintableRecord

# `rich_markup_mode=None`: logs and pipes need plain text, and rich costs start-up time
PLAIN = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}

UsageError = typer.BadParameter.__base__  # click's, which newer versions of typer have under another name


class Commands(TyperGroup):
    """Commands whose errors tell a flag that does not exist from a setting that is written as one."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            if not hasattr(error, "possibilities"):  # only NoSuchOption has them
                raise
            command = ctx.invoked_subcommand
            alike = f" (there is {' and '.join(error.possibilities)})" if error.possibilities else ""
            raise ConfigError(
                f"{error.option_name}: `{command}` has no such flag{alike}. A setting is written without "
                f"dashes, as train.steps=10; `megatron-vlm {command} --help` lists the flags."
            ) from error
        except EOFError as error:  # of which click would only say "Aborted!"
            cut = OSError(f"EOFError: {error}" if str(error) else "EOFError: it ends too early")
            cut.__dict__.update(error.__dict__)
            raise cut.with_traceback(error.__traceback__) from None


def single(command) -> typer.Typer:
    """A program with a single command."""
    program = typer.Typer(**PLAIN)
    program.command()(command)
    return program


def run(program: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a program and end the process: 2 with a short message for a user's error, 1 for a bug, 130 after
    Ctrl-C; see `job.failures`. MEGATRON_VLM_DEBUG=1 shows every traceback and every library's warning.
    """
    logging.setLogRecordFactory(PrintableRecord)
    with guard.guarding(), LastWords(name):
        program(arguments, prog_name=name)


def world_size() -> int | None:
    """torchrun's number of processes; None outside of torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def start_ranks(nproc: int, command: str, options: Mapping[str, Any], settings: Sequence[str] | None) -> int:
    """Run a command of this program in `nproc` processes, with its options and settings; see `torchrun`."""
    flags = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}={one}" for one in values if one is not None]
    return torchrun(nproc, [command, *flags, *(settings or ())])


def torchrun(
    nproc: int, arguments: Sequence[str], module: str = "megatron_vlm.cli", gpus: int | None = None
) -> int:
    """Run the program `module` in `nproc` processes; when they fail, says why. Returns the exit code.

    SIGUSR1 and SIGTERM go on to ranks that heed them (see `job.stops`). torchrun's own report of a failure is
    left out. Raises ConfigError if there are `gpus` (None: as many as
    torch sees), but fewer than processes.
    """
    from torch import cuda
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    check_gpus(nproc, cuda.device_count() if gpus is None else gpus)
    logging.disable(logging.ERROR)  # this process only starts others and waits
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    with tempfile.TemporaryDirectory(prefix="megatron-vlm-") as folder:
        os.environ[LAUNCHER_SPEAKS] = str(os.getpid())
        command = ["--standalone", f"--nproc_per_node={nproc}", f"--log-dir={folder}"]
        command += ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"]
        before = [signal.signal(number, _PassesOn(folder, nproc)) for number in WARNINGS]
        try:
            launcher.run(launcher.parse_args([*command, "-m", module, *arguments]))
        except SignalException as stop:
            by = "Ctrl-C" if stop.sigval == signal.SIGINT else signal.Signals(stop.sigval).name
            said = interrupted(list(_said(folder, nproc).values()), by)
            code = 128 + stop.sigval
            message = said and f"megatron-vlm: {said}"
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            code, message = last_words(_said(folder, nproc), codes)
        else:
            return 0
        finally:
            for number, handler in zip(WARNINGS, before, strict=True):
                signal.signal(number, handler)
    os.environ.pop(LAUNCHER_SPEAKS)
    say(message)
    return code


class _PassesOn:
    """A launcher's handler, which passes signals on to its ranks. SIGTERM ends the job as torchrun does where
    no rank heeds it, and when it comes again."""

    def __init__(self, folder: str, nproc: int):
        self._folder = folder
        self._nproc = nproc
        self._first = math.inf

    def __call__(self, number: int, frame: Any) -> None:
        contents = _said(self._folder, self._nproc).values()
        if number == signal.SIGTERM:
            now = time.monotonic()
            self._first = min(self._first, now)
            again = now - self._first > AGAIN_AFTER
            if again or not any(content["heeds"] for content in contents):
                from torch.distributed.elastic.multiprocessing import SignalException

                raise SignalException("", signal.SIGTERM)
        for content in contents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(content["pid"], number)


def _said(folder: str, nproc: int) -> dict[int, dict[str, Any]]:
    """The contents that the ranks have written into torchrun's folder of the last attempt."""
    attempts = sorted(Path(folder).glob("*/attempt_*"))
    return ranks.read_all(attempts[-1], nproc) if attempts else {}
