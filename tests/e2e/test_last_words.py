"""Whatever ends a job of two ranks: the last lines are the reason, said once, without a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from programs import run_program

HERE = Path(__file__).parent
AT_ONCE = 4
HANG = 15  # seconds; imports count as work, but this machine may be slow between them
FROM_CHECKPOINT = r"Start the same command again: it goes on from what is saved\."
STACKS = r"The stacks of all ranks and workers are in .*/errors; "
LONG, SOAK = pytest.mark.long, pytest.mark.soak
IN_LONG = ("interrupt launcher", "terminate launcher", "kill", "stop", "hang")

# fault, of two ranks or one alone, exit code, pattern of each of the last lines
CASES = [
    (
        "value",
        2,
        1,
        r"rank 1, training step 3: ValueError: invalid literal .*'x'; in <lambda> \(small_job.py:\d+\)",
        r"This is a bug .*; the traceback is in .*/errors/rank1.txt\.",
    ),
    ("path", 1, 2, r"training step 3: No such file or directory: /no/such\\x1b\[31mfile; look at that path"),
    (
        "interrupt",
        1,
        130,
        r"stopped by Ctrl-C after step 2; start the same command again: it goes on from what is saved\.",
    ),
    ("terminate", 1, 143, r"stopped by SIGTERM after step 2; start the same command again: "),
]
LONG_CASES = [
    ("interrupt launcher", 2, 130, r"stopped by Ctrl-C after step 2; start the same command again: "),
    ("terminate launcher", 2, 143, r"stopped by SIGTERM\."),
    (
        "kill",
        2,
        137,
        r"rank 1 was ended by signal 9 \(SIGKILL\): .* want of memory",
        FROM_CHECKPOINT,
    ),
    (
        "stop",
        2,
        3,
        rf"came further for {HANG} s: rank 1 \(pid \d+\) is stopped while training step 3\.",
        STACKS,
    ),
    ("exit", 1, 1, r"training step 3: it left by sys.exit\(0\); start the same command again"),
    (
        "full",
        1,
        2,
        r"saving step 3 in .*: No space left on device; make room \(`df -h`\), then start the same ",
    ),
    ("hang", 2, 3, r"rank 1 \(pid \d+\) hangs while training step 3, in .*small_job.py:\d+", STACKS),
    ("data", 2, 3, r"rank 1 \(pid \d+\) hangs while waiting for the data of step 3, in wait ", STACKS),
    ("save", 1, 3, r"rank 0 \(pid \d+\) hangs while saving step 3, in .*small_job.py:\d+", STACKS),
    ("before", 1, 3, r"rank 0 \(pid \d+\) hangs while starting, in .*small_job.py:\d+", STACKS),
    ("spin", 1, 3, r"rank 0 \(pid \d+\) hangs while training step 3, in spin \(small_job.py:\d+\)", STACKS),
    (
        "crash",
        2,
        139,
        r"rank 1 was ended by signal 11 \(SIGSEGV\): it crashed",
        FROM_CHECKPOINT,
    ),
    ("config", 2, 2, r"train.steps: 0 is less than 1\."),
    ("os_exit_7", 2, 7, r"rank 1 ended with code 7 and gave no reason"),
]


def end(run_dir: Path, fault: str, ranks: int, *launcher: str) -> tuple[int, str]:
    """(exit code, all that was printed) of a job in which this happens."""
    words = [run_dir, fault, "--hang-seconds", HANG, *(["--alone", "--rank", 0] if ranks == 1 else [])]
    environment = {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}
    if launcher:
        command, environment = [sys.executable, *launcher, "-m", "small_job"], os.environ | environment
        options = {"env": environment, "capture_output": True, "text": True, "timeout": 280}
        done = subprocess.run([*command, *map(str, words)], **options)
    else:  # of two ranks, torchrun starts both from nothing
        done = run_program(HERE / "small_job.py", *words, timeout=280, **environment)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory) -> Iterator[dict[tuple[str, int], tuple[Path, Future]]]:
    """(fault, ranks) -> its run folder and `end` of it. They mostly wait: several run beside each other."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {}
        for item in request.session.items:
            case = getattr(item, "callspec", None)
            if item.path == request.path and case and "lines" in case.params:
                fault, ranks = case.params["fault"], case.params["ranks"]
                run_dir = tmp_path_factory.mktemp(fault)
                found[fault, ranks] = run_dir, pool.submit(end, run_dir, fault, ranks)
        yield found


@pytest.mark.parametrize(
    ("fault", "ranks", "code", "lines"),
    [(*case[:3], case[3:]) for case in CASES]
    + [pytest.param(*case[:3], case[3:], marks=LONG if case[0] in IN_LONG else SOAK) for case in LONG_CASES],
)
def test_the_last_lines_are_the_reason(jobs, fault, ranks, code, lines):
    run_dir, job = jobs[fault, ranks]
    ended, output = job.result()
    assert ended == code, output
    printed = output.splitlines()
    assert printed[-len(lines)].startswith("megatron-vlm: "), output
    for pattern, line in zip(lines, printed[-len(lines) :], strict=True):
        assert re.search(pattern, line), output
    assert "Traceback" not in output and len(printed) == len(lines)
    assert not still_running(run_dir)
    if fault == "data":
        assert re.search(r"worker .*\n(.*\n)*.*in __getitem__", (run_dir / "errors/rank1.txt").read_text())
    if fault == "hang":
        stacks = (run_dir / f"errors/rank{ranks - 1}.txt").read_text()
        assert "training step 3" in stacks and re.search(r"small_job.py.*, line \d+ in <lambda>", stacks)


@SOAK
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("value", r"rank 1, training step 3: ValueError: invalid literal .*'x'; in <lambda>"),
        ("stop", rf"no rank came further for {HANG} s: rank 1 \(pid \d+\) is stopped"),
    ],
)
def test_under_torchrun_itself_the_rank_that_failed_speaks_first(fault, reason, tmp_path):
    """torchrun's own report, with its traceback, comes after it: nothing of ours can be last there."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    ended, output = end(tmp_path, fault, 2, *torchrun)
    assert ended == 1, output
    ours = [line for line in output.splitlines() if line.startswith("megatron-vlm: ")]
    assert re.search(reason, ours[0]), output
    assert "Traceback" not in output[: output.index(ours[0])]
    assert not still_running(tmp_path)


def still_running(run_dir: Path) -> list[str]:
    """Command lines of processes of the job, looked at for some seconds."""
    for _ in range(50):
        found = [line for line in map(_command, Path("/proc").glob("[0-9]*/cmdline")) if str(run_dir) in line]
        if not found:
            break
        time.sleep(0.1)
    return found


def _command(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.long
def test_a_rank_stopped_for_a_while_changes_nothing(tmp_path):
    code, output = end(tmp_path, "pause", 2)
    assert code == 0 and sorted(output.splitlines()) == ["rank 0 sums 16", "rank 1 sums 16"]
    assert not (tmp_path / "errors").exists()


@pytest.mark.parametrize("when", ["it is stopped", "it imports"])
def test_a_rank_ends_with_its_launcher_that_is_killed(when, tmp_path):
    rank = (
        "import os, signal, sys, time; from megatron_vlm.job import watchdog\n"
        "while sys.argv[1] == 'it imports' and str(os.getppid()) == os.environ[watchdog.LAUNCHER]: pass\n"
        "with watchdog.watching(sys.argv[2], 60): os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)"
    )
    launcher = (
        "import os, signal, subprocess, sys; from megatron_vlm.job import watchdog\n"
        "env = os.environ | {'TORCHELASTIC_RUN_ID': 'a', watchdog.LAUNCHER: str(os.getpid())}\n"
        "rank = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], env=env)\n"
        "print(rank.pid, flush=True)\n"
        "sys.argv[2] == 'it is stopped' and os.waitpid(rank.pid, os.WUNTRACED)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", launcher, rank, when, str(tmp_path)], stdout=subprocess.PIPE
    ) as started:
        left = psutil.Process(int(started.stdout.readline()))
    alive = psutil.wait_procs([left], timeout=20)[1]
    for process in alive:
        process.kill()
    assert not alive
