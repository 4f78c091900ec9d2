"""Interleaved documents as text without chat template: an image is the processor's placeholder."""

from __future__ import annotations

from collections.abc import Callable

from megatron_vlm.data.conversation.chatml import BadSample

BEFORE, AFTER = "before the image", "after the image"


class DocumentText:
    """Called with a document's only turn: its text, and the trained spans in it (all of the document's own
    texts, and the end-of-text token).

    render   a conversation → its text by the chat template; shows how an image's placeholder is written
    eos      the tokenizer's end-of-text token; None: documents end without one

    Raises ValueError when the template does not write an image between the texts around it.
    """

    def __init__(self, render: Callable[[list[dict]], str], eos: str | None):
        self._eos = eos or ""
        content = [
            {"type": "text", "text": BEFORE},
            {"type": "image"},
            {"type": "text", "text": AFTER},
        ]
        rendered = render([{"role": "user", "content": content}])
        self._image = rendered.partition(BEFORE)[2].partition(AFTER)[0]
        if not self._image.strip():
            raise ValueError(
                "The chat template does not write an image between the texts around it, so documents of "
                f"texts and images cannot be written with it: {rendered[:500]!r}"
            )

    def __call__(self, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
        """Raises BadSample when the document is not the conversation's only turn."""
        if len(messages) != 1:
            raise BadSample("bad_conversation", f"a document stands alone, here among {len(messages)} turns")
        text, trained = "", []
        for part in [*messages[0]["content"], {"type": "text", "text": self._eos}]:
            if part["type"] == "text":
                trained.append((len(text), len(text) + len(part["text"])))
            text += self._image if part["type"] == "image" else part.get("text", "")
        return text, [span for span in trained if span[0] < span[1]]
