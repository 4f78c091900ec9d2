"""One command on several machines of a Ray cluster; its exit code is the command's. See docs/clusters.md.

ray job submit -- python examples/cluster/ray_job.py 2 train --nproc 8 --config /shared/run.yaml
"""

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


def main(machines: int, words: list[str]) -> int:
    ray.init()
    gpus = int(words[words.index("--nproc") + 1]) if "GPU" in ray.cluster_resources() else 0
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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
