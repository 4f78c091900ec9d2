"""How the commands run: as programs with short errors, and in several processes."""

import argparse
import contextlib
import functools
import logging
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from megatron_vlm.config import ConfigError
from megatron_vlm.config_rules.layout import check_gpus
from megatron_vlm.job import guard, ranks
from megatron_vlm.job.failures import LastWords
from megatron_vlm.job.ranks import LAUNCHER_SPEAKS, again, interrupted, last_words, say
from megatron_vlm.job.stops import AGAIN_AFTER, WARNINGS
from megatron_vlm.messages import PrintableRecord, printable, printable_lines

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
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # the shell has closed it
            setattr(sys, stream, Path(os.devnull).open(mode))
    logging.setLogRecordFactory(PrintableRecord)
    with guard.guarding(), LastWords(name):
        program(arguments, prog_name=name)


def world_size() -> int | None:
    """torchrun's number of processes; None outside of torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def on_disk(path: Path | None) -> Path | None:
    """The path itself. Raises ConfigError for an address, where only a disk is written."""
    if path is not None and re.match("(s3|msc):/", str(path)):
        raise ConfigError(f"{printable(path)}: this command writes on a disk alone; give a path there.")
    return path


def machines() -> int:
    """The most machines on which this command is started: torchrun's PET_NNODES, `2` or `1:2`."""
    given = os.environ.get("PET_NNODES", "1")
    numbers = [int(number) for number in given.split(":")] if re.fullmatch(r"(\d+:)?\d+", given) else [0]
    if not 0 < numbers[0] <= numbers[-1]:
        raise ConfigError(f"PET_NNODES: {given!r} is no number of machines; write 2, or 1:2 for one or two.")
    return numbers[-1]


def processes(nproc: int | None) -> int | None:
    """The processes of all machines: `nproc` of each, else torchrun's; None for one without torchrun."""
    return nproc * machines() if nproc else world_size()


def start_ranks(
    nproc: int, command: str, options: Mapping[str, Any], settings: Sequence[str] | None, restarts: int = 0
) -> int:
    """Run a command of this program in `nproc` processes, with its options and settings; see `torchrun`."""
    flags = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}={one}" for one in values if one is not None]
    return torchrun(nproc, [command, *flags, *(settings or ())], restarts=restarts)


def torchrun(
    nproc: int,
    arguments: Sequence[str],
    module: str = "megatron_vlm.cli",
    gpus: int | None = None,
    restarts: int = 0,
) -> int:
    """Run the program `module` in `nproc` processes; when they fail, says why. Returns the exit code.

    Under PET_NNODES, each of several machines runs it so; they meet as torchrun's other PET_ variables say.
    SIGUSR1 and SIGTERM go on to ranks that heed them (see `job.stops`). torchrun's own report of a failure is
    left out. Raises ConfigError if there are `gpus` (None: as many as torch sees), but fewer than processes,
    and as `_meeting` does.
    """
    from torch import cuda
    from torch.distributed import DistError
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    check_gpus(nproc, cuda.device_count() if gpus is None else gpus)
    logging.disable(logging.ERROR)  # this process only starts others and waits
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    with tempfile.TemporaryDirectory(prefix="megatron-vlm-") as folder:
        said = functools.partial(_said, folder, nproc * machines())
        command = [f"--nproc_per_node={nproc}", f"--log-dir={folder}", *_meeting(restarts, said)]
        command += ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", "-m", module, *arguments]
        parsed = _parsed(launcher, command)
        before = [signal.signal(number, _PassesOn(said)) for number in WARNINGS]
        os.environ[LAUNCHER_SPEAKS] = str(os.getpid())
        try:
            with _ends_while_waiting(folder):
                launcher.run(parsed)
        except SignalException as stop:
            by = "Ctrl-C" if stop.sigval == signal.SIGINT else signal.Signals(stop.sigval).name
            message = interrupted(list(said().values()), by)
            code = 128 + stop.sigval
            message = message and f"megatron-vlm: {message}"
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            code, message = last_words(said(), codes)
        except (RendezvousError, DistError):
            where = _where() if machines() > 1 else "a port of this machine"
            lost = f"megatron-vlm: {where}, where ranks meet, is lost, unreachable or taken."
            code, message = last_words(said(), {}, f"{lost}\n{again(said().values()).capitalize()}.")
        else:
            return 0
        finally:
            del os.environ[LAUNCHER_SPEAKS]
            for number, handler in zip(WARNINGS, before, strict=True):
                signal.signal(number, handler)
    say(message)
    return code


class _PassesOn:
    """A launcher's handler, which passes signals on to the ranks of this machine that are alive. SIGTERM ends
    the job as torchrun does where none of them heeds it, and when it comes again."""

    def __init__(self, said: Callable[[], dict[int, dict[str, Any]]]):
        self._said = said
        self._first = math.inf

    def __call__(self, number: int, frame: Any) -> None:
        alive = [content for content in self._said().values() if ranks.state(content) not in ("", "Z", "?")]
        if number == signal.SIGTERM:
            now = time.monotonic()
            self._first = min(self._first, now)
            again = now - self._first > AGAIN_AFTER
            if again or not any(content["heeds"] for content in alive):
                from torch.distributed.elastic.multiprocessing import SignalException

                raise SignalException("", signal.SIGTERM)
        for content in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(content["pid"], number)


def _parsed(launcher: ModuleType, words: list[str]) -> argparse.Namespace:
    """torchrun's arguments, of which PET_ variables are the defaults. Raises ConfigError if one is wrong."""
    parser = launcher.get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser.error = refuse
    try:
        parsed = parser.parse_args(words)
        launcher.config_from_args(copy(parsed))
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"torchrun's PET_ variables: {error}; correct that variable.") from error
    return parsed


@contextlib.contextmanager
def _ends_while_waiting(folder: str) -> Iterator[None]:
    """Within the block, a signal ends a launcher that waits for other machines, and removes its `folder`.

    torch waits in compiled code, where no handler of Python runs; so a thread hears of the signal.
    """
    heard, tells = os.pipe()
    os.set_blocking(tells, False)

    def listen() -> None:
        while number := int.from_bytes(os.read(heard, 1)):
            time.sleep(1)  # where a handler can run, it has ended all by then
            if number in (signal.SIGINT, signal.SIGTERM) and not any(Path(folder).glob("*/attempt_*")):
                shutil.rmtree(folder, ignore_errors=True)
                guard.dismiss()
                os.environ.pop(LAUNCHER_SPEAKS)
                say(f"megatron-vlm: stopped by {signal.Signals(number).name}, waiting for other machines.")
                os._exit(128 + number)

    if machines() > 1:
        typer.echo(f"waiting for {os.environ['PET_NNODES']} machines at {printable(_where())}", err=True)
    listener = threading.Thread(target=listen, daemon=True)
    before = signal.set_wakeup_fd(tells)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(tells, b"\0")
        listener.join()
        for end in (heard, tells):
            os.close(end)


def _said(folder: str, count: int) -> dict[int, dict[str, Any]]:
    """The ranks' words of the last attempt: in torchrun's folder, or where that has a link to."""
    attempts = sorted(Path(folder).glob("*/attempt_*"), key=os.path.getctime)
    if not attempts:
        return {}
    return ranks.read_all(attempts[-1], count) | ranks.read_all(attempts[-1] / ranks.ELSEWHERE, count)


def _meeting(restarts: int, said: Callable[[], dict[int, dict[str, Any]]]) -> list[str]:
    """torchrun's options that say how the machines meet, and how often again after a machine or a rank ended.

    They do not meet again after what would only repeat itself: an error that a rank has named, or a hang; nor
    after a run was asked to end, except by torchrun for a machine that waits to join.
    """
    if machines() > 1:
        _where()
        if restarts and os.environ.get("PET_RDZV_BACKEND") != "c10d":
            raise ConfigError(
                "--restarts: machines meet again only where the first, HOST, waits for them; set "
                "PET_RDZV_BACKEND=c10d and PET_RDZV_ENDPOINT=HOST:PORT on each."
            )
    if not restarts:
        return ["--standalone"] if machines() == 1 else []
    from torch.distributed.elastic import rendezvous

    def handler_of(parameters: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
        parameters.backend = "c10d"
        handler = rendezvous.rendezvous_handler_registry.create_handler(parameters)
        meet = handler.next_rendezvous

        def meet_again() -> rendezvous.RendezvousInfo:
            contents = said()
            kinds = {content["ended"]["kind"] for content in contents.values() if content["ended"]}
            if kinds & {"cause", "hang"} or ("interrupt" in kinds and not handler.num_nodes_waiting()):
                raise rendezvous.RendezvousClosedError
            if contents:
                doing = max(contents.values(), key=lambda content: content["step"])["doing"]
                why = last_words(contents, {}, f"megatron-vlm: a rank ended without a word while {doing}")[1]
                why = f"{why.splitlines()[0]}\nmegatron-vlm: starting again from the last checkpoint"
                typer.echo(printable_lines(why), err=True)
            return meet()

        handler.next_rendezvous = meet_again
        return handler

    rendezvous.rendezvous_handler_registry.register("again", handler_of)
    # in a store that outlives ranks, those that follow would find addresses of those before
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    here = ["--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"] if machines() == 1 else []
    return ["--rdzv-backend=again", f"--max-restarts={restarts}", *here]


def _where() -> str:
    """Where several machines meet. Raises ConfigError if that, or this machine's number, is not said."""
    given = os.environ.get
    backend = given("PET_RDZV_BACKEND", "static")
    if backend not in ("static", "c10d"):
        raise ConfigError(
            f"PET_RDZV_BACKEND: {backend!r} is not supported; give static, the default, or c10d."
        )
    first = f"{given('PET_MASTER_ADDR')}:{given('PET_MASTER_PORT', '29500')}"
    where = given("PET_RDZV_ENDPOINT") or (backend == "static" and given("PET_MASTER_ADDR") and first)
    if not where:
        name = "PET_MASTER_ADDR" if backend == "static" else "PET_RDZV_ENDPOINT"
        raise ConfigError(f"{name} is not set: at it {machines()} machines meet; set it on each.")
    port = where.rpartition(":")[2] if ":" in where else "0"
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"PET_MASTER_PORT or PET_RDZV_ENDPOINT: {port!r} is no port; give one, as 29500.")
    if backend == "static" and given("PET_NODE_RANK") not in map(str, range(machines())):
        raise ConfigError(
            f"PET_NODE_RANK: {given('PET_NODE_RANK')!r} is no machine's number; give each its own, from 0 "
            f"to {machines() - 1}."
        )
    return where
