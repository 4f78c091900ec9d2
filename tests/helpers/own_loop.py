"""A loop of a user's own, as docs/rl.md has it: python -m own_loop CHECKPOINT SAMPLES FOLDER CATCHES

The second rank has no memory left in the backward pass; with CATCHES, it catches that and waits.
"""

from __future__ import annotations

import sys
import time

from megatron_vlm.job import watchdog
from megatron_vlm.job.failures import LastWords


def main() -> None:
    import failing_ranks
    import policy_in_ranks
    import saved_cases
    import torch

    path, held, _, catches = sys.argv[1:]
    samples, _ = saved_cases.read(held)
    policy = policy_in_ranks.policy_of(path, failing_ranks.TP, 300)
    failing_ranks.learn_twice(policy, samples)
    if torch.distributed.get_rank() == 1:
        failing_ranks.in_backward(policy)
    try:
        failing_ranks.learn(policy, samples)
    except torch.OutOfMemoryError:
        if catches == "no":
            raise
        time.sleep(1000)


if __name__ == "__main__":
    with LastWords("own_loop"), watchdog.watching(sys.argv[3], hang_seconds=1800):
        main()
