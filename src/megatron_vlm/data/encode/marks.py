"""Where things lie in a rendered conversation: in characters, then through a processor, then in tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from transformers import BatchEncoding

from megatron_vlm.data.conversation.replies import REPLY, TURN, Span

REPLY_START, REPLY_STOP, IMAGE_START, IMAGE_STOP, VIDEO_START, VIDEO_STOP = map(
    chr, range(0x10FF00, 0x10FF06)
)
MARK_PAIRS = ((REPLY_START, REPLY_STOP), (IMAGE_START, IMAGE_STOP), (VIDEO_START, VIDEO_STOP))
MARKS = re.compile(f"[{REPLY_START}-{VIDEO_STOP}]")
# Our marks, and the two characters with which transformers >= 5.23 marks control tokens.
RESERVED = re.compile(f"[{REPLY_START}-{VIDEO_STOP}{TURN}{REPLY}\U000f0000\U000f0001]")


@dataclass
class RenderedChat:
    """A rendered conversation and the character spans of what lies in it; spans may touch but not overlap."""

    text: str
    replies: list[Span]
    images: list[Span]
    videos: list[Span]
    add_special_tokens: bool = True  # False if the template wrote the BOS token
    weights: list[float] = field(default_factory=list)  # of the replies in the loss; empty: 1 for each

    def with_media(self, texts: list[str]) -> RenderedChat:
        """The conversation with `texts` in place of the images, then of the videos."""
        pieces, read, stops, shifts = [], 0, [], [0]
        for (start, stop), text in sorted(zip([*self.images, *self.videos], texts, strict=True)):
            pieces += [self.text[read:start], text]
            read = stop
            stops.append(stop)
            shifts.append(shifts[-1] + len(text) - (stop - start))

        def moved(spans: list[Span]) -> list[Span]:
            return [tuple(edge + shifts[bisect_right(stops, edge)] for edge in span) for span in spans]

        text = "".join([*pieces, self.text[read:]])
        spans = map(moved, (self.replies, self.images, self.videos))
        return RenderedChat(text, *spans, self.add_special_tokens, self.weights)


class MarkedTokenizer:
    """Stands in for a processor's tokenizer: takes the marks out of the text and keeps what they meant,
    and the characters of each token."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":  # copying asks for these before __init__ has run
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str | list[str], **kwargs: Any) -> BatchEncoding:
        marked = [text] if isinstance(text, str) else text
        assert len(marked) == 1, "one conversation per processor call"
        self.prompt = without_marks(marked[0])
        plain = self.prompt.text if isinstance(text, str) else [self.prompt.text]
        encoding = self._tokenizer(plain, return_offsets_mapping=True, **kwargs)
        offsets = encoding.pop("offset_mapping")
        self.offsets = offsets if isinstance(text, str) else offsets[0]
        return encoding


def with_marks(prompt: RenderedChat) -> str:
    """The text with a mark at the start and at the stop of every span."""
    placed = [
        (span, marks)
        for spans, marks in zip((prompt.replies, prompt.images, prompt.videos), MARK_PAIRS, strict=True)
        for span in spans
    ]
    pieces, last = [], 0
    for (start, stop), (first, second) in sorted(placed):
        pieces += [prompt.text[last:start], first, prompt.text[start:stop], second]
        last = stop
    return "".join([*pieces, prompt.text[last:]])


def without_marks(text: str) -> RenderedChat:
    """The inverse of `with_marks`, also after a processor has changed what is between the marks."""
    found: dict[str, list[int]] = {mark: [] for pair in MARK_PAIRS for mark in pair}
    for removed, match in enumerate(MARKS.finditer(text)):
        found[match[0]].append(match.start() - removed)
    for start, stop in MARK_PAIRS:
        assert len(found[start]) == len(found[stop]), "the processor changed the text's marks"
    spans = (list(zip(found[start], found[stop], strict=True)) for start, stop in MARK_PAIRS)
    return RenderedChat(MARKS.sub("", text), *spans)


def on_tokens(prompt: RenderedChat, offsets: list[Span]) -> tuple[np.ndarray, list[Span], list[Span]]:
    """(weights of tokens in the loss, token spans of images, of videos), from the characters of each token.

    A token across a reply's edge belongs to the reply. A token across a placeholder's edge does not belong to
    the placeholder: a newline token may reach from the end of one image into the start of the next.
    """
    edges = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
    starts, stops = edges.T
    trained = np.zeros(len(prompt.text) + 1, np.int64)
    for start, stop in prompt.replies:
        trained[start + 1 : stop + 1] = 1
    trained = trained.cumsum()  # at each character, how many characters before it are of replies

    def tokens(span: Span) -> Span:
        inside = np.flatnonzero((starts >= span[0]) & (stops <= span[1]) & (stops > starts))
        return int(inside[0]), int(inside[-1]) + 1

    images, videos = ([tokens(span) for span in spans] for spans in (prompt.images, prompt.videos))
    weights = (trained[stops] > trained[starts]).astype(np.float32)
    if prompt.weights:
        # of a reply's token, the first reply that does not end before it; behind all replies, whatever is 0
        reply = np.searchsorted([stop for _, stop in prompt.replies], starts, side="right")
        weights *= np.append(np.float32(prompt.weights), np.float32(0))[reply]
    return weights, images, videos
