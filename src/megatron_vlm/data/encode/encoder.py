"""`ChatMLSample` → token ids, labels, positions and visual tensors → micro batch, with any HF processor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from megatron.energon import Batch as EnergonBatch
from megatron.energon import DefaultTaskEncoder, Sample, edataclass, stateless
from megatron.energon.errors import SkipSample
from torch import Tensor
from torch.nn.functional import pad
from transformers import ProcessorMixin

from megatron_vlm.batch import IGNORE_INDEX, Batch, GenericVisualInputs, check
from megatron_vlm.data.chatml import BadSample, ChatMLSample, training_conversation
from megatron_vlm.data.drops import DropReport
from megatron_vlm.data.encode.processors import HFProcessor, processor_for
from megatron_vlm.data.encode.text import EncodedText, TextEncoder, most_characters
from megatron_vlm.data.encode.truncation import Document, cut
from megatron_vlm.data.media.images import image_size
from megatron_vlm.data.media.patience import in_time
from megatron_vlm.data.media.videos import VideoRules, decode_video, plan_video
from megatron_vlm.data.shard_format import COOKERS

# What processors return about the text. We make our own masks, and models find images by token id.
TEXT_KEYS = {"attention_mask", "token_type_ids", "mm_token_type_ids"}

PositionIds = Callable[[Tensor, GenericVisualInputs | None], Tensor]  # (T,) ids, visual → (T,) or (3, T)


@edataclass
class HFEncoderTaskSample(Sample):
    """A row's worth of tokens, unpadded: one document, or several joined by `join_documents`."""

    input_ids: Tensor  # (T,) int64
    labels: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) float32
    position_ids: Tensor  # (T,) or (3, T) int64
    attention_mask: Tensor  # (T,) int32: document number, from 1
    visual_inputs: GenericVisualInputs | None
    document_keys: list[str]


@edataclass
class HFEncoderTaskBatch(EnergonBatch):
    """Padded rows; fields as in the batch contract, `document_keys` becomes its `__key__`."""

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    visual_inputs: GenericVisualInputs | None
    document_keys: list[list[str]]


class HFEncoderVLMTaskEncoder(
    DefaultTaskEncoder[ChatMLSample, HFEncoderTaskSample, HFEncoderTaskBatch, dict]
):
    """Energon's task encoder for conversations with images and videos.

    processor      a Hugging Face processor; called once per sample unless its work is known, see `fast`
    seq_length     most tokens in a row
    visual_keys    the processor outputs that the model takes; any other output that is not about the text
                   raises ValueError
    min_pixels, max_pixels   images outside are scaled, aspect kept, before the processor sees them
    over_length    "drop" longer samples, or "truncate" them, keeping whole images and videos only
    video_fps, video_max_frames, video_max_pixels   which frames of a video are taken, see `VideoRules`;
                   videos need "pixel_values_videos" among the visual keys
    images_or_videos   drop samples that hold both
    decode_seconds   an image or video that takes longer is dropped with its sample
    position_ids   function of a document's (T,) ids and visual inputs; default 0, 1, 2, ...
    drops          where samples that cannot be trained on are counted
    chat_template  instead of the processor's own
    fast           do the work of a processor that `data.encode.known` knows; `why_hf_processor` says why not
    """

    decoder = None  # images stay encoded until `encode_sample`; Energon's own decoder executes pickles
    cookers = COOKERS

    def __init__(
        self,
        processor: ProcessorMixin,
        seq_length: int,
        visual_keys: tuple[str, ...] = ("pixel_values",),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        over_length: str = "drop",
        video_fps: float = VideoRules.fps,
        video_max_frames: int = VideoRules.max_frames,
        video_max_pixels: int | None = None,
        images_or_videos: bool = False,
        decode_seconds: float = 60.0,
        position_ids: PositionIds | None = None,
        drops: DropReport | None = None,
        chat_template: str | None = None,
        fast: bool = True,
    ):
        super().__init__()
        if over_length not in ("drop", "truncate"):
            raise ValueError(f'data.over_length = {over_length!r}; choose "drop" or "truncate"')
        if min_pixels and max_pixels and min_pixels > max_pixels:
            raise ValueError(f"data.min_pixels = {min_pixels} is over data.max_pixels = {max_pixels}")
        GenericVisualInputs.from_mapping(dict.fromkeys(visual_keys))  # raises on unknown keys
        self.processor = processor
        self.seq_length = seq_length
        self.visual_keys = visual_keys
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.over_length = over_length
        self.video_fps, self.video_max_frames = video_fps, video_max_frames
        self.video_max_pixels = video_max_pixels
        self.images_or_videos = images_or_videos
        self._in_time = functools.partial(in_time, decode_seconds)
        self.position_ids = position_ids or _count_up
        self.drops = drops or DropReport()
        text = TextEncoder(processor, chat_template)
        self.chat_template = text.chat.text
        if over_length == "drop":  # text of many megabytes is not tokenized first
            text.chat.max_characters = most_characters(self.tokenizer, seq_length)
        self.processing, self.why_hf_processor = HFProcessor(processor, text), "fast is off"
        if fast:
            self.processing, self.why_hf_processor = processor_for(processor, text)

    @property
    def tokenizer(self):
        return self.processor.tokenizer

    @functools.cached_property
    def video_rules(self) -> VideoRules | None:
        """None for a model that takes no videos."""
        if "pixel_values_videos" not in self.visual_keys:
            return None
        return VideoRules(
            fps=self.video_fps,
            max_frames=self.video_max_frames,
            max_pixels=self.video_max_pixels,
            multiple=self.processor.video_processor.temporal_patch_size,
        )

    @stateless
    def encode_sample(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        """One document. Uses nothing of Energon's loader, so any source may call it.

        Raises SkipSample, after counting the drop, when the sample cannot be trained on.
        """
        with self._counting_drops(sample):
            encoded = self._encode(sample)
        self.drops.keep()
        return encoded

    def encode_document(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        """As `encode_sample`, one of a row's; for loaders that make rows themselves, see `join`."""
        return self.encode_sample(sample)

    def join(self, documents: list[HFEncoderTaskSample]) -> HFEncoderTaskSample:
        """A row of encoded documents: here one."""
        (document,) = documents
        return document

    @stateless
    def batch(self, samples: list[HFEncoderTaskSample]) -> HFEncoderTaskBatch:
        """Rows padded on the right to the longest; documents and visual items stay in order."""
        return self._batch_rows(samples, max(len(sample.input_ids) for sample in samples))

    @stateless
    def encode_batch(self, batch: HFEncoderTaskBatch) -> Batch:
        """The batch of the contract (see `megatron_vlm.batch`), checked."""
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(HFEncoderTaskBatch)}
        for energon_only in ("__subflavors__", "__sources__"):
            del fields[energon_only]
        return check(fields | {"__key__": fields.pop("document_keys")})

    def measure(self, sample: ChatMLSample) -> tuple[int, int]:
        """(tokens, raw patches of images and videos) that `encode_sample` would make, without decoding them.

        Of a video one frame is decoded. Raises SkipSample, after counting the drop, for all that text and
        headers show to be unfit, and ValueError for a processor that cannot tell an image's tokens from its
        size.
        """
        with self._counting_drops(sample):
            length, patches, _ = self._measured(sample)
        return length, patches

    def patches_of(self, visual_inputs: GenericVisualInputs | None) -> int:
        """The raw patches of an encoded sample's images."""
        return self.processing.sizes.patches_of(visual_inputs)

    @contextlib.contextmanager
    def _counting_drops(self, sample: Sample) -> Iterator[None]:
        stage = type(sample).__name__
        try:
            yield
        except BadSample as bad:
            self.drops.drop(sample.__key__, bad.reason, bad.detail, stage)
            raise SkipSample(f"{sample.__key__}: {bad}") from bad
        self.drops.passed(stage)

    def _batch_rows(self, samples: list[HFEncoderTaskSample], length: int) -> HFEncoderTaskBatch:
        pad_id = self.tokenizer.pad_token_id or 0
        return HFEncoderTaskBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=[sample.__restore_key__ for sample in samples],
            input_ids=_stack([sample.input_ids for sample in samples], length, pad_id),
            labels=_stack([sample.labels for sample in samples], length, IGNORE_INDEX),
            loss_mask=_stack([sample.loss_mask for sample in samples], length, 0),
            position_ids=_stack([sample.position_ids for sample in samples], length, 0),
            attention_mask=_stack([sample.attention_mask for sample in samples], length, 0),
            visual_inputs=cat_visual(samples),
            document_keys=[sample.document_keys for sample in samples],
        )

    def _encode(self, sample: ChatMLSample, text: EncodedText | None = None) -> HFEncoderTaskSample:
        """`text` spares reading the conversation again where it was measured."""
        text, outputs = self._processed(sample, text)
        document = self._fit(Document(text, self._visual_inputs(outputs)))
        ids, replies = document.text.input_ids, document.text.reply_mask
        labels, loss_mask = np.full(len(ids), IGNORE_INDEX), np.zeros(len(ids), np.float32)
        np.copyto(labels[:-1], ids[1:], where=replies[1:])  # the last position predicts nothing
        loss_mask[:-1] = replies[1:]
        if not loss_mask.any():
            raise BadSample("no_trained_tokens", f"{len(ids)} tokens, none of a reply")
        input_ids = torch.from_numpy(ids)
        return HFEncoderTaskSample.derive_from(
            sample,
            input_ids=input_ids,
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(loss_mask),
            position_ids=self.position_ids(input_ids, document.visual_inputs),
            attention_mask=torch.from_numpy(np.ones(len(ids), np.int32)),
            visual_inputs=document.visual_inputs,
            document_keys=[sample.__key__],
        )

    def _processed(self, sample: ChatMLSample, text: EncodedText | None) -> tuple[EncodedText, dict]:
        read = functools.cache(functools.partial(self._read, sample))
        if text is None:
            read()  # what is wrong with a conversation is told before its media
        decode, limits = self.processing.decode, (self.max_pixels, self.min_pixels)
        images = (self._in_time(decode, data, *limits) for data in sample.imgs or [])
        videos = [self._in_time(decode_video, video, self.video_rules) for video in sample.videos or []]
        return self.processing(read, images, videos, text)

    def _measured(self, sample: ChatMLSample) -> tuple[int, int, EncodedText]:
        messages, tools = self._read(sample)
        limits = self.max_pixels, self.min_pixels
        sizes = [self._in_time(image_size, data, *limits) for data in sample.imgs or []]
        plans = [self._in_time(plan_video, video, self.video_rules) for video in sample.videos or []]
        text = self.processing.sizes(messages, tools, sizes, plans)
        length, images, videos = len(text), len(sizes), len(plans)
        if length > self.seq_length:
            self._check_over_length(length)
            length, images, videos = cut(text.images, text.videos, self.seq_length)
        if not text.reply_mask[1:length].any():
            raise BadSample("no_trained_tokens", f"{length} tokens, none of a reply")
        patches = sum([*text.image_patches[:images], *map(math.prod, text.video_grids[:videos])])
        return length, patches, text

    def _read(self, sample: ChatMLSample) -> tuple[list[dict], list[dict] | None]:
        """(messages, tools), one part for each image and each video."""
        if sample.problem is not None:
            raise sample.problem
        images, videos = len(sample.imgs or []), len(sample.videos or [])
        if videos and self.video_rules is None:
            raise BadSample("video_unsupported", f"{videos} videos")
        if images and videos and self.images_or_videos:
            raise BadSample("images_and_videos", f"{images} images and {videos} videos")
        return training_conversation(sample.conversation, images, videos)

    def _visual_inputs(self, outputs: dict[str, Tensor]) -> GenericVisualInputs | None:
        unexpected = sorted(set(outputs) - TEXT_KEYS - set(self.visual_keys))
        if unexpected:
            raise ValueError(
                f"{type(self.processor).__name__} returned {unexpected}, which are not in "
                f"visual_keys = {self.visual_keys}; add those that the model takes"
            )
        tensors = {key: outputs[key] for key in self.visual_keys if key in outputs}
        return GenericVisualInputs(**tensors) if tensors else None

    def _fit(self, document: Document) -> Document:
        length = len(document.text.input_ids)
        if length <= self.seq_length:
            return document
        self._check_over_length(length)
        return document.truncated(self.seq_length)

    def _check_over_length(self, length: int) -> None:
        if self.over_length == "drop":
            raise BadSample("over_length", f"{length} tokens, seq_length = {self.seq_length}")


def _count_up(input_ids: Tensor, visual_inputs: GenericVisualInputs | None) -> Tensor:
    return torch.arange(len(input_ids))


def _stack(rows: list[Tensor], length: int, value: int) -> Tensor:
    """(B, ..., length) of rows (..., T); an axis before T, as of M-RoPE positions, goes first."""
    stacked = torch.stack([pad(row, (0, length - row.shape[-1]), value=value) for row in rows])
    return stacked.transpose(0, 1) if stacked.dim() == 3 else stacked


def cat_visual(samples: list[HFEncoderTaskSample]) -> GenericVisualInputs | None:
    """The visual inputs of all samples, in order; None when none has any."""
    return GenericVisualInputs.cat([s.visual_inputs for s in samples if s.visual_inputs is not None])
