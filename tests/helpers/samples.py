"""Samples as the sources give them to an encoder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import load_media, parse_record
from megatron_vlm.data.chatml.sample import ChatMLSample, make_sample


def sample_of(conversation: Any, imgs: Any = None, videos: Any = None, key: str = "s") -> ChatMLSample:
    """A conversation with its media; one that cannot be trained on has a `problem`."""
    keys = {"__key__": key, "__restore_key__": (key,)}
    try:
        return make_sample(parse_record(conversation), list(imgs or []), list(videos or []), **keys)
    except BadSample as bad:
        return ChatMLSample(problem=bad, **keys)


def clean(conversation: Any, images: int = 0, videos: int = 0) -> tuple[list[dict], Any, dict]:
    """Return messages, tools and limits of the sample of a conversation and so many media."""
    keys = {"__key__": "", "__restore_key__": ()}
    if isinstance(conversation, dict) and images:
        conversation = conversation | {"images": [b"x"] * images}
    sample = make_sample(parse_record(conversation), [b""] * images, [b""] * videos, **keys)
    if sample.no_reply is not None:
        raise sample.no_reply
    return sample.messages, sample.tools, sample.limits


def read_record(record: Any, root: Path) -> tuple[dict, list, list]:
    """Return a record as shards store it, with its images and its videos."""
    conversation = parse_record(record)
    return conversation.stored(), *load_media(conversation, root)


def templated(processor: Any, template: str) -> Any:
    """The processor with another chat template."""
    processor = copy.copy(processor)
    processor.chat_template = template
    return processor
