"""Tell a user by a source's first records what the chat template leaves out, and what stays plain text."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.chatml.sample import place_media
from megatron_vlm.data.encode.document import without_thinking
from megatron_vlm.data.records.unread import SourceSample, first_notes
from megatron_vlm.messages import listed

MOST_TOKENS = 3  # that a line names


def start_notes(samples: list[SourceSample], encoder) -> list[str]:
    """Return the lines about each source; those about its media stand beside its drops, too."""
    encoder.drops.hints[:] = first_notes(samples)
    return [*encoder.drops.hints, *template_notes(samples, encoder)]


def template_notes(samples: list[SourceSample], encoder) -> Iterator[str]:
    """Lines about what the template does not write of each source, and the control tokens typed in it."""
    chat, drops_thinking = encoder.documents.chat, encoder.data.thinking == "drop"
    for sample in samples:
        count = typing = 0
        unwritten: Counter[str] = Counter()
        typed: Counter[str] = Counter()
        for messages, tools in _conversations(sample):
            if drops_thinking:
                messages = [*map(without_thinking, messages)]
            count += 1
            unwritten.update(chat.unwritten(messages, tools))
            tokens = chat.typed(messages, tools)
            typed.update(tokens)
            typing += bool(tokens)
        records = f"of {count} records looked at"
        if unwritten:
            parts = ", ".join(f"{part} of {number}" for part, number in unwritten.items())
            yield f"data: {sample.name}: the template leaves out {parts} {records}"
        if typed:
            tokens = listed([token for token, _ in typed.most_common()], MOST_TOKENS, " or ")
            yield f"data: {sample.name}: {typing} {records} have text like {tokens}, trained as plain text"


def _conversations(sample: SourceSample) -> Iterator[tuple[list[dict], list[dict] | None]]:
    """Messages and tools of the records; no media are read."""
    for conversation in sample.conversations:
        with suppress(BadSample):
            images, videos = map(len, conversation.media.values())
            yield place_media(conversation.messages, images, videos), conversation.tools
