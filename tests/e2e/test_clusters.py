"""One run on two machines, by a launcher on each: the same figures, one reason, and going on without one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml
from places import ROOT
from programs import COMMAND, OUTSIDE_TORCHRUN, TYPED, run_anew, run_program, start_ranks
from run_results import figures
from sources import write_hf_folder, write_sharegpt

# ---- two machines


IS_THERE = os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare", "taskset")))
NAMES = Path("/etc/netns")
PORT = "29577"
FIRST_MACHINE = "10.77.0.1"


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
    where = {"PET_MASTER_ADDR": FIRST_MACHINE, "PET_MASTER_PORT": PORT, "PET_NODE_RANK": machine.name[-1]}
    if elastic:
        where = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{FIRST_MACHINE}:{PORT}"}
    return machine.start(Path(f"{log}.{machine.name}"), *TYPED, *given, PET_NNODES=nodes, **where)


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, f"no {what} within {seconds} s"
        time.sleep(0.05)


# ---- the tests


HERE = Path(__file__).parent
CLUSTER = ROOT / "examples/cluster"
STEPS, SAVED = 40, 10
WITHIN = 60  # seconds


@pytest.fixture
def machines(request):
    if not IS_THERE:
        pytest.skip("no root, or no iproute2 and util-linux")
    with two_machines(f"m{abs(hash(request.node.name)) % 10_000}") as both:
        yield both


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clusters")
    return write_hf_folder(folder / "rows", write_sharegpt(folder / "source", 60))


def words(run_dir: Path, checkpoint: Path, dataset: Path, *settings: str) -> list[str]:
    return [
        *("train", "--recipe", "gemma3_tiny_digits", "tp=1", "--run_dir", str(run_dir)),
        *("--hf_path", str(checkpoint), "--dataset_type", "hf", "--train_data_path", str(dataset)),
        *("eval_every=0", f"steps={STEPS}", "num_workers=0", "micro_batch_size=1", "global_batch_size=2"),
        *(f"save_every={SAVED}", "warmup_steps=1", "logging.tensorboard=false", *settings),
    ]


@pytest.fixture(scope="module")
def whole(tiny_gemma3, dataset, tmp_path_factory) -> list[dict]:
    """The figures of the run in two processes of one machine, undisturbed."""
    run_dir = tmp_path_factory.mktemp("whole")
    start_ranks(2, COMMAND, *words(run_dir, tiny_gemma3, dataset), log=run_dir / "log").finish()
    return figures(run_dir)


def logged(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def log(run_dir: Path, machine: Machine) -> str:
    return Path(f"{run_dir}.{machine.name}").read_text()


def in_pods(machines: list[Machine], shared: Path) -> list[subprocess.Popen]:
    """The container of the Kubernetes job on each machine, with its command and environment."""
    _, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    command = [word.replace("/shared", str(shared)) if word != "8" else "1" for word in container["command"]]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert len(machines) == job["spec"]["completions"] and given["PET_NODE_RANK"] is None
    return [
        machine.start(
            Path(f"{shared}/run.{machine.name}"), *command, **{**given, "PET_NODE_RANK": str(number)}
        )
        for number, machine in enumerate(machines)
    ]


def under_skypilot(machines: list[Machine], shared: Path) -> list[subprocess.Popen]:
    """SkyPilot's script on each machine, with the variables that it sets."""
    run = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())["run"].replace("/shared", str(shared))
    given = {"NUM_NODES": str(len(machines)), "NUM_GPUS_PER_NODE": "1"}
    given["NODE_IPS"] = "\n".join(machine.address for machine in machines)
    return [
        machine.start(
            Path(f"{shared}/run.{machine.name}"),
            *("bash", "-c", run),
            **{f"SKYPILOT_{key}": value for key, value in {**given, "NODE_RANK": str(number)}.items()},
        )
        for number, machine in enumerate(machines)
    ]


@pytest.mark.long
def test_launchers_on_two_machines_make_one_run(whole, machines, tiny_gemma3, dataset, tmp_path):
    """As the files of examples/cluster start them. A warning to one ends both alike, and both go on."""
    run_dir = tmp_path / "run"
    config = run_program(COMMAND, *words(run_dir, tiny_gemma3, dataset), "--dry-run").stdout
    (tmp_path / "run.yaml").write_text(config)
    launchers = in_pods(machines, tmp_path)
    wait_until(lambda: logged(run_dir) >= 3, 120, "third step")
    launchers[1].send_signal(signal.SIGUSR1)
    assert [launcher.wait(120) for launcher in launchers] == [75, 75], log(run_dir, machines[1])
    last = {log(run_dir, machine).splitlines()[-1] for machine in machines}
    assert len(last) == 1 and "by SIGUSR1, with a checkpoint; start the same command again" in last.pop()
    launchers = under_skypilot(machines, tmp_path)
    assert [launcher.wait(180) for launcher in launchers] == [0, 0], log(run_dir, machines[0])
    assert figures(run_dir) == whole and len(whole) == STEPS
    output = tmp_path / "scores"
    asked = ["evaluate", str(run_dir), str(dataset), f"--output={output}", "--samples=6", "--nproc=1"]
    launchers = start_on(machines, asked, output)
    assert [launcher.wait(180) for launcher in launchers] == [0, 0], log(output, machines[0])
    assert len(json.loads((output / "scores.json").read_text())["samples"]) == 6


@pytest.mark.long
def test_two_launchers_of_one_process_equal_one_of_two(whole, tiny_gemma3, dataset, tmp_path):
    """On one machine whose cores they share: OMP_NUM_THREADS=1 is the user's, as it is under `--nproc 2`."""
    command = [*TYPED, *words(tmp_path, tiny_gemma3, dataset), "--nproc=1"]
    environment = {**OUTSIDE_TORCHRUN, **FIRST, "PET_MASTER_PORT": "29579", "OMP_NUM_THREADS": "1"}
    launchers = []
    for number in range(2):
        with Path(f"{tmp_path}.{number}").open("w") as screen:
            environment["PET_NODE_RANK"] = str(number)
            launchers.append(subprocess.Popen(command, stdout=screen, stderr=screen, env=environment))
    assert [launcher.wait(300) for launcher in launchers] == [0, 0], Path(f"{tmp_path}.0").read_text()
    assert figures(tmp_path) == whole


@pytest.mark.long
def test_a_ray_job_runs_the_command_on_each_node(whole, tiny_gemma3, dataset, tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # as many threads as a rank of `whole` has
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        given = words(tmp_path / "run", tiny_gemma3, dataset)
        job = run_anew(CLUSTER / "ray_job.py", 2, *given, "--nproc=1", RAY_ADDRESS=cluster.address)
    finally:
        cluster.shutdown()
        os.sched_setaffinity(0, cores)
    assert job.returncode == 0, job.stdout + job.stderr
    assert figures(tmp_path / "run") == whole


def test_the_files_are_what_kubernetes_takes():
    validate = pytest.importorskip("kubernetes_validate")
    for one in yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()):
        validate.validate(one, "1.31", strict=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "starts_again", "code", "last"),
    [
        ("kill_once", 1, 0, "rank 1 was ended by signal 9 (SIGKILL)"),
        ("kill", 1, 137, "rank 1 was ended by signal 9 (SIGKILL)"),
        ("value", 0, 1, "rank 1, training step 3: ValueError"),
    ],
)
def test_ranks_start_again_only_after_one_was_lost(fault, starts_again, code, last, tmp_path):
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    job = run_program(HERE / "small_job.py", tmp_path, fault, "--restarts=1", PYTHONPATH=path)
    assert job.returncode == code, job.stderr
    assert job.stderr.count("starting again from the last checkpoint") == starts_again, job.stderr
    assert last in job.stderr, job.stderr
    if code == 0:
        assert "rank 1 sums 16" in job.stdout


FIRST = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_NODE_RANK": "0"}


@pytest.mark.soak
@pytest.mark.parametrize(("end", "number"), [("die", 1), ("lose_power", 1), ("die", 0)])
def test_a_machine_that_ends_ends_the_other_within_a_minute_with_the_reason(
    end, number, machines, tiny_gemma3, dataset, tmp_path
):
    """Also the first, where machines that could meet again would meet."""
    run_dir, is_first = tmp_path / "run", number == 0
    given = words(run_dir, tiny_gemma3, dataset, "steps=100000", "save_every=0", "train.hang_seconds=20")
    given += ["--nproc=1", *(["--restarts=1"] if is_first else [])]
    launchers = start_on(machines, given, run_dir, elastic=is_first)
    wait_until(lambda: logged(run_dir) >= 3, 120, "third step")
    began = time.monotonic()
    getattr(machines[number], end)()
    left = 1 - number
    assert launchers[left].wait(WITHIN) in (1, 3), log(run_dir, machines[left])
    print(f"{end}: {time.monotonic() - began:.0f} s")
    what, remedy = log(run_dir, machines[left]).splitlines()[-2:]
    assert ("lost another rank" in what) == (end == "die" and not is_first), what
    assert "tart again" in remedy


@pytest.mark.soak
def test_a_machine_that_comes_back_goes_on_bit_equal(whole, machines, tiny_gemma3, dataset, tmp_path):
    run_dir, given = tmp_path / "run", words(tmp_path / "run", tiny_gemma3, dataset)
    given += ["--nproc=1", "--restarts=1"]
    launcher, _ = start_on(machines, given, run_dir, elastic=True)
    wait_until(lambda: logged(run_dir) >= SAVED + 2, 120, f"{SAVED + 2} steps")
    machines[1].die()
    wait_until(lambda: "starting again" in log(run_dir, machines[0]), WITHIN, "restart")
    back = start_one(machines[1], given, run_dir, elastic=True)
    assert launcher.wait(180) == 0 and back.wait(60) == 0, log(run_dir, machines[0])
    assert figures(run_dir) == whole


@pytest.mark.soak
@pytest.mark.parametrize("tp", [1, 2])
def test_the_machine_that_is_left_goes_on_if_the_layout_fits_it(tp, machines, tiny_gemma3, dataset, tmp_path):
    run_dir = tmp_path / "run"
    given = words(run_dir, tiny_gemma3, dataset, f"tp={tp}", "num_workers=0", "train.hang_seconds=20")
    launcher, _ = start_on(machines, [*given, "--nproc=1", "--restarts=1"], run_dir, "1:2", True)
    wait_until(lambda: logged(run_dir) >= SAVED + 2, 120, f"{SAVED + 2} steps")
    machines[1].lose_power()
    code = launcher.wait(240)
    said = log(run_dir, machines[0])
    assert "no rank came further" in said and said.count("starting again") == 1
    if tp == 1:
        assert code == 0 and "resumed after step " in said, said
        assert [row["step"] for row in figures(run_dir)] == [*range(1, STEPS + 1)]
    else:
        assert code == 2 and "tp 2 · pp 1 · cp 1 = 2 does not divide 1 process" in said.splitlines()[-1], said
