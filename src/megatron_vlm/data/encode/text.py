"""Conversation → token ids, their weights in the loss, and where each image lies; any HF processor.

1. The chat template is rendered once (`chat_template`).
2. Marks (private-use characters, removed from all record text before) are put around every reply and every
   image or video placeholder, and the processor is called once on the marked text.
3. The processor expands placeholders and calls its tokenizer. Here that is a stand-in, which takes the marks
   out, notes where they were, and tokenizes the clean text with offsets.

If the expanded text is known without the processor, 2 and 3 are one call of the tokenizer (`tokenize`).

So the ids are those that the processor alone would make, and spans are exact however placeholders expand; no
ids are searched for text. (Up to Transformers 5.17, its own assistant mask is wrong with images.)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from megatron_vlm.data.conversation.turns import refused_by_processor
from megatron_vlm.data.encode.chat_template import ChatTemplate
from megatron_vlm.data.encode.marks import MarkedTokenizer, RenderedChat, Span, on_tokens, with_marks
from megatron_vlm.data.media.anyres import arranged
from megatron_vlm.data.media.patches import Grid
from megatron_vlm.data.media.videos import VideoPlan


@dataclass
class EncodedText:
    """A conversation in tokens. Those that stand for media depend on the media's sizes, not on pixels."""

    input_ids: np.ndarray  # (T,) int64
    weights: np.ndarray  # (T,) float32: in the loss; 0 for all tokens but those of trained replies
    images: list[Span]  # the tokens that stand for each image, its markers included
    videos: list[Span]  # likewise, with the begin and end tokens around a video
    image_patches: list[int] = field(default_factory=list)  # raw patches of each image, if measured
    video_grids: list[Grid] = field(default_factory=list)  # the grid of each video, if measured

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def reply_mask(self) -> np.ndarray:
        """(T,) bool: tokens of trained replies."""
        return self.weights > 0


class TextEncoder:
    """Calls a Hugging Face processor once per conversation; see the module's docstring.

    Raises ValueError if the tokenizer gives no offsets (only fast tokenizers do), and as `ChatTemplate`.
    """

    def __init__(
        self, processor: ProcessorMixin, chat_template: str | None = None, mask_thinking: bool = False
    ):
        self.tokenizer = processor.tokenizer
        if not self.tokenizer.is_fast:
            raise ValueError(f"{type(self.tokenizer).__name__} gives no offsets; load the fast tokenizer")
        self.chat = ChatTemplate(processor, chat_template, mask_thinking)
        self.marked_tokenizer = MarkedTokenizer(self.tokenizer)
        self._processor = copy.copy(processor)
        self._processor.tokenizer = self.marked_tokenizer

    def __call__(
        self,
        prompt: RenderedChat,
        images: list[Image.Image] | None = None,
        videos: list[tuple[np.ndarray, VideoPlan]] | None = None,
    ) -> tuple[EncodedText, dict[str, Any]]:
        """The text, and everything else that the processor returned, with its batch axis of one.

        The prompt has a place for each of `images` and `videos`. The arguments are not changed.

        Raises BadSample if the processor refuses them.
        """
        options = {}
        if videos:
            options |= {"videos": [frames for frames, _ in videos]}
            options |= {"videos_kwargs": video_options([plan for _, plan in videos])}
        with refused_by_processor():
            outputs = self._processor(
                text=[with_marks(prompt)],
                images=arranged(self._processor, images) or None,  # an empty list is an error
                return_tensors="pt",
                add_special_tokens=prompt.add_special_tokens,
                **options,
            )
        outputs = dict(outputs)
        input_ids = outputs.pop("input_ids")[0].numpy()
        processed = replace(self.marked_tokenizer.prompt, weights=prompt.weights)
        weights, *media = on_tokens(processed, self.marked_tokenizer.offsets)
        assert len(weights) == len(input_ids), "the processor changed the ids after tokenizing"
        outputs.pop("video_metadata", None)
        return EncodedText(input_ids, weights, *media), outputs

    def tokenize(self, prompt: RenderedChat) -> EncodedText:
        """The prompt as it stands, with the ids that a call of the tokenizer would give."""
        tokenizer, text, special = self.tokenizer, prompt.text, prompt.add_special_tokens
        if _only_wraps(tokenizer):
            encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special)
            ids, offsets = encoding.ids, encoding.offsets
        else:
            encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        return EncodedText(np.fromiter(ids, np.int64, len(ids)), *on_tokens(prompt, offsets))


def _only_wraps(tokenizer: Any) -> bool:
    """Whether calling this tokenizer is exactly one call of the Rust tokenizer in its present state. A call
    that pads or truncates changes that state; the next plain call resets it."""
    base, cls, backend = PreTrainedTokenizerFast, type(tokenizer), tokenizer.backend_tokenizer
    return (
        (cls.__call__, cls._encode_plus) == (base.__call__, base._encode_plus)
        and not (backend.padding or backend.truncation)
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )


def video_options(plans: list[VideoPlan]) -> dict[str, Any]:
    """The options that tell a processor that frames are already chosen, and when each is shown."""
    return {
        "do_sample_frames": False,
        "video_metadata": [plan.metadata for plan in plans],
        "input_data_format": "channels_last",
    }


def most_characters(tokenizer: Any, tokens: int) -> int:
    """A number of characters: any longer text has more than `tokens` tokens, as normalizers compose at most
    four characters to one."""
    return 4 * tokens * max(map(len, tokenizer.get_vocab()))
