"""Tell a user by a source's first records what the chat template leaves out, and what stays plain text."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.chatml.sample import place_media
from megatron_vlm.data.encode.document import without_thinking
from megatron_vlm.data.load.rows import EncodedRows
from megatron_vlm.data.records.blends import Table
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.messages import listed, printable

FIRST = 100  # records of each source that are looked at
MOST_TOKENS = 3  # that a line names


def template_notes(rows: EncodedRows) -> Iterator[str]:
    """Lines about each source. There are none about a stream, as reading it would take its records."""
    if isinstance(rows.table, StreamedRows):
        return
    chat, drops_thinking = rows.encoder.documents.chat, rows.encoder.data.thinking == "drop"
    for source in (rows.table.parts() or {"": rows.table}).values():
        count = typing = 0
        unwritten: Counter[str] = Counter()
        typed: Counter[str] = Counter()
        for messages, tools in _conversations(source):
            if drops_thinking:
                messages = [*map(without_thinking, messages)]
            count += 1
            unwritten.update(chat.unwritten(messages, tools))
            tokens = chat.typed(messages, tools)
            typed.update(tokens)
            typing += bool(tokens)
        place = f"data: {printable(source.origin(0)[0])}:"
        first = f"of the first {count} records"
        if unwritten:
            parts = ", ".join(f"{part} of {number}" for part, number in unwritten.items())
            yield f"{place} the template leaves out {parts} {first}"
        if typed:
            tokens = listed([printable(token) for token, _ in typed.most_common()], MOST_TOKENS, " or ")
            yield f"{place} {typing} {first} have text like {tokens}, trained as plain text"


def _conversations(source: Table) -> Iterator[tuple[list[dict], list[dict] | None]]:
    """Messages and tools of the first records; no media are read."""
    for index in range(min(FIRST, len(source))):
        with suppress(BadSample):
            conversation = parse_record(source.record(index)[0])
            media = conversation.media
            yield (
                place_media(conversation.messages, len(media["image"]), len(media["video"])),
                conversation.tools,
            )
