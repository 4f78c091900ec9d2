"""The task encoder: `ChatMLSample` → row → micro batch, of one document a row; in `packed`, of several."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from megatron.energon import Batch as EnergonBatch
from megatron.energon import DefaultTaskEncoder, Sample, edataclass, stateless
from megatron.energon.errors import SkipSample
from torch import Tensor
from torch.nn.functional import pad
from transformers import ProcessorMixin

from megatron_vlm.batch import IGNORE_INDEX, Batch, DataNeeds, GenericVisualInputs, check
from megatron_vlm.config import DataConfig
from megatron_vlm.data.chatml import BadSample, ChatMLSample
from megatron_vlm.data.drops import DropReport
from megatron_vlm.data.encode.document import DocumentEncoder, HFEncoderTaskSample, Measured
from megatron_vlm.data.shard_format import COOKERS


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


class VLMTaskEncoder(DefaultTaskEncoder[ChatMLSample, HFEncoderTaskSample, HFEncoderTaskBatch, dict]):
    """What the task encoders share. They use nothing of Energon's loader, so any source may call them.

    processor      a Hugging Face processor; called once per sample unless its work is known, see `fast`
    data           how long rows are, how large images, which frames of a video, when a sample is dropped
    needs          what the model wants; an output of the processor that is neither among its visual keys nor
                   about the text raises ValueError
    drops          where samples that cannot be trained on are counted
    chat_template  instead of the processor's own
    fast           do the work of a processor that `data.encode.known` knows
    """

    decoder = None  # images stay encoded until they are needed; Energon's own decoder executes pickles
    cookers = COOKERS

    def __init__(
        self,
        processor: ProcessorMixin,
        data: DataConfig,
        needs: DataNeeds | None = None,
        drops: DropReport | None = None,
        *,
        chat_template: str | None = None,
        fast: bool = True,
    ):
        super().__init__()
        self.processor, self.data, self.needs = processor, data, needs or DataNeeds()
        self.drops = drops or DropReport()
        self.documents = DocumentEncoder(processor, data, self.needs, chat_template, fast)

    @property
    def tokenizer(self):
        return self.processor.tokenizer

    def encode_document(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        """One document, for loaders that make rows themselves with `join`.

        Raises SkipSample, after counting the drop, when the sample cannot be trained on.
        """
        raise NotImplementedError

    def join(self, documents: list[HFEncoderTaskSample]) -> HFEncoderTaskSample:
        """A row of encoded documents."""
        raise NotImplementedError

    @stateless
    def encode_batch(self, batch: HFEncoderTaskBatch) -> Batch:
        """The batch of the contract (see `megatron_vlm.batch`), checked."""
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(HFEncoderTaskBatch)}
        for energon_only in ("__subflavors__", "__sources__"):
            del fields[energon_only]
        return check(fields | {"__key__": fields.pop("document_keys")})

    def measure(self, sample: ChatMLSample) -> Measured:
        """Raises SkipSample, after counting the drop, for all that text and headers show to be unfit."""
        with self._counting_drops(sample):
            return self.documents.measure(sample)

    def patches_of(self, visual_inputs: GenericVisualInputs | None) -> int:
        """The raw patches of an encoded sample's images."""
        return self.documents.processing.sizes.patches_of(visual_inputs)

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
        """Rows padded on the right; documents and visual items stay in order."""
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


class HFEncoderVLMTaskEncoder(VLMTaskEncoder):
    """Energon's task encoder for conversations with images and videos; see the base."""

    @stateless
    def encode_sample(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        """As `encode_document`."""
        with self._counting_drops(sample):
            encoded = self.documents.encode(sample)
        self.drops.keep()
        return encoded

    def encode_document(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        return self.encode_sample(sample)

    def join(self, documents: list[HFEncoderTaskSample]) -> HFEncoderTaskSample:
        (document,) = documents
        return document

    @stateless
    def batch(self, samples: list[HFEncoderTaskSample]) -> HFEncoderTaskBatch:
        """Rows as long as the longest."""
        return self._batch_rows(samples, max(len(sample.input_ids) for sample in samples))


def _stack(rows: list[Tensor], length: int, value: int) -> Tensor:
    """(B, ..., length) of rows (..., T); an axis before T, as of M-RoPE positions, goes first."""
    stacked = torch.stack([pad(row, (0, length - row.shape[-1]), value=value) for row in rows])
    return stacked.transpose(0, 1) if stacked.dim() == 3 else stacked


def cat_visual(samples: list[HFEncoderTaskSample]) -> GenericVisualInputs | None:
    """The visual inputs of all samples, in order; None when none has any."""
    return GenericVisualInputs.cat([s.visual_inputs for s in samples if s.visual_inputs is not None])
