"""Two machines on this one, as far as a kernel can: each has its own network, name and core. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from programs import OUTSIDE_TORCHRUN, TYPED

IS_THERE = os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare", "taskset")))
NAMES = Path("/etc/netns")
PORT = "29577"
FIRST = "10.77.0.1"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


@dataclass
class Machine:
    """A network namespace, in which commands run under a host name of their own."""

    name: str
    address: str
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, log: Path, *command: str, **environment: str) -> subprocess.Popen:
        """Run a command there; what it prints goes to `log`."""
        core = str(int(self.name[-1]) % os.cpu_count())
        words = ["ip", "netns", "exec", self.name, "taskset", "--cpu-list", core, "unshare", "--uts"]
        words += ["sh", "-c", 'hostname "$0"; exec "$@"', self.name, *command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {**OUTSIDE_TORCHRUN, "PATH": path, **environment}
        with log.open("a") as screen:
            self.started.append(subprocess.Popen(words, stdout=screen, stderr=screen, env=given))
        return self.started[-1]

    def lose_power(self) -> None:
        """From now on nothing that runs there is heard of: its network ends before its processes do."""
        ip("-n", self.name, "link", "set", "eth0", "down")
        self.die()

    def die(self) -> None:
        """Kill all that was started there."""
        for process in self.started:
            if process.poll() is None:
                one = psutil.Process(process.pid)
                for child in [one, *one.children(recursive=True)]:
                    child.kill()
                process.wait(30)


@contextmanager
def two_machines(name: str) -> Iterator[list[Machine]]:
    both = [Machine(f"{name}-{number}", f"10.77.0.{number + 1}") for number in range(2)]
    hosts = "127.0.0.1 localhost\n" + "".join(
        f"{machine.address} {machine.name} train-{number}.train\n" for number, machine in enumerate(both)
    )
    for machine in both:
        ip("netns", "add", machine.name)
        NAMES.joinpath(machine.name).mkdir(parents=True)
        NAMES.joinpath(machine.name, "hosts").write_text(hosts)  # its /etc/hosts
    try:
        ends = [["eth0", "netns", machine.name] for machine in both]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for machine in both:
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", machine.name, "link", "set", device, "up")
        yield both
    finally:
        for machine in both:
            machine.die()
            ip("netns", "delete", machine.name)
            shutil.rmtree(NAMES / machine.name)


def start_on(
    machines: list[Machine], given: list[str], log: Path, nodes: str = "2", elastic: bool = False
) -> list[subprocess.Popen]:
    """`megatron-vlm GIVEN` on each machine; they meet at the first, and log to LOG.<name of machine>."""
    return [start_one(machine, given, log, nodes, elastic) for machine in machines]


def start_one(
    machine: Machine, given: list[str], log: Path, nodes: str = "2", elastic: bool = False
) -> subprocess.Popen:
    where = {"PET_MASTER_ADDR": FIRST, "PET_MASTER_PORT": PORT, "PET_NODE_RANK": machine.name[-1]}
    if elastic:
        where = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{FIRST}:{PORT}"}
    return machine.start(Path(f"{log}.{machine.name}"), *TYPED, *given, PET_NNODES=nodes, **where)


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, f"no {what} within {seconds} s"
        time.sleep(0.05)
