"""Pinned memory of the host, without what torch would waste of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST = 2**32  # bytes of a block, unless a tensor needs more
ALIGNED = 256  # bytes


def host_tensors(likes: Sequence[Tensor], pinned: bool) -> list[Tensor]:
    """Return tensors like these in host memory, without numbers; many take hardly more than their bytes.

    Torch rounds each block of pinned memory up to a power of two: 512 MiB for a tensor of 259. So blocks are
    such powers, as large as can be filled, and tensors lie in them one after the other, the largest first.
    """
    places = [-(-like.nbytes // ALIGNED) * ALIGNED for like in likes]
    remaining = sorted(range(len(likes)), key=places.__getitem__, reverse=True)
    tensors: dict[int, Tensor] = {}
    while remaining:
        total = sum(places[i] for i in remaining)
        filled = min(LARGEST, 1 << max(0, total.bit_length() - 1))
        largest = 1 << (max(ALIGNED, places[remaining[0]]) - 1).bit_length()
        block = torch.empty(max(filled, largest), dtype=torch.uint8, pin_memory=pinned)
        start = 0
        unplaced = []
        for i in remaining:
            if start + places[i] > len(block):
                unplaced.append(i)
                continue
            tensors[i] = block[start : start + likes[i].nbytes].view(likes[i].dtype).view(likes[i].shape)
            start += places[i]
        remaining = unplaced
    return [tensors[i] for i in range(len(likes))]
