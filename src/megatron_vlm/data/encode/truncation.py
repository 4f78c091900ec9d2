"""Encoded samples cut to a length, never through an image or a video."""

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.conversation.replies import Span
from megatron_vlm.data.conversation.turns import BadSample
from megatron_vlm.data.encode.text import EncodedText


def truncated(
    text: EncodedText,
    visual: GenericVisualInputs | None,
    length: int,
    image_count: int,
    video_count: int,
    image_token: int | None = None,
) -> tuple[EncodedText, GenericVisualInputs | None]:
    """Text and visual inputs of the first `length` tokens, which have this many images and videos whole."""
    kept_text = EncodedText(
        text.input_ids[:length], text.weights[:length], text.images[:image_count], text.videos[:video_count]
    )
    if visual is None or visual.pixel_values_videos is None:  # frames are among the images, in text order
        spans = sorted([*text.images, *text.videos])
        counts = [int((text.input_ids[start:stop] == image_token).sum()) for start, stop in spans]
        return kept_text, first_images(visual, image_count + video_count, counts)
    items = visual.items()
    videos = items[len(text.images) :]
    return kept_text, GenericVisualInputs.cat([*items[:image_count], *videos[:video_count]])


def cut(images: list[Span], videos: list[Span], length: int) -> tuple[int, int, int]:
    """(tokens, images, videos) that remain of at most `length` tokens without cutting an image or a video."""
    for start, stop in [*images, *videos]:
        if start < length < stop:
            length = start
    return length, *(sum(stop <= length for _, stop in spans) for spans in (images, videos))


def first_images(
    visual: GenericVisualInputs | None, keep: int, tokens: list[int]
) -> GenericVisualInputs | None:
    """The first `keep` images; `tokens` is how many image tokens each of them has.

    Items that are not as many as the images are tiles of these, which have equally many tokens each. Raises
    BadSample `over_length` for any other layout.
    """
    if visual is None or keep == 0:
        return None
    if keep == len(tokens):
        return visual
    items, every = visual.items(), sum(tokens)
    if len(items) != len(tokens):
        if not every or any(len(items) * count % every for count in tokens):
            raise BadSample("over_length", f"cannot divide {len(items)} items into {len(tokens)} images")
        keep = len(items) * sum(tokens[:keep]) // every
    return GenericVisualInputs.cat(items[:keep])
