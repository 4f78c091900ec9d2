"""A loop of a user's own, as docs/rl.md has it: python -m own_loop CHECKPOINT SAMPLES FOLDER CATCHES

The second rank has no memory left in the backward pass; with CATCHES, it catches that and waits.
"""

from __future__ import annotations

import sys
import time

from megatron_vlm.job import watchdog
from megatron_vlm.job.failures import LastWords


def main() -> None:
    import alarm_cells
    import policy_cells
    import torch

    path, held, _, catches = sys.argv[1:]
    samples, _ = torch.load(held, weights_only=False)
    policy = policy_cells.policy_of(path, alarm_cells.TP, 300)
    alarm_cells.learn_twice(policy, samples)
    if torch.distributed.get_rank() == 1:
        alarm_cells.in_backward(policy)
    try:
        alarm_cells.learn(policy, samples)
    except torch.OutOfMemoryError:
        if catches == "no":
            raise
        time.sleep(1000)


if __name__ == "__main__":
    with LastWords("own_loop"), watchdog.watching(sys.argv[3], hang_seconds=1800):
        main()
