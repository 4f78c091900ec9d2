"""Samples as the sources give them to an encoder."""

from __future__ import annotations

import copy
from typing import Any

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.conversation.chatml import ChatMLSample, clean_sample


def sample_of(conversation: Any, imgs: Any = None, videos: Any = None, key: str = "s") -> ChatMLSample:
    """A conversation with its media; one that cannot be trained on has a `problem`."""
    keys = {"__key__": key, "__restore_key__": (key,)}
    try:
        return clean_sample(conversation, list(imgs or []), list(videos or []), **keys)
    except BadSample as bad:
        return ChatMLSample(problem=bad, **keys)


def templated(processor: Any, template: str) -> Any:
    """The processor with another chat template."""
    processor = copy.copy(processor)
    processor.chat_template = template
    return processor
