"""`ChatMLSample` → ids, labels, positions and visual tensors of one document, with any HF processor."""

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.energon import Sample, edataclass
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.batch import IGNORE_INDEX, DataNeeds, GenericVisualInputs
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.sample import ChatMLSample, grounding
from megatron_vlm.data.chatml.turns import is_trained
from megatron_vlm.data.encode.chat_template import ChatTemplate, RenderedChat
from megatron_vlm.data.encode.processing import HFProcessor, KnownProcessor
from megatron_vlm.data.encode.replies import Span, between_thinking
from megatron_vlm.data.encode.text import EncodedText, TextEncoder, most_characters
from megatron_vlm.data.media.images import SizedImage, image_size, target_size
from megatron_vlm.data.media.patience import call_with_timeout
from megatron_vlm.data.media.videos import VideoRules, decode_video, plan_video, rules_of_video
from megatron_vlm.data.on_disk.fields import THINKING_KEYS


@edataclass
class HFEncoderTaskSample(Sample):
    """The tokens of a row, unpadded: one document, or several joined by `join_documents`."""

    input_ids: Tensor  # (T,) int64
    labels: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) float32
    position_ids: Tensor  # (T,) or (3, T) int64
    attention_mask: Tensor  # (T,) int32: document number, from 1
    visual_inputs: GenericVisualInputs | None
    document_keys: list[str]


@dataclass
class Measured:
    """A document before its images and videos are decoded."""

    prompt: RenderedChat
    text: EncodedText  # of the whole conversation
    length: int  # tokens that are kept
    patches: int  # raw patches of the images and videos that are kept


class DocumentEncoder:
    """Measures and encodes samples; both methods raise BadSample for one that cannot be trained on.

    `why_hf_processor` says why samples go through the HF processor, which is slower; None if they do not.
    """

    def __init__(self, processor: ProcessorMixin, data: DataConfig, needs: DataNeeds, fast: bool = True):
        self._processor, self._data, self._needs = processor, data, needs
        self.per_sample = 1  # documents; a pair of `data.preferences` has two
        self.boxes = grounding().Boxes(processor, data, needs.box_format)
        self.chat = ChatTemplate(processor, data.thinking == "mask", self.boxes.tokens)
        text = TextEncoder(processor, self.chat)
        fast_processor = KnownProcessor(text, needs.visual_keys, data.decode_seconds)
        self.why_hf_processor = fast_processor.why_not() if fast else "fast is off"
        self.processing = fast_processor
        if self.why_hf_processor:
            self.processing = HFProcessor(text, needs.visual_keys, data.decode_seconds)
        if data.resize_jitter:
            self.processing.image_spec.check_sizes(data.min_pixels, data.max_pixels)
        self._most_characters = math.inf
        if data.over_length == "drop":  # so a text of many megabytes is dropped without tokenizing it
            self._most_characters = most_characters(processor.tokenizer, data.seq_length)

    def measure(self, sample: ChatMLSample) -> Measured:
        """Measures a sample from its text and the headers of its media; of a video, one frame is decoded.

        Raises ValueError if the processor cannot tell an image's number of tokens from its size.
        """
        prompt = self._prompt(sample)
        seconds = self._data.decode_seconds
        sizes = [call_with_timeout(seconds, image.decoded_by, image_size) for image in self._images(sample)]
        plans = [
            call_with_timeout(seconds, plan_video, video, rules) for video, rules in self._videos(sample)
        ]
        text = self.processing.sizes(prompt, sizes, plans)
        length, image_count, video_count = self._kept_counts(text)
        if not text.weights[1:length].any():
            raise BadSample("no_trained_tokens", f"{length} tokens, none of a reply")
        grids = text.video_grids[:video_count]
        patches = sum(text.image_patches[:image_count]) + sum(map(math.prod, grids))
        if (max_patches := self._data.max_patches) is not None and patches > max_patches:
            raise BadSample("over_patches", f"{patches} patches, data.max_patches = {max_patches}")
        return Measured(prompt, text, length, patches)

    def encode(self, sample: ChatMLSample, measured: Measured | None = None) -> HFEncoderTaskSample:
        """The encoded document. `measured` saves reading the text again."""
        prompt = measured.prompt if measured else self._prompt(sample)
        seconds = self._data.decode_seconds
        videos = [
            call_with_timeout(seconds, decode_video, video, rules) for video, rules in self._videos(sample)
        ]
        text, visual = self.processing(prompt, self._images(sample), videos, measured and measured.text)
        if misfit := self._needs.misfit(text.input_ids, visual):
            raise BadSample("model_refuses", misfit)
        length, *_ = self._kept_counts(text)
        if length < len(text.input_ids):
            text = EncodedText(text.input_ids[:length], text.weights[:length], [], [])
            visual = self._needs.first_items(text.input_ids, visual)
        loss_mask = np.append(text.weights[1:], np.float32(0))  # the last position predicts nothing
        labels = np.where(loss_mask > 0, np.roll(text.input_ids, -1), IGNORE_INDEX)
        if not loss_mask.any():
            raise BadSample("no_trained_tokens", f"{length} tokens, none of a reply")
        input_ids = torch.from_numpy(text.input_ids)
        return HFEncoderTaskSample.derive_from(
            sample,
            input_ids=input_ids,
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(loss_mask),
            position_ids=self._needs.position_ids(input_ids, visual),
            attention_mask=torch.from_numpy(np.ones(length, np.int32)),
            visual_inputs=visual,
            document_keys=[sample.__key__],
        )

    @functools.cached_property
    def video_rules(self) -> VideoRules | None:
        """Which frames of a video to take; None if the model takes no videos."""
        if not self._needs.videos:
            return None
        data = self._data
        return VideoRules(
            fps=data.video_fps,
            max_frames=data.video_max_frames,
            max_pixels=data.video_max_pixels,
            multiple=getattr(self._processor.video_processor, "temporal_patch_size", None) or 1,
        )

    def _images(self, sample: ChatMLSample) -> list[SizedImage]:
        """Return each image with the size that it is to have.

        The most and the fewest pixels are the run's, or those that the record names, moved to lie within the
        run's. Both are the same number if a size is drawn.
        """
        max_pixels, min_pixels = self._data.max_pixels, self._data.min_pixels
        if self.processing.image_spec.makes_one_size:  # they would only resample the image once more
            max_pixels = min_pixels = None
        images = []
        pairs = zip(sample.imgs or [], sample.limits["image"], strict=True)
        for number, (image, limits) in enumerate(pairs):
            if limits and self.processing.image_spec.makes_one_size:
                detail = (
                    f"makes all images one size: {', '.join(limits)} of an image has no effect; remove it"
                )
                raise BadSample("processor_error", f"{type(self._processor).__name__} {detail}")
            if "resized_width" in limits:
                size = (limits["resized_width"], limits["resized_height"])
                images.append(SizedImage(image, size=target_size(size, max_pixels, min_pixels)))
                continue
            within = {
                name: min(max(pixels, min_pixels or 0), max_pixels or math.inf)
                for name, pixels in limits.items()
            }
            image_max, image_min = within.get("max_pixels", max_pixels), within.get("min_pixels", min_pixels)
            if sample.sizes is not None:
                image_max = image_min = draw_pixels(f"{sample.sizes} {number}", image_min, image_max)
            images.append(SizedImage(image, image_max, image_min))
        return images

    def _videos(self, sample: ChatMLSample) -> list[tuple[Any, VideoRules]]:
        return [
            (video, rules_of_video(limits, self.video_rules, is_list=isinstance(video, dict)))
            for video, limits in zip(sample.videos or [], sample.limits["video"], strict=True)
        ]

    def _messages_with_boxes(self, sample: ChatMLSample) -> list[dict]:
        """The messages with their boxes as the family writes them. Raises BadSample for media that the model
        does not take."""
        if sample.problem is not None:
            raise sample.problem
        images, videos = len(sample.imgs or []), len(sample.videos or [])
        if videos and self.video_rules is None:
            raise BadSample("video_unsupported", f"{videos} videos")
        if images and videos and self._needs.images_or_videos:
            raise BadSample("images_and_videos", f"{images} images and {videos} videos")
        if not sample.objects:
            return sample.messages
        some = sample.rejected is not None  # the other answer may have objects of its own
        return self.boxes.written(sample.messages, sample.objects, self._images(sample), some)

    def _prompt(self, sample: ChatMLSample) -> RenderedChat:
        """The rendered conversation; the settings say which replies are trained."""
        messages = self._messages_with_boxes(sample)
        if self._data.thinking == "drop":
            messages = [without_thinking(message) for message in messages]
        if self._data.train_replies == "last":
            messages = last_reply_alone(messages)
        prompt = self.chat(messages, sample.tools, len(sample.imgs or []), len(sample.videos or []))
        if (count := len(prompt.text)) > self._most_characters:
            detail = f"{count} characters; more than {self._most_characters} never fit"
            raise BadSample("over_length", detail)
        return prompt

    def _kept_counts(self, text: EncodedText) -> tuple[int, int, int]:
        """How many tokens, images and videos remain: after a cut, if the text is too long. Or BadSample."""
        length = len(text.input_ids)
        if length <= self._data.seq_length:
            return length, len(text.images), len(text.videos)
        if self._data.over_length == "drop":
            raise BadSample("over_length", f"{length} tokens, seq_length = {self._data.seq_length}")
        return cut(text.images, text.videos, self._data.seq_length)


# -- cut to a length, never through an image or a video


def cut(images: list[Span], videos: list[Span], length: int) -> tuple[int, int, int]:
    """(tokens, images, videos) that remain of at most `length` tokens without cutting an image or a video."""
    for start, stop in [*images, *videos]:
        if start < length < stop:
            length = start
    return length, *(sum(stop <= length for _, stop in spans) for spans in (images, videos))


def last_reply_alone(messages: list[dict]) -> list[dict]:
    """Return the messages with only the last trained reply still trained."""
    last = max((index for index, message in enumerate(messages) if is_trained(message)), default=0)
    return [
        message | {"loss": 0.0} if message["role"] == "assistant" and index != last else message
        for index, message in enumerate(messages)
    ]


def without_thinking(turn: dict) -> dict:
    """The turn; a reply without the thinking blocks in its text, and without THINKING_KEYS."""
    if turn["role"] != "assistant":
        return turn

    def rest(text: str) -> str:
        pieces = between_thinking(text, 0, len(text))
        texts = [text[start:stop] for start, stop in pieces]
        return "".join(texts[:1] + [piece.lstrip() for piece in texts[1:]])

    parts = [part | {"text": rest(part["text"])} for part in turn["content"]]
    return {key: value for key, value in turn.items() if key not in THINKING_KEYS} | {"content": parts}


def draw_pixels(source: str, min_pixels: int, max_pixels: int) -> int:
    """A number of pixels between two, which `source` alone decides: twice as many are as likely anywhere."""
    share = int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "big") / 2**64
    return round(min_pixels * (max_pixels / min_pixels) ** share)
