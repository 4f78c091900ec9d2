"""Starts the ranks of `--nproc` by torch's elastic agent, and says why they ended. It imports torch.

PET_ variables, the meeting of machines, the ranks' environment and error files are torch's. Added here:
ranks start again only if one was lost, warnings are passed on to them, and the job has one reason.
"""

import contextlib
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import cuda
from torch.distributed import DistError, run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from megatron_vlm.config import ConfigError
from megatron_vlm.files import read_text
from megatron_vlm.job.errors import BUG_CODE, SIGNALS, killed_message
from megatron_vlm.job.stops import AGAIN_AFTER, STARTED, WARNINGS, started
from megatron_vlm.job.watchdog import AGAIN, LAUNCHER
from megatron_vlm.messages import PrintableText, printable
from megatron_vlm.validate import check_gpus

# what ranks end by, the best reason first; the last two are brought about by others
_BEST_FIRST = ("error", "interrupt", "hang", "killed", "lost", "terminated")


class Reason(NamedTuple):
    """Why a rank ended; the least of several is the reason of the job."""

    order: int  # in _BEST_FIRST
    time: float  # seconds since the epoch
    code: int  # the job's exit code
    message: str  # printable


def launch(nproc: int, arguments: Sequence[str], module: str = "megatron_vlm.cli", restarts: int = 0) -> int:
    """Run `python -m module` in `nproc` processes on this machine, and return the exit code.

    Args:
        nproc: Processes of this machine.
        arguments: Words of the command line of each.
        module: What they run.
        restarts: How often ranks start again after one was lost, or all hung.

    Raises:
        ConfigError: A PET_ variable is wrong, or there are fewer GPUs than processes.
    """
    check_gpus(nproc, cuda.device_count())
    logging.disable(logging.ERROR)  # this process only starts others and waits
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    # in a store that outlives ranks, those that follow would find addresses of those before
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ |= {LAUNCHER: str(os.getpid()), STARTED: str(started)}
    api.LocalElasticAgent = _Agent
    with tempfile.TemporaryDirectory(prefix="megatron-vlm-") as folder:
        words = [f"--nproc_per_node={nproc}", f"--log-dir={folder}", f"--max-restarts={restarts}"]
        if os.environ.get("PET_NNODES", "1") == "1":
            words += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
        words += ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", "-m", module, *arguments]
        try:
            config, entrypoint, words = run.config_from_args(run.get_args_parser().parse_args(words))
        except ValueError as error:
            raise ConfigError(f"torchrun's PET_ variables: {error}; correct that variable.") from error
        try:
            api.launch_agent(config, entrypoint, words)
            return 0
        except SignalException as stop:
            code = 128 + stop.sigval
            text = f"megatron-vlm: stopped by {SIGNALS.get(code, f'signal {stop.sigval}')}."
            stopped = [reason for reason in _reasons(folder) if reason.code == code]
            reason = min(stopped, default=Reason(1, 0, code, text))
        except ChildFailedError as failed:
            reason = min(_reasons(folder, failed.failures))
        except (RendezvousError, DistError):
            # ranks that lost this machine's connections may have said more
            text = f"megatron-vlm: the machines do not meet: one is lost, or two have one number; {AGAIN}."
            reason = min([*_reasons(folder), Reason(len(_BEST_FIRST), math.inf, BUG_CODE, text)])
    print(printable(reason.message), file=sys.stderr, flush=True)
    return reason.code


class _Agent(LocalElasticAgent):
    """Torch's agent with our rules for signals and for starting again."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._first_warning = math.inf
        for number in WARNINGS:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: Any) -> None:
        """Pass a warning on to the ranks, which save and end. A second SIGTERM ends the job at once."""
        pids = self._pcontext.pids().values() if self._pcontext else ()
        if number == signal.SIGTERM:
            self._first_warning = min(self._first_warning, time.monotonic())
            if not pids or time.monotonic() - self._first_warning > AGAIN_AFTER:
                raise SignalException("", signal.SIGTERM)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _rendezvous(self, worker_group: Any) -> None:
        if os.environ.get("PET_NNODES", "1") != "1":
            names = ("PET_NNODES", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_NODE_RANK")
            variables = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
            print(printable(f"waiting for the other machines: {variables}"), file=sys.stderr, flush=True)
        # torch waits for machines in compiled code, where no handler of Python runs
        handlers = {
            number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            super()._rendezvous(worker_group)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and self._remaining_restarts:
            reason = min(_reasons(self._logs_specs.root_log_dir, result.failures))
            if _BEST_FIRST[reason.order] not in ("hang", "killed", "lost"):  # it would repeat itself
                self._remaining_restarts = 0
            else:
                print(reason.message.splitlines()[0], file=sys.stderr)
        return result

    def _restart_workers(self, worker_group: Any) -> None:
        print("megatron-vlm: starting again from the last checkpoint", file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)


def _reasons(folder: str, failures: Mapping[int, ProcessFailure] | None = None) -> list[Reason]:
    """Return why the ranks of the last start ended.

    By what they wrote into torch's error files (see `watchdog.report_end`); of `failures` without such a
    file, by the exit code.
    """
    reasons = []
    starts = sorted(Path(folder).glob("*/attempt_*"), key=os.path.getctime)
    for file in starts[-1].glob("*/error.json") if starts else ():
        report = json.loads(read_text(file))["message"]
        extra = report["extraInfo"]
        order = _BEST_FIRST.index(extra["kind"])
        reasons.append(Reason(order, extra["time"], extra["code"], PrintableText(report["message"])))
    for rank, failure in (failures or {}).items():
        if os.path.isfile(failure.error_file):
            continue
        kind, code, who = "killed", failure.exitcode, f"megatron-vlm: rank {rank}"
        text = f"{who} ended with code {code} and gave no reason; MEGATRON_VLM_DEBUG=1 shows more."
        if code == -signal.SIGTERM:
            kind, text = "terminated", "megatron-vlm: stopped by SIGTERM."
        elif code < 0:
            text = killed_message(who, -code)
        code = 128 - code if code < 0 else code
        reasons.append(Reason(_BEST_FIRST.index(kind), 0.0, code, text))
    return reasons
