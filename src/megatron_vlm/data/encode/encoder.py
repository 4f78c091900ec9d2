"""The task encoders: `ChatMLSample` → row → micro batch. A row is one document; of packed rows, several."""

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.energon import Batch as EnergonBatch
from megatron.energon import DefaultTaskEncoder, Sample, WorkerConfig, edataclass, stateless
from megatron.energon.errors import SkipSample
from torch import Tensor
from torch.nn.functional import pad
from transformers import ProcessorMixin

from megatron_vlm.batch import DROPPED, IGNORE_INDEX, Batch, DataNeeds, GenericVisualInputs, check
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample, DropReport
from megatron_vlm.data.chatml.record import is_trained
from megatron_vlm.data.chatml.sample import ChatMLSample, grounding
from megatron_vlm.data.encode.chat_template import ChatTemplate, RenderedChat
from megatron_vlm.data.encode.packing import pack_buffer
from megatron_vlm.data.encode.processing import (
    EncodedText,
    HFProcessor,
    KnownProcessor,
    TextEncoder,
    most_characters,
)
from megatron_vlm.data.encode.replies import Span, between_thinking
from megatron_vlm.data.media.images import (
    Scaling,
    SizedImage,
    call_with_timeout,
    image_size,
    target_size,
)
from megatron_vlm.data.media.videos import VideoRules, decode_video, plan_video, rules_of_video
from megatron_vlm.data.shard_format import COOKERS


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
    asked: dict[str, Any] | None = None  # of a prompt: what rewards are computed from


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

    needs_reply = True

    def __init__(self, processor: ProcessorMixin, data: DataConfig, needs: DataNeeds, fast: bool = True):
        self.processor, self._data, self.needs = processor, data, needs
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
        sizes = [
            call_with_timeout(seconds, image_size, data, scaling) for data, scaling in self._images(sample)
        ]
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
        if misfit := self.needs.misfit(text.input_ids, visual):
            raise BadSample("model_refuses", misfit)
        length, *_ = self._kept_counts(text)
        if length < len(text.input_ids):
            text = EncodedText(text.input_ids[:length], text.weights[:length], [], [])
            visual = self.needs.first_items(text.input_ids, visual)
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
            position_ids=self.needs.position_ids(input_ids, visual),
            attention_mask=torch.from_numpy(np.ones(length, np.int32)),
            visual_inputs=visual,
            document_keys=[sample.__key__],
        )

    @functools.cached_property
    def video_rules(self) -> VideoRules | None:
        """Which frames of a video to take; None if the model takes no videos."""
        if not self.needs.videos:
            return None
        data = self._data
        return VideoRules(
            fps=data.video_fps,
            max_frames=data.video_max_frames,
            max_pixels=data.video_max_pixels,
            multiple=getattr(self.processor.video_processor, "temporal_patch_size", None) or 1,
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
                raise BadSample("processor_error", f"{type(self.processor).__name__} {detail}")
            if "resized_width" in limits:
                size = (limits["resized_width"], limits["resized_height"])
                images.append((image, Scaling(size=target_size(size, max_pixels, min_pixels))))
                continue
            within = {
                name: min(max(pixels, min_pixels or 0), max_pixels or math.inf)
                for name, pixels in limits.items()
            }
            image_max, image_min = within.get("max_pixels", max_pixels), within.get("min_pixels", min_pixels)
            if sample.sizes is not None:
                image_max = image_min = draw_pixels(f"{sample.sizes} {number}", image_min, image_max)
            images.append((image, Scaling(image_max, image_min)))
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
        if sample.no_reply is not None and self.needs_reply:
            raise sample.no_reply
        images, videos = len(sample.imgs or []), len(sample.videos or [])
        if videos and self.video_rules is None:
            raise BadSample("video_unsupported", f"{videos} videos")
        if images and videos and self.needs.images_or_videos:
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
    """The turn; a reply without the thinking blocks in its text, and without `reasoning_content`."""
    if turn["role"] != "assistant":
        return turn

    def rest(text: str) -> str:
        pieces = between_thinking(text, 0, len(text))
        texts = [text[start:stop] for start, stop in pieces]
        return "".join(texts[:1] + [piece.lstrip() for piece in texts[1:]])

    parts = [part | {"text": rest(part["text"])} for part in turn["content"]]
    return {key: value for key, value in turn.items() if key != "reasoning_content"} | {"content": parts}


def draw_pixels(source: str, min_pixels: int, max_pixels: int) -> int:
    """A number of pixels between two, which `source` alone decides: twice as many are as likely anywhere."""
    share = int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "big") / 2**64
    return round(min_pixels * (max_pixels / min_pixels) ** share)


# -- rows and batches


@edataclass
class HFEncoderTaskBatch(EnergonBatch):
    """Padded rows with the fields of the batch contract; `document_keys` becomes its `__key__`."""

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    visual_inputs: GenericVisualInputs | None
    document_keys: list[list[str]]
    asked: list[dict[str, Any]] | None = None


@edataclass
class MeasuredSample(Sample):
    conversation: ChatMLSample
    measured: Measured


class VLMTaskEncoder(DefaultTaskEncoder[ChatMLSample, HFEncoderTaskSample, HFEncoderTaskBatch, dict]):
    """The base of task encoders. They need nothing from Energon's loader, so any source may call them: their
    `encode_document` gives one document, or raises SkipSample after counting the drop, and `join` a row.

    processor      a Hugging Face processor; called once per sample unless `fast` replaces it
    data           the length of rows, the size of images, the frames of a video, when a sample is dropped
    needs          what the model wants; an output of the processor that is neither among the model's visual
                   keys nor about the text raises ValueError
    drops          counts the samples that cannot be trained on
    fast           the processor's work is done without it if it is known
    """

    decoder = None  # images stay encoded until they are needed; Energon's own decoder executes pickles
    cookers = COOKERS
    sizes_seed: int | None = None  # of Energon's records, if the sizes of their images are drawn

    def __init__(
        self,
        processor: ProcessorMixin,
        data: DataConfig,
        needs: DataNeeds | None = None,
        drops: DropReport | None = None,
        *,
        fast: bool = True,
    ):
        super().__init__()
        self.processor, self.data, self.needs = processor, data, needs or DataNeeds()
        self.drops = drops or DropReport()
        self._dropped: Counter[str] = Counter()  # by this process, since its last batch
        self._in_a_row: Counter[str] = Counter()  # drops of this process, by the stage of the encoding
        self.documents = DocumentEncoder(processor, data, self.needs, fast)

    @stateless
    def cook_crude_sample(self, sample: dict, **context: Any) -> ChatMLSample:
        """Energon's record as a sample; its sizes are drawn again each time that a worker reads it."""
        cooked = super().cook_crude_sample(sample, **context)
        if self.sizes_seed is not None:
            # the number of the reading, which Energon keeps in states and restore keys; the public name for
            # it divides by the number of workers, which is 0 in a replay
            reading = WorkerConfig._sample_index_stack[-1]
            cooked.sizes = f"{self.sizes_seed} {reading} {cooked.__key__}"
        return cooked

    @stateless
    def encode_batch(self, batch: HFEncoderTaskBatch) -> Batch:
        """The batch of the contract (see `megatron_vlm.batch`), checked, with `pop_drop_counts`."""
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(HFEncoderTaskBatch)}
        for energon_only in ("__subflavors__", "__sources__"):
            del fields[energon_only]
        if fields["asked"] is None:
            del fields["asked"]
        return check(fields | {"__key__": fields.pop("document_keys"), DROPPED: self.pop_drop_counts()})

    def make_batch(self, samples: list[HFEncoderTaskSample]) -> Batch:
        """The batch of these rows, in one call for sources that are not Energon's."""
        return self.encode_batch(self.batch(samples))

    def pop_drop_counts(self) -> dict[str, int]:
        """The drops of this process since the last call, by reason."""
        counts, self._dropped = self._dropped, Counter()
        return dict(counts)

    def patches_of(self, visual_inputs: GenericVisualInputs | None) -> int:
        """The raw patches of an encoded sample's images."""
        return self.documents.processing.image_spec.patches_of(visual_inputs) if visual_inputs else 0

    @contextlib.contextmanager
    def _counting_drops(self, sample: Sample) -> Iterator[None]:
        stage = type(sample).__name__
        try:
            yield
        except BadSample as bad:
            self._in_a_row[stage] += 1
            record_id = getattr(getattr(sample, "conversation", sample), "record_id", None)
            self.drops.drop(sample.__key__, bad.reason, bad.detail, self._in_a_row[stage], record_id)
            self._dropped[bad.reason] += 1
            raise SkipSample(f"{sample.__key__}: {bad}") from bad
        self._in_a_row[stage] = 0

    def _batch_rows(self, samples: list[HFEncoderTaskSample], length: int) -> HFEncoderTaskBatch:
        """Rows padded on the right; documents and visual items stay in order."""
        padding = {"input_ids": self.processor.tokenizer.pad_token_id or 0, "labels": IGNORE_INDEX}
        padding |= dict.fromkeys(("loss_mask", "position_ids", "attention_mask"), 0)
        return HFEncoderTaskBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=[sample.__restore_key__ for sample in samples],
            **{
                name: _stack([getattr(sample, name) for sample in samples], length, value)
                for name, value in padding.items()
            },
            visual_inputs=cat_visual(samples),
            document_keys=[sample.document_keys for sample in samples],
            asked=[sample.asked for sample in samples] if samples[0].asked else None,
        )


class HFEncoderVLMTaskEncoder(VLMTaskEncoder):
    """Energon's task encoder for conversations with images and videos; see the base."""

    @stateless
    def encode_sample(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        with self._counting_drops(sample):
            encoded = self.documents.encode(sample)
        self.drops.keep()
        return encoded

    encode_document = encode_sample  # the latter is the name that Energon looks for

    def join(self, documents: list[HFEncoderTaskSample]) -> HFEncoderTaskSample:
        (document,) = documents
        return document

    @stateless
    def batch(self, samples: list[HFEncoderTaskSample]) -> HFEncoderTaskBatch:
        """The samples as rows, padded to the longest."""
        return self._batch_rows(samples, max(len(sample.input_ids) for sample in samples))


class PackingVLMTaskEncoder(VLMTaskEncoder):
    """Encodes in two steps, so that a buffer of samples is packed before their images are decoded:
    `preencode_sample` reads text and the headers of media, `postencode_sample` decodes the media.

    Rows hold several documents and are padded to `seq_length`.

    Raises ValueError if the processor cannot tell an image's number of tokens from its size.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.documents.processing.sizes  # noqa: B018  so it raises here, not in a worker

    @stateless
    def preencode_sample(self, sample: ChatMLSample) -> MeasuredSample:
        """Measure a sample by its text and the headers of its media.

        Raises SkipSample, after counting the drop, if they show that the sample cannot be trained on.
        """
        with self._counting_drops(sample):
            measured = self.documents.measure(sample)
        return MeasuredSample.derive_from(sample, conversation=sample, measured=measured)

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> HFEncoderTaskSample:
        """One document. Raises SkipSample, after counting the drop, if its images cannot be decoded."""
        measured = sample.measured
        with self._counting_drops(sample):
            encoded = self.documents.encode(sample.conversation, measured)
        encoded_sizes = len(encoded.input_ids), self.patches_of(encoded.visual_inputs)
        if encoded_sizes != (measured.length, measured.patches):
            raise RuntimeError(
                f"{sample.__key__}: measured {measured.length} tokens and {measured.patches} patches, "
                f"encoded {encoded_sizes[0]} and {encoded_sizes[1]}. Lengths for "
                f"{type(self.processor).__name__} are wrong: please report this, and use data.packing=none "
                "meanwhile."
            )
        encoded.__restore_key__ = sample.__restore_key__  # that of this stage, not of the conversation
        self.drops.keep()
        return encoded

    def encode_document(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        return self.postencode_sample(self.preencode_sample(sample))

    def select_samples_to_pack(self, samples: list[MeasuredSample]) -> list[list[MeasuredSample]]:
        """Rows, with each sample in exactly one; only the samples' lengths and patches decide which."""
        sizes = [sample.measured for sample in samples]
        rows = self.select_rows([size.length for size in sizes], [size.patches for size in sizes])
        return [[samples[index] for index in row] for row in rows]

    def select_rows(self, lengths: list[int], patches: list[int]) -> list[list[int]]:
        """`select_samples_to_pack` for samples given as indices into the lists."""
        return pack_buffer(lengths, self.data.seq_length, patches, self.data.max_patches)

    @stateless
    def pack_selected_samples(self, samples: list[HFEncoderTaskSample]) -> HFEncoderTaskSample:
        """One row. Raises SkipSample when none of its samples could be encoded."""
        if not samples:
            raise SkipSample("a row of which every sample was dropped")
        length = sum(len(sample.input_ids) for sample in samples)
        if length > self.data.seq_length:
            keys = [key for sample in samples for key in sample.document_keys]
            raise RuntimeError(
                f"packing: {', '.join(keys)} have {length} tokens, seq_length = {self.data.seq_length}: they "
                "changed after their lengths were measured; delete their folder in data.lengths_cache."
            )
        return join_documents(samples)

    join = pack_selected_samples

    @stateless
    def batch(self, samples: list[HFEncoderTaskSample]) -> HFEncoderTaskBatch:
        """The samples as rows, padded to `seq_length`."""
        return self._batch_rows(samples, self.data.seq_length)


def join_documents(samples: list[HFEncoderTaskSample]) -> HFEncoderTaskSample:
    """One packed row: the samples' documents in sequence, numbered from 1; positions restart in each."""
    numbers, count = [], 0
    for sample in samples:
        numbers.append(sample.attention_mask + count)
        count += int(sample.attention_mask[-1])
    names = ("input_ids", "labels", "loss_mask", "position_ids")
    tensors = {name: torch.cat([getattr(sample, name) for sample in samples], dim=-1) for name in names}
    return HFEncoderTaskSample.derive_from(
        samples[0],
        **tensors,
        attention_mask=torch.cat(numbers),
        visual_inputs=cat_visual(samples),
        document_keys=[key for sample in samples for key in sample.document_keys],
    )


def _stack(rows: list[Tensor], length: int, value: int) -> Tensor:
    """Rows (..., T) padded and stacked to (B, length); M-RoPE's axis before T goes first."""
    stacked = torch.stack([pad(row, (0, length - row.shape[-1]), value=value) for row in rows])
    return stacked.transpose(0, 1) if stacked.dim() == 3 else stacked


def cat_visual(samples: list[HFEncoderTaskSample]) -> GenericVisualInputs | None:
    """The visual inputs of all samples, in order; None when none has any."""
    return GenericVisualInputs.cat([s.visual_inputs for s in samples if s.visual_inputs is not None])
