"""Kinds and positions of a document's tokens: which are placeholders, and M-RoPE positions.

Called by data workers on CPU, one document at a time, so that the model needs no position code.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.batch import GenericVisualInputs

TEXT, IMAGE, VIDEO = 0, 1, 2

# Token ids (T,) of one document -> TEXT, IMAGE or VIDEO for each. Tensors give tensors, arrays give arrays.
Kinds = Callable[[Any], Any]


def mrope_positions(
    input_ids_T: Tensor,
    visual: GenericVisualInputs | None,
    *,
    kinds: Kinds,
    merge_size: int,
    tokens_per_second: float | None = None,
) -> Tensor:
    """(3, T) int64: time, height and width of every token of one document (arXiv 2409.12191, section 2.1).

    Text counts up, equally on all axes. An image or video that starts at position p has height p + row and
    width p + column in merged patches; time is p in an image, and grows in a video. What follows starts one
    after the largest position so far on any axis.

    With `tokens_per_second` (Qwen2-VL, Qwen2.5-VL) a video is one run of placeholders, and its time grows
    with `second_per_grid_ts` (one second if absent). Without it, the prompt tells the time in text, and each
    frame is a run of its own, with the positions of an image.

    Raises ValueError if placeholders and grids do not match.
    """
    items = _items(visual, merge_size, tokens_per_second)
    kinds_T = kinds(input_ids_T.numpy())  # in workers, one torch operation costs as much as several of numpy
    where = np.flatnonzero(kinds_T)
    out, end, start, seen = np.empty((3, len(kinds_T)), np.int64), 0, 0, 0
    # Each turn places the text up to the next item, then the item, which starts where that text ends. What
    # follows starts behind the item's largest position.
    while seen < len(where):  # tokens done: end; next position: start; placeholders done: seen
        first = int(where[seen])
        item = next(items[int(kinds_T[first])], np.empty((3, 0)))
        length = item.shape[1]
        run = kinds_T[first : first + max(length, 1)]
        if not length or len(run) < length or (run != run[0]).any():
            raise ValueError(
                f"token {first}: {(run == run[0]).sum()} placeholders, but the grids have "
                f"{f'an item of {length} visual tokens' if length else 'no item left'} there"
            )
        out[:, end:first] = np.arange(start, start + first - end)
        start, end, seen = start + first - end, first + item.shape[1], seen + item.shape[1]
        out[:, first:end] = item + start
        start += int(item.max()) + 1
    if unplaced := sum(1 for kind in items.values() for _ in kind):
        raise ValueError(
            f"{unplaced} images or video frames have no placeholders among {len(kinds_T)} tokens"
        )
    out[:, end:] = np.arange(start, start + len(kinds_T) - end)
    return torch.from_numpy(out)


def _items(
    visual: GenericVisualInputs | None, merge_size: int, tokens_per_second: float | None
) -> dict[int, Iterator[np.ndarray]]:
    """For both kinds, the positions (3, M) of each item, counted from 0 inside the item."""
    visual = visual or GenericVisualInputs()
    images = [] if visual.image_grid_thw is None else visual.image_grid_thw.tolist()
    videos = [] if visual.video_grid_thw is None else visual.video_grid_thw.tolist()
    intervals = [tokens_per_second] * len(videos)
    if tokens_per_second is None:  # frames, of one moment each
        videos = [[1, h, w] for t, h, w in videos for _ in range(t)]
        intervals = [0.0] * len(videos)
    elif visual.second_per_grid_ts is not None:
        intervals = [seconds * tokens_per_second for seconds in visual.second_per_grid_ts.tolist()]
    return {
        IMAGE: (_grid(grid, merge_size, 1.0) for grid in images),
        VIDEO: (_grid(grid, merge_size, every) for grid, every in zip(videos, intervals, strict=True)),
    }


def _grid(grid: list[int], merge_size: int, interval: float) -> np.ndarray:
    t, h, w = grid[0], grid[1] // merge_size, grid[2] // merge_size
    positions = np.empty((3, t, h, w), np.int64)
    times = np.arange(t, dtype=np.float32) * np.float32(interval) if t > 1 else np.zeros(1)
    positions[0] = times[:, None, None]  # cut to whole positions
    positions[1], positions[2] = np.arange(h)[:, None], np.arange(w)
    return positions.reshape(3, -1)
