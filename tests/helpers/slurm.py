"""A Slurm of one machine with two node daemons, from the distribution's packages. It needs root."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
