"""Encoded samples cut to a length, never through an image or a video."""

from __future__ import annotations

from megatron_vlm.batch import GenericVisualInputs, rows_of_items
from megatron_vlm.data.conversation.chatml import BadSample
from megatron_vlm.data.encode.marks import Span
from megatron_vlm.data.encode.text import EncodedText


def truncated(
    text: EncodedText,
    visual: GenericVisualInputs | None,
    length: int,
    images: int,
    videos: int,
    image_token: int | None = None,
) -> tuple[EncodedText, GenericVisualInputs | None]:
    """Text and visual inputs cut to the first `length` tokens, `images` and `videos` (see `cut`)."""
    kept_text = EncodedText(
        text.input_ids[:length], text.weights[:length], text.images[:images], text.videos[:videos]
    )
    if visual is None or visual.pixel_values_videos is None:  # frames are among the images, in text order
        spans = sorted([*text.images, *text.videos])
        counts = [int((text.input_ids[slice(*span)] == image_token).sum()) for span in spans]
        return kept_text, first_images(visual, images + videos, counts)
    items = visual.items()
    return kept_text, GenericVisualInputs.cat([*items[:images], *items[len(text.images) :][:videos]])


def cut(images: list[Span], videos: list[Span], length: int) -> tuple[int, int, int]:
    """(tokens, images, videos) that remain of at most `length` tokens without cutting an image or a video."""
    for start, stop in [*images, *videos]:
        if start < length < stop:
            length = start
    return length, *(sum(stop <= length for _, stop in spans) for spans in (images, videos))


def first_images(
    visual: GenericVisualInputs | None, keep: int, tokens: list[int]
) -> GenericVisualInputs | None:
    """The tensors of the first `keep` images; `tokens` is how many image tokens each of them has.

    Every tensor must have one entry per image, or hold the patches or tiles that `image_grid_thw` or
    `image_tiles` counts, or tiles of images, which have equally many tokens. Raises BadSample `over_length`
    for any other layout.
    """
    images = len(tokens)
    if visual is None or keep == 0:
        return None
    if keep == images:
        return visual
    tensors = {}
    counts = visual.image_grid_thw if visual.image_tiles is None else visual.image_tiles
    for name, tensor in visual.as_model_kwargs().items():
        if len(tensor) == images:
            tensors[name] = tensor[:keep]
        elif name == "pixel_values" and counts is not None:
            tensors[name] = tensor[: int(rows_of_items(counts[:keep]).sum())]
        elif (tiles := _tiles(len(tensor), tokens)) is not None:
            tensors[name] = tensor[: sum(tiles[:keep])]
        else:
            raise BadSample("over_length", f"cannot divide {name} {tuple(tensor.shape)} into {images} images")
    return GenericVisualInputs(**tensors)


def _tiles(rows: int, tokens: list[int]) -> list[int] | None:
    """How many of all `rows` tiles each image has, if tiles have equally many tokens; else None."""
    every = sum(tokens)
    if not every or any(rows * count % every for count in tokens):
        return None
    return [rows * count // every for count in tokens]
