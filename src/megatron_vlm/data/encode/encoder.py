"""The task encoders: `ChatMLSample` → row → micro batch. A row is one document; of packed rows, several."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

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
from megatron_vlm.data.chatml.sample import ChatMLSample
from megatron_vlm.data.encode.document import DocumentEncoder, HFEncoderTaskSample, Measured
from megatron_vlm.data.encode.packing import pack_buffer
from megatron_vlm.data.shard_format import COOKERS


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
        return check(fields | {"__key__": fields.pop("document_keys"), DROPPED: self.pop_drop_counts()})

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
            self.drops.drop(sample.__key__, bad.reason, bad.detail, self._in_a_row[stage])
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
        )


class HFEncoderVLMTaskEncoder(VLMTaskEncoder):
    """Energon's task encoder for conversations with images and videos; see the base."""

    @stateless
    def encode_sample(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        with self._counting_drops(sample):
            encoded = self.documents.encode(sample)
        self.drops.keep()
        return encoded

    def encode_document(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        return self.encode_sample(sample)  # by the name that Energon looks for

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
