"""What the Energon and the Hugging Face loaders share: equal lengths over ranks, the limit on drops."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from torch.utils.data import DataLoader

from megatron_vlm.batch import fully_masked
from megatron_vlm.config import DataConfig
from megatron_vlm.data.drops import DropReport
from megatron_vlm.data.loader_state import digest

MEDIA_PROCESSORS = ("image_processor", "video_processor")
IMAGE_SETTINGS = ("size", "patch_size", "merge_size", "temporal_patch_size", "resample")
IMAGE_SETTINGS += ("image_mean", "image_std", "image_seq_length")


class Provider:
    """The base of dataclasses whose fields are settings of `config.data` and that make a source's loaders."""

    @classmethod
    def from_config(cls, data: DataConfig) -> Self:
        return cls(**{field.name: getattr(data, field.name) for field in dataclasses.fields(cls)})


def equal_length(batches: Iterable[dict], count: int, spare: Callable[[], dict]) -> Iterator[dict]:
    """`batches` and then fully masked copies of the last one, `count` in all.

    Ranks that run short keep taking part in every collective and add nothing to a token mean.
    A rank without any batch of its own repeats the one that `spare` returns.
    """
    last, yielded = None, 0
    for batch in batches:
        yield batch
        last, yielded = batch, yielded + 1
    assert yielded <= count, f"{yielded} batches where at most {count} were expected"
    while yielded < count:
        last = fully_masked(spare() if last is None else last)
        yield last
        yielded += 1


def encoder_settings(encoder) -> dict:
    """What of the encoder and its processor decides a sample's tokens and pixels, as JSON data."""
    names = ("seq_length", "over_length", "min_pixels", "max_pixels", "max_patches")
    names += ("video_fps", "video_max_frames", "video_max_pixels", "images_or_videos")
    processor = encoder.processor
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    of_calls = ("padding", "truncation")  # as the latest call left them
    return {name: getattr(encoder, name) for name in names if hasattr(encoder, name)} | {
        "chat_template": digest(encoder.chat_template),
        "tokenizer": digest({name: part for name, part in tokenizer.items() if name not in of_calls}),
        "processor": digest([_image_settings(getattr(processor, part, None)) for part in MEDIA_PROCESSORS]),
    }


def _image_settings(processor: Any | None) -> dict:
    """Those that matter: a later version of Transformers may have more."""
    found = {name: getattr(processor, name, None) for name in IMAGE_SETTINGS if name != "size"}
    size = dict(getattr(processor, "size", None) or {})
    return found | {"size": {side: pixels for side, pixels in size.items() if pixels is not None}}


class LimitedDrops:
    """A DropReport that ends the run from inside a worker, where a dataset of which every sample is dropped
    would otherwise be read for ever without a batch."""

    def __init__(self, report: DropReport, max_share: float) -> None:
        self._report, self._max_share = report, max_share
        self.keep = report.keep

    def drop(self, key: str, reason: str, detail: str = "") -> None:
        self._report.drop(key, reason, detail)
        self.check()

    def check(self) -> None:
        """Raises TooManyDrops."""
        self._report.check(self._max_share)


def with_limited_drops(encoder, max_share: float):
    """A copy of `encoder` that counts in the same report and raises TooManyDrops by itself."""
    limited = copy.copy(encoder)
    limited.drops = LimitedDrops(encoder.drops, max_share)
    return limited


def next_or_too_many_drops(batches: Iterator[dict], drops: LimitedDrops) -> dict | None:
    """The next batch, None after the last; why a worker gave up or was killed comes without traceback."""
    try:
        batch = next(batches, None)
    except (RuntimeError, EOFError, ConnectionError) as error:  # the last two: ended amid handing over
        drops.check()
        if not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker"):
            raise RuntimeError(
                f"data: {error}: something outside ended a DataLoader worker, most often for want of "
                "memory; lower data.num_workers or the buffers, and start again from the last checkpoint."
            ) from error
        raise
    drops.check()
    return batch


def close_loader(loader: DataLoader) -> None:
    """End the workers at once; left to garbage collection, Energon's take 5 s each."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        with contextlib.suppress(RuntimeError):  # torch reports here, too, a worker that was killed
            iterator._shutdown_workers()
