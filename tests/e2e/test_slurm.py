"""The job of examples/cluster under a real Slurm: two nodes, the warning of its time limit, a requeue."""

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import COMMAND, run_program
from run_results import figures
from sources import write_sharegpt

# ---- a cluster of Slurm


PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
IS_THERE = os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))
MUNGE = Path("/run/munge/munge.socket.2")

# Of a requeued job, Slurm waits until its credential is over: 20 seconds in place of 120.
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthInfo=cred_expire=20
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdPidFile={root}/%n.pid
SlurmdLogFile={root}/%n.log
SlurmdSpoolDir={root}/%n
StateSaveLocation={root}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=all Nodes=node1,node2 Default=YES State=UP
"""


@contextmanager
def slurm(root: Path) -> Iterator[dict[str, str]]:
    """The environment of Slurm's commands, while a controller and two node daemons run in `root`."""
    for name in ("state", "node1", "node2"):
        (root / name).mkdir(parents=True)
    conf = root / "slurm.conf"
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        for one in (first, second, third):
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in (first, second, third)]
    conf.write_text(
        CONF.format(host=socket.gethostname().split(".")[0], root=root, ports=ports, cpus=os.cpu_count())
    )
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    programs = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]]
    daemons = []
    if not MUNGE.exists():
        MUNGE.parent.mkdir(exist_ok=True)
        shutil.chown(MUNGE.parent, "munge")
        user = pwd.getpwnam("munge")
        as_munge = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        daemons.append(subprocess.Popen(["munged", "--foreground"], **as_munge))
    try:
        for program in programs:
            with (root / f"{program[0]}.out").open("ab") as out:
                daemons.append(subprocess.Popen(program, env=environment, stdout=out, stderr=out))
        wait_for(lambda: said(environment, "sinfo", "-h", "-o", "%D %t") == "2 idle", 30, "two idle nodes")
        yield environment
    finally:
        for daemon in daemons[::-1]:
            daemon.terminate()
            daemon.wait(30)


def said(environment: dict[str, str], *command: str) -> str:
    """What a command of Slurm prints."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30).stdout.strip()


def wait_for(holds, seconds: float, what: str) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, f"no {what} after {seconds} s"
        time.sleep(0.2)


# ---- the tests


SCRIPT = Path(__file__).parents[2] / "examples/cluster/sbatch"
STEPS = 800


def words(run_dir: Path, checkpoint: Path, rows: Path, *settings: str) -> list[str]:
    return [
        *("--recipe", "gemma3_tiny_digits", "tp=1", "--run_dir", str(run_dir), f"steps={STEPS}"),
        *("--hf_path", str(checkpoint), "--dataset_type", "hf", "--train_data_path", str(rows)),
        *("eval_every=0", "save_every=0", "num_workers=0", "micro_batch_size=1", "global_batch_size=2"),
        *("warmup_steps=1", "logging.tensorboard=false", *settings),
    ]


@pytest.mark.soak
@pytest.mark.skipif(not IS_THERE, reason="no root, or no slurmctld, slurmd, slurm-client and munge")
def test_a_job_that_is_warned_of_its_time_limit_is_requeued_and_goes_on_bit_equal(tiny_gemma3, tmp_path):
    rows = write_sharegpt(tmp_path / "source", 60)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    with slurm(tmp_path / "slurm") as environment:
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        small = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]
        limits = ["--time=2", "--signal=USR1@60", f"--output={tmp_path}/job.log"]
        command = ["sbatch", "--parsable", *small, *limits, str(SCRIPT), *words(stopped, tiny_gemma3, rows)]
        job = said(environment, *command)
        assert job.isdigit()
        done = "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"
        told = lambda: said(environment, "scontrol", "show", "job", job)  # noqa: E731
        wait_for(lambda: any(f"JobState={state}" in told() for state in done), 400, "end of the job")
        log = (tmp_path / "job.log").read_text()
        assert "JobState=COMPLETED" in told(), log
        assert int(re.search(r"Restarts=(\d+)", told())[1]) >= 1
    steps = [int(step) for step in re.findall(rf"stopped after step (\d+) of {STEPS} by SIGUSR1", log)]
    assert steps and f"resumed after step {steps[0]} " in log
    train = run_program(COMMAND, "train", "--nproc=2", *words(whole, tiny_gemma3, rows))
    assert train.returncode == 0
    assert figures(stopped) == figures(whole)
