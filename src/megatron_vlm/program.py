"""How the commands run: as programs with short errors, and in several processes."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from types import TracebackType

import typer

from megatron_vlm.config import ConfigError

# `rich_markup_mode=None`: plain text is what logs and pipes want, and rich costs start-up time
PLAIN = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}


def single(command) -> typer.Typer:
    """A program of one command."""
    program = typer.Typer(**PLAIN)
    program.command()(command)
    return program


def run(program: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a program and end the process: 2 with a short message for a user's error, 130 after Ctrl-C.

    A ValueError or OSError that our own code raised is a message to the user; one from a library is shown
    with its traceback. MEGATRON_VLM_DEBUG=1 shows every traceback and every library's warning.
    """
    _quiet()
    try:
        program(arguments, prog_name=name)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        ours = isinstance(error, ConfigError) or _is_ours(error.__traceback__)
        if os.environ.get("MEGATRON_VLM_DEBUG") or not ours:
            raise
        # on every rank: torchrun stops the others at the first failure, whichever rank that is
        typer.echo("\n".join([f"{name}: {error}", *getattr(error, "__notes__", ())]), err=True)
        sys.exit(2)


def world_size() -> int | None:
    """What torchrun says, or None outside of it."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def torchrun(nproc: int, arguments: Sequence[str]) -> int:
    """Run this program in `nproc` processes; returns the exit code of the first that failed, or 0.

    torchrun's own report of a failure is left out: the failing process has already said why.
    """
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # this process only starts and waits
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    command = ["--standalone", f"--nproc_per_node={nproc}", "-m", "megatron_vlm.cli", *arguments]
    try:
        launcher.run(launcher.parse_args(command))
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            typer.echo(f"rank {rank} was ended by signal {-failure.exitcode}", err=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _quiet() -> None:
    """Leave out what Megatron-Core says about its own deprecations and about packages we do without."""
    if os.environ.get("MEGATRON_VLM_DEBUG"):
        return
    for category in (UserWarning, SyntaxWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_ours(traceback: TracebackType | None) -> bool:
    while traceback and traceback.tb_next:
        traceback = traceback.tb_next
    package = traceback.tb_frame.f_globals.get("__package__") if traceback else None
    return (package or "").partition(".")[0] == "megatron_vlm"
