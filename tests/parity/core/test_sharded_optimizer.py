"""The optimizer's share of each rank in checkpoints: boxes of tensors, and no memory for others."""

import checkpoint_memory
import pytest
import torch

from megatron_vlm.training.optimizer import boxes
from tiny.distributed import run_distributed

MOST_MEMORY = 2.5  # shards; docs/reference/checkpoints.md has what was seen


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 3, 4), (2, 3, 2, 2)])
def test_boxes_hold_exactly_a_run_of_numbers_in_order(sizes):
    numbers = torch.arange(torch.Size(sizes).numel()).view(sizes)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            found = list(boxes(sizes, start, stop))
            cut = [
                numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in found
            ]
            assert torch.cat([numbers[:0].flatten(), *cut]).tolist() == list(range(start, stop))
            assert len(found) <= 2 * len(sizes) - 1


@pytest.mark.soak
def test_a_checkpoint_needs_little_more_memory_than_the_shard_of_a_rank(tmp_path):
    for rank in run_distributed(4, checkpoint_memory.of_rank, str(tmp_path), False):
        assert rank["shard"] > 60e6  # else the next would hold for whatever programs need
        assert rank["save"] <= MOST_MEMORY * rank["shard"]
        assert rank["load"] <= MOST_MEMORY * rank["shard"]
