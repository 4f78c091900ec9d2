"""What the tokens of a document are, and where: kinds of placeholders and M-RoPE positions.

Called by data workers on CPU, one document at a time, so that the model needs no position code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.batch import GenericVisualInputs

TEXT, IMAGE, VIDEO = 0, 1, 2

Kinds = Callable[[Tensor], Tensor]  # token ids of any shape -> TEXT, IMAGE or VIDEO for each


def kinds_by_token(hf_config: Any) -> Kinds:
    """For families whose image and video placeholders are tokens of their own."""
    return partial(_kinds, image=hf_config.image_token_id, video=getattr(hf_config, "video_token_id", None))


def _kinds(input_ids: Tensor, image: int, video: int | None) -> Tensor:
    kinds = (input_ids == image).int() * IMAGE
    return kinds if video is None else kinds + (input_ids == video).int() * VIDEO


def count_up(input_ids_T: Tensor, visual: GenericVisualInputs | None) -> Tensor:
    """(T,) int64: 0, 1, 2, ..."""
    return torch.arange(len(input_ids_T))


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
    width p + column in merged patches; time is p in an image, and grows in a video. Whatever follows starts
    one after the largest position so far, on any axis.

    With `tokens_per_second` (Qwen2.5-VL) a video is one run of placeholders, and its time grows with
    `second_per_grid_ts` (one second where absent). Without, the prompt tells the time in text, and each
    frame is a run of its own, with the positions of an image.

    Raises ValueError when placeholders and grids do not match.
    """
    items = _items(visual, merge_size, tokens_per_second)
    kinds_T = kinds(input_ids_T)
    where = torch.nonzero(kinds_T)[:, 0]
    parts, end, start, seen = [], 0, 0, 0  # tokens done, next position, placeholders done
    while seen < len(where):
        first = int(where[seen])
        item = _place(next(items[int(kinds_T[first])], None), kinds_T, first)
        parts += [_text(start, first - end), item + (start + first - end)]
        start = int(parts[-1].max()) + 1
        end, seen = first + item.shape[1], seen + item.shape[1]
    if left := sum(1 for kind in items.values() for _ in kind):
        raise ValueError(f"{left} images or video frames have no placeholders among {len(kinds_T)} tokens")
    return torch.cat([*parts, _text(start, len(kinds_T) - end)], dim=1)


def _text(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, -1)


def _place(item: Tensor | None, kinds_T: Tensor, first: int) -> Tensor:
    """The item's positions, checked to fill a run of placeholders from `first` on."""
    length = 1 if item is None else item.shape[1]
    run = kinds_T[first : first + length]
    if item is None or len(run) < length or not (run == run[0]).all():
        found = int((run == run[0]).sum())
        raise ValueError(
            f"token {first}: {found} placeholders, but the grids have "
            f"{'no item left' if item is None else f'an item of {length} visual tokens'} there"
        )
    return item


def _items(
    visual: GenericVisualInputs | None, merge_size: int, tokens_per_second: float | None
) -> dict[int, Iterator[Tensor]]:
    """For both kinds, the positions (3, M) of each item counted from 0."""
    images = videos = torch.zeros(0, 3, dtype=torch.int64)
    if visual is not None and visual.image_grid_thw is not None:
        images = visual.image_grid_thw
    if visual is not None and visual.video_grid_thw is not None:
        videos = visual.video_grid_thw
    intervals = torch.ones(len(videos))
    if tokens_per_second is None:
        videos = torch.repeat_interleave(videos, videos[:, 0], dim=0)
        videos = torch.cat((torch.ones_like(videos[:, :1]), videos[:, 1:]), dim=1)
        intervals = torch.ones(len(videos))
    else:
        if visual is not None and visual.second_per_grid_ts is not None:
            intervals = visual.second_per_grid_ts
        intervals = intervals * tokens_per_second
    return {
        IMAGE: (_grid(grid, merge_size, 1.0) for grid in images.tolist()),
        VIDEO: (
            _grid(grid, merge_size, interval)
            for grid, interval in zip(videos.tolist(), intervals.tolist(), strict=True)
        ),
    }


def _grid(grid: list[int], merge_size: int, interval: float) -> Tensor:
    t, h, w = grid[0], grid[1] // merge_size, grid[2] // merge_size
    times = (torch.arange(t) * interval).long()
    axes = torch.meshgrid(times, torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack(axes).flatten(1)
