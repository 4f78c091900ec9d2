"""The task encoder of packed rows, which measures samples first and joins several to a row."""

from typing import Any

import torch
from megatron.energon import Sample, edataclass, stateless
from megatron.energon.errors import SkipSample

from megatron_vlm.data.conversation.chatml import ChatMLSample
from megatron_vlm.data.encode.document import HFEncoderTaskSample, Measured
from megatron_vlm.data.encode.encoder import HFEncoderTaskBatch, VLMTaskEncoder, cat_visual
from megatron_vlm.data.encode.packing import pack_buffer


@edataclass
class MeasuredSample(Sample):
    conversation: ChatMLSample
    measured: Measured


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
        """A measured sample. Raises as `measure`."""
        return MeasuredSample.derive_from(sample, conversation=sample, measured=self.measure(sample))

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> HFEncoderTaskSample:
        """One document. Raises SkipSample, after counting the drop, if its images cannot be decoded."""
        measured = sample.measured
        with self._counting_drops(sample):
            encoded = self.documents.encode(sample.conversation, measured)
        found = len(encoded.input_ids), self.patches_of(encoded.visual_inputs)
        if found != (measured.length, measured.patches):
            raise RuntimeError(
                f"{sample.__key__}: measured {measured.length} tokens and {measured.patches} patches, "
                f"encoded {found[0]} and {found[1]}. Lengths for {type(self.processor).__name__} are wrong: "
                "please report this, and use data.packing=none meanwhile."
            )
        encoded.__restore_key__ = sample.__restore_key__  # that of this stage, not of the conversation
        self.drops.keep()
        return encoded

    def encode_document(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        return self.postencode_sample(self.preencode_sample(sample))

    def join(self, documents: list[HFEncoderTaskSample]) -> HFEncoderTaskSample:
        return self.pack_selected_samples(documents)

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
