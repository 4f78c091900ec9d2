"""How the commands run: as programs with short errors, and with `--nproc` in several processes."""

import contextlib
import faulthandler
import io
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from megatron_vlm.config import ConfigError
from megatron_vlm.job.errors import exit_with_reason
from megatron_vlm.messages import PrintableRecord
from megatron_vlm.overrides import refuse_keys

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
            alike = f" (there is {' and '.join(error.possibilities)})" if error.possibilities else ""
            raise ConfigError(
                f"{error.option_name}: `{ctx.invoked_subcommand}` has no such flag{alike}. A setting is "
                "written without dashes, as train.steps=10; --help lists the flags."
            ) from error
        except EOFError as error:  # of which click would only say "Aborted!"
            cut = OSError(f"EOFError: {error}")
            cut.__dict__.update(error.__dict__)
            raise cut.with_traceback(error.__traceback__) from None


def single(command) -> typer.Typer:
    """Return a program with a single command."""
    program = typer.Typer(**PLAIN)
    program.command()(command)
    return program


def run(program: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a program and end the process with the exit code of `job.errors.exit_with_reason`.

    MEGATRON_VLM_DEBUG=1 shows every traceback and every library's warning.
    """
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # the shell has closed it
            setattr(sys, stream, Path(os.devnull).open(mode))
    logging.setLogRecordFactory(PrintableRecord)
    # what crashes in compiled code says where; a watched rank writes it to its file
    with contextlib.suppress(io.UnsupportedOperation):  # stderr may be no file
        faulthandler.enable()
    with exit_with_reason(name):
        for word in sys.argv[1:] if arguments is None else arguments:
            if address := re.fullmatch(r"(?:([\w.-]+)=)?(\[?\w+:/\S*)", word):
                refuse_keys(address[1] or "the command line", address[2])
        program(arguments, prog_name=name)


def world_size() -> int | None:
    """Return torchrun's number of processes; None outside of torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def on_disk(path: Path | None) -> Path | None:
    """Return the path. Raise ConfigError for an address, where only a disk is written."""
    if path is not None and re.match("(s3|msc):/", str(path)):
        raise ConfigError(f"{path}: this command writes on a disk alone; give a path there.")
    return path


def machines() -> int:
    """Return the most machines on which this command is started: torchrun's PET_NNODES, `2` or `1:2`."""
    text = os.environ.get("PET_NNODES", "1")
    if not re.fullmatch(r"(\d+:)?0*[1-9]\d*", text):
        raise ConfigError(f"PET_NNODES: {text!r} is no number of machines; write 2, or 1:2 for one or two.")
    return int(text.rpartition(":")[2])


def processes(nproc: int | None) -> int | None:
    """Return the processes of all machines: `nproc` of each, else torchrun's; None without torchrun."""
    return nproc * machines() if nproc else world_size()


def start_ranks(
    nproc: int, command: str, options: Mapping[str, Any], settings: Sequence[str] | None, restarts: int = 0
) -> int:
    """Run a command of this program in `nproc` processes, with its options and settings; see `torchrun`."""
    flags = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}={item}" for item in values if item is not None]
    return torchrun(nproc, [command, *flags, *(settings or ())], restarts=restarts)


def torchrun(
    nproc: int,
    arguments: Sequence[str],
    module: str = "megatron_vlm.cli",
    gpus: int | None = None,
    restarts: int = 0,
) -> int:
    """Run `job.launch.launch`, and return its exit code.

    Raises:
        ConfigError: PET_ variables cannot make several machines meet; torch would wait for ten minutes.
    """
    if (count := machines()) > 1:
        is_static = os.environ.get("PET_RDZV_BACKEND", "static") == "static"
        needed = ["PET_MASTER_ADDR", "PET_NODE_RANK"] if is_static else ["PET_RDZV_ENDPOINT"]
        if missing := [name for name in needed if not os.environ.get(name)]:
            raise ConfigError(f"PET_NNODES={count}: the machines cannot meet; set {missing[0]} on each.")
        if restarts and is_static:
            raise ConfigError(
                "--restarts: machines meet again only where the first, HOST, waits for them; set "
                "PET_RDZV_BACKEND=c10d and PET_RDZV_ENDPOINT=HOST:PORT on each."
            )
    from megatron_vlm.job.launch import launch  # it imports torch

    return launch(nproc, module, arguments, restarts, gpus)
