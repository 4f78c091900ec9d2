"""Pictures of samples beside the model's answers to them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def contact_sheet(
    images: Sequence[Sequence[Any]],
    captions: Sequence[str],
    correct: Sequence[bool],
    path: str | Path,
    columns: int = 6,
) -> None:
    """Draw a picture of samples with their captions: green if `correct`, else red.

    `images` holds the PIL images of each sample, shown side by side.
    """
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(2.1 * columns, 2.5 * rows), layout="constrained")
    figure.subplots(rows, columns)
    for axes in figure.axes:
        axes.axis("off")
    for axes, pictures, caption, is_correct in zip(figure.axes, images, captions, correct, strict=False):
        axes.imshow(_side_by_side(pictures), interpolation="nearest")
        color = "green" if is_correct else "red"
        axes.set_title("\n".join(_wrapped(caption)), fontsize=7, color=color, parse_math=False)
    figure.savefig(path, dpi=120)


def _side_by_side(pictures: Sequence[Any]) -> Any:
    height = max(picture.height for picture in pictures)
    tiles = []
    for picture in pictures:
        pixels = np.asarray(picture.convert("RGB"))
        tiles.append(np.pad(pixels, ((0, height - picture.height), (0, 4), (0, 0)), constant_values=255))
    return np.concatenate(tiles, axis=1)


def _wrapped(caption: str) -> list[str]:
    return [line for part in caption.splitlines() for line in textwrap.wrap(part, 30) or [""]]
