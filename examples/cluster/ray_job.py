"""One command on several machines of a Ray cluster; its exit code is the command's.

See docs/how-to/multi-node.md.

ray job submit --working-dir examples/cluster -- python ray_job.py 2 train --nproc 8 --config /shared/run.yaml

Every machine has the package installed and sees /shared; paths in run.yaml are whole ones, as /shared/data.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_retries=0)
def meeting_point() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("", 0))
        return {
            "PET_MASTER_ADDR": ray.util.get_node_ip_address(),
            "PET_MASTER_PORT": str(free.getsockname()[1]),
        }


@ray.remote(max_retries=0)
def launch(words: list[str], environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "megatron_vlm.cli", *words]
    return subprocess.run(command, env={**os.environ, **environment}).returncode


def main(machines: int, processes: int, words: list[str]) -> int:
    ray.init()
    gpus = processes if "GPU" in ray.cluster_resources() else 0
    group = placement_group([{"CPU": 1, "GPU": gpus}] * machines, strategy="STRICT_SPREAD")
    options = [
        {"num_gpus": gpus, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}
        for bundle in range(machines)
    ]
    where = {"PET_NNODES": str(machines), **ray.get(meeting_point.options(**options[0]).remote())}
    launched = [
        launch.options(**options[rank]).remote(words, {**where, "PET_NODE_RANK": str(rank)})
        for rank in range(machines)
    ]
    return max(ray.get(launched))


def number(text: str) -> int:
    if (found := int(text)) < 1:
        raise ValueError
    return found


if __name__ == "__main__":
    usage = "ray_job.py MACHINES COMMAND --nproc PROCESSES_OF_EACH [...]"
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    parser.add_argument("machines", type=number)
    parser.add_argument("command")
    parser.add_argument("--nproc", type=number, required=True)
    given, others = parser.parse_known_args()
    sys.exit(main(given.machines, given.nproc, [given.command, f"--nproc={given.nproc}", *others]))
