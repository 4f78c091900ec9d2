"""How the commands run: as programs with short errors, and in several processes."""

import contextlib
import faulthandler
import io
import json
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from megatron_vlm.config import ConfigError
from megatron_vlm.config_rules.layout import check_gpus
from megatron_vlm.files import read_text
from megatron_vlm.job import ranks
from megatron_vlm.job.failures import BUG_CODE, LastWords, by_signal, interrupted
from megatron_vlm.job.ranks import LAUNCHER_SPEAKS
from megatron_vlm.job.stops import AGAIN_AFTER, WARNINGS
from megatron_vlm.messages import PrintableRecord, printable, printable_lines
from megatron_vlm.overrides import refuse_keys

START_AGAIN = "Start again."
# torchrun sends SIGTERM to all others when one rank ends, so this counts only without another reason
_BEST_FIRST = ("hang", "cause", "interrupt", "signal", "silence", "lost", "SIGTERM")

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
    # what crashes in compiled code says where; a watched rank writes it to its file
    with contextlib.suppress(io.UnsupportedOperation):  # stderr may be no file
        faulthandler.enable()
    with LastWords(name):
        for number in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            ranks.from_environment(number, 0)
        for word in sys.argv[1:] if arguments is None else arguments:
            if address := re.fullmatch(r"(?:([\w.-]+)=)?(\[?\w+:/\S*)", word):
                refuse_keys(address[1] or "the command line", address[2])
        program(arguments, prog_name=name)


def world_size() -> int | None:
    """Return torchrun's number of processes; None outside of torchrun."""
    return ranks.world_size() if "WORLD_SIZE" in os.environ else None


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
    """Run the program `module` in `nproc` processes by torch's elastic launcher. Returns the exit code.

    Under PET_NNODES, each of several machines runs it so; they meet as torchrun's other PET_ variables say.
    When ranks fail, the first that failed by itself is printed last, in place of torchrun's report. SIGUSR1
    and SIGTERM go on to ranks that heed them (see `job.stops`).

    Raises:
        ConfigError: A PET_ variable is wrong or missing, or there are `gpus` (None: as many as torch sees),
            but fewer than processes.
    """
    endpoint = _rendezvous_endpoint(restarts)
    from torch import cuda
    from torch.distributed import DistError
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import launch_agent

    check_gpus(nproc, cuda.device_count() if gpus is None else gpus)
    logging.disable(logging.ERROR)  # this process only starts others and waits
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    # in a store that outlives ranks, those that follow would find addresses of those before
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="megatron-vlm-") as folder:
        command = [f"--nproc_per_node={nproc}", f"--log-dir={folder}"]
        command += [f"--max-restarts={restarts}"] if restarts else []
        if endpoint is None:
            command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
        command += ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", "-m", module, *arguments]
        config, entrypoint, words = _parse(launcher, command)
        _wrap_rendezvous(config, folder)
        before = [signal.signal(number, _PassesOn(folder)) for number in WARNINGS]
        os.environ[LAUNCHER_SPEAKS] = str(os.getpid())
        if endpoint is not None:
            number = os.environ.get("PET_NODE_RANK")
            number = f" as number {number} (PET_NODE_RANK; each has its own)" if number else ""
            typer.echo(f"waiting for {machines()} machines at {printable(endpoint)}{number}", err=True)
        try:
            launch_agent(config, entrypoint, words)
        except SignalException as stop:
            by = "Ctrl-C" if stop.sigval == signal.SIGINT else signal.Signals(stop.sigval).name
            code = 128 + stop.sigval
            message = interrupted(list(_heartbeats(folder).values()), by)
            message = message and f"megatron-vlm: {message}"
        except ChildFailedError as failed:
            code, message = _last_words(folder, failed.failures)
        except (RendezvousError, DistError):
            lost = f"{endpoint or 'a port of this machine'}, where ranks meet, is lost, unreachable or taken"
            mistake = "; each machine needs a PET_NODE_RANK of its own" if endpoint else ""
            code, message = _last_words(folder, {}, f"megatron-vlm: {lost}{mistake}.\n{START_AGAIN}")
        else:
            return 0
        finally:
            del os.environ[LAUNCHER_SPEAKS]
            for number, handler in zip(WARNINGS, before, strict=True):
                signal.signal(number, handler)
    if message:
        print(printable_lines(message), file=sys.stderr, flush=True)
    return code


class _PassesOn:
    """A launcher's handler, which passes signals on to the ranks of this machine that are alive. SIGTERM ends
    the job as torchrun does where none of them heeds it, and when it comes again."""

    def __init__(self, folder: str):
        self._folder = folder
        self._first = math.inf

    def __call__(self, number: int, frame: Any) -> None:
        contents = _heartbeats(self._folder).values()
        alive = [content for content in contents if ranks.state(content) not in ("", "Z", "?")]
        if number == signal.SIGTERM:
            now = time.monotonic()
            self._first = min(self._first, now)
            if now - self._first > AGAIN_AFTER or not any(content["heeds"] for content in alive):
                from torch.distributed.elastic.multiprocessing import SignalException

                raise SignalException("", signal.SIGTERM)
        for content in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(content["pid"], number)


def _parse(launcher: ModuleType, words: list[str]) -> tuple[Any, Any, list[str]]:
    """Return torchrun's (configuration, entrypoint, arguments); PET_ variables are the defaults. Raises
    ConfigError with torchrun's own words if one is wrong."""
    parser = launcher.get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser.error = refuse
    try:
        return launcher.config_from_args(parser.parse_args(words))
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"torchrun's PET_ variables: {error}; correct that variable.") from error


def _wrap_rendezvous(config: Any, folder: str) -> None:
    """Make torch's rendezvous end by signals, and not take place again after what would repeat itself.

    That is an error that a rank has named, a hang, and the end of a run that was asked to end.
    """
    from torch.distributed.elastic import rendezvous

    backend = config.rdzv_backend
    config.rdzv_backend = f"{backend} {uuid.uuid4()}"

    def create(parameters: Any) -> Any:
        parameters.backend = backend
        handler = rendezvous.rendezvous_handler_registry.create_handler(parameters)
        meet = handler.next_rendezvous

        def next_rendezvous() -> Any:
            kinds = {report["kind"] for report in _reports(folder)}
            if kinds & {"cause", "hang"} or ("interrupt" in kinds and not handler.num_nodes_waiting()):
                raise rendezvous.RendezvousClosedError
            if _attempts(folder):
                why = _last_words(folder, {}, "megatron-vlm: a rank or a machine was lost")[1].splitlines()[0]
                again = "megatron-vlm: starting again from the last checkpoint"
                typer.echo(printable_lines(f"{why}\n{again}"), err=True)
            # torch waits for machines in compiled code, where no handler of Python runs
            handlers = {
                number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)
            }
            try:
                return meet()
            finally:
                for number, before in handlers.items():
                    signal.signal(number, before)

        handler.next_rendezvous = next_rendezvous
        return handler

    rendezvous.rendezvous_handler_registry.register(config.rdzv_backend, create)


def _rendezvous_endpoint(restarts: int) -> str | None:
    """Where several machines meet; None for one. Raises ConfigError if that, or this machine's number, is
    missing or wrong: torch would say so later, or wait."""
    variables = os.environ
    if (count := machines()) == 1:
        return None
    backend = variables.get("PET_RDZV_BACKEND", "static")
    if backend not in ("static", "c10d"):
        raise ConfigError(
            f"PET_RDZV_BACKEND: {backend!r} is not supported; give static, the default, or c10d."
        )
    endpoint = variables.get("PET_RDZV_ENDPOINT", "")
    if not endpoint and backend == "static" and variables.get("PET_MASTER_ADDR"):
        endpoint = f"{variables['PET_MASTER_ADDR']}:{variables.get('PET_MASTER_PORT', '29500')}"
    if not endpoint:
        name = "PET_MASTER_ADDR" if backend == "static" else "PET_RDZV_ENDPOINT"
        raise ConfigError(f"{name} is not set: at it {count} machines meet; set it on each.")
    port = endpoint.rpartition(":")[2] if ":" in endpoint else "0"
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"PET_MASTER_PORT or PET_RDZV_ENDPOINT: {port!r} is no port; give one, as 29500.")
    number = variables.get("PET_NODE_RANK")
    if backend == "static" and number not in map(str, range(count)):
        raise ConfigError(
            f"PET_NODE_RANK: {number!r} is no machine's number; give each its own, from 0 to {count - 1}."
        )
    if restarts and backend != "c10d":
        raise ConfigError(
            "--restarts: machines meet again only where the first, HOST, waits for them; set "
            "PET_RDZV_BACKEND=c10d and PET_RDZV_ENDPOINT=HOST:PORT on each."
        )
    return endpoint


# ---- why ranks ended ---------------------------------------------------------------------------------------


def _attempts(folder: str) -> list[Path]:
    """torchrun's folders of the starts of the ranks, the last one last."""
    return sorted(Path(folder).glob("*/attempt_*"), key=os.path.getctime)


def _heartbeats(folder: str) -> dict[int, dict[str, Any]]:
    """Rank → content of its file in the last attempt: in torchrun's folder, or where that has a link to."""
    if not (attempts := _attempts(folder)):
        return {}
    shared = attempts[-1] / ranks.SHARED
    place = shared if shared.exists() else attempts[-1]
    return ranks.read_all(place, 1 + max((int(f.stem[4:]) for f in place.glob("rank*.json")), default=-1))


def _reports(folder: str) -> list[dict[str, Any]]:
    """The texts that the ranks of the last attempt wrote into torchrun's error files, see `ranks.tell`."""
    reports = []
    for file in _attempts(folder)[-1].glob("*/error.json") if _attempts(folder) else ():
        message = json.loads(read_text(file))["message"]
        reports.append({"message": message["message"], **message["extraInfo"]})
    return reports


def _last_words(folder: str, failures: Mapping[int, Any], otherwise: str = "") -> tuple[int, str]:
    """(exit code, message) of a job: of the rank that failed first, by its own report or by its exit code."""
    reasons = [
        (_BEST_FIRST.index(report["kind"]), report["time"], report["code"], report["message"])
        for report in _reports(folder)
        if "kind" in report and report["message"]
    ]
    heartbeats = _heartbeats(folder)
    for rank, failure in failures.items():
        code = failure.exitcode
        content = heartbeats.get(rank, {})
        kind = "SIGTERM" if code == -signal.SIGTERM else "silence"
        message = f"rank {rank} ended with code {code} and said nothing; MEGATRON_VLM_DEBUG=1 says more."
        if code < 0:
            kind = kind if kind == "SIGTERM" else "signal"
            again = content.get("again", ranks.AGAIN)
            message = by_signal(f"rank {rank}", -code, again, content.get("doing", ""))
            code = 128 - code
        if not Path(failure.error_file).is_file():
            reasons.append((_BEST_FIRST.index(kind), 0.0, code, f"megatron-vlm: {message}"))
    return min(reasons, default=(0, 0.0, BUG_CODE, otherwise))[2:]
