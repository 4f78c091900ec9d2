"""VLMModel: HF tower and projector, placement of their features, then Megatron's language model.

Pixels come as bytes and are normalised here as the HF processors do it. The towers of tensor- and context-
parallel ranks are replicas: with a share of the images each, one collective sends every feature to the
ranks that hold its token; else every rank computes all and takes its own.

Micro batches become streams (`streams_of`), which go through a model's chunks by Megatron's schedule for the
layout (`run_schedule`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_vlm.batch import Batch, GenericVisualInputs, is_raw
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.image_processors.base import ImageProcessorSpec
from megatron_vlm.job import watchdog
from megatron_vlm.models.adapters.model import Adapters
from megatron_vlm.models.description import Description
from megatron_vlm.models.head import output_losses
from megatron_vlm.models.language_model import (
    LanguageModel,
    LanguageModelConfig,
    check_positions,
    extras_between_stages,
)
from megatron_vlm.models.stream import Stream, StreamLayout, check_tokens
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.setup import on_device


class PixelNormalizer(nn.Module):
    """Raw pixels (see `megatron_vlm.batch`) → what the HF processor would have made, to the bit.

    processor   the checkpoint's. Raw pixels raise ValueError if it is None, or if its image or video
                processor lacks `image_mean`, `image_std` or `rescale_factor`
    """

    def __init__(self, processor: Any | None):
        super().__init__()
        images, videos = (getattr(processor, name, None) for name in ("image_processor", "video_processor"))
        spec = ImageProcessorSpec if processor is None else get_image_spec(processor)
        self._pads_to_largest = spec.pads_to_largest
        # raw patches of videos hold all moments already
        self.images = _Normalizer(images, spec.colours_last, getattr(images, "temporal_patch_size", 1))
        self.videos = _Normalizer(videos, spec.colours_last)

    def forward(self, visual: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The same fields, with raw pixels normalized to `dtype`, or only scaled; others stay as they are.

        Starts work on the device and never waits for it.
        """
        fields = {"pixel_values": self.images, "pixel_values_videos": self.videos}
        raw = [name for name in fields if name in visual and is_raw(visual[name])]
        if unknown := [name for name in raw if not fields[name].knows]:
            raise ValueError(
                f"uint8 {' and '.join(unknown)}, but the model was built without the checkpoint's processor, "
                "which says how to normalize them; pass it to build_model."
            )
        sizes = visual["image_sizes"] if raw and self._pads_to_largest else None
        return visual | {name: fields[name](visual[name], dtype, sizes) for name in raw}


class _Normalizer(nn.Module):
    """Normalizes raw pixels of one kind, and repeats the moment in each patch `repeats` times."""

    def __init__(self, part: Any | None, colours_last: bool, repeats: int = 1):
        super().__init__()
        settings = [getattr(part, name, None) for name in ("image_mean", "image_std", "rescale_factor")]
        self.knows, self.repeats = None not in settings, repeats
        self.colours_at = 2 if colours_last else 1  # in the patches that the tower takes
        self.only_scaled = not getattr(part, "do_normalize", True)  # Gemma 4's tower does the rest, in fp32
        if self.knows:
            mean, std, self.factor = settings
            # fused as in transformers: image_processing_backends.py, _fuse_mean_std_and_rescale_factor
            self.register_buffer("mean", torch.tensor(mean) * (1.0 / self.factor), persistent=False)
            self.register_buffer("std", torch.tensor(std) * (1.0 / self.factor), persistent=False)

    def forward(self, pixels: Tensor, dtype: torch.dtype, sizes: Tensor | None) -> Tensor:
        return self._images(pixels, dtype, sizes) if pixels.dim() == 4 else self._patches(pixels, dtype)

    def _images(self, pixels_NHWC: Tensor, dtype: torch.dtype, sizes: Tensor | None) -> Tensor:
        ready = self._normalized(pixels_NHWC, dtype).permute(0, 3, 1, 2).contiguous()
        for image, (height, width) in zip(ready, () if sizes is None else sizes.tolist(), strict=False):
            image[:, height:] = 0  # padding is black in raw pixels, but zero in what the processor returns
            image[:, :, width:] = 0
        return ready

    def _patches(self, pixels_PF: Tensor, dtype: torch.dtype) -> Tensor:
        ready = self._normalized(pixels_PF.unflatten(-1, (-1, len(self.mean))), dtype)
        ready = ready.transpose(self.colours_at, 2)
        return ready[:, :, None].expand(-1, -1, self.repeats, -1).flatten(1)

    def _normalized(self, colours_last: Tensor, dtype: torch.dtype) -> Tensor:
        if self.only_scaled:
            return colours_last.float().mul_(self.factor)
        return colours_last.float().sub_(self.mean).div_(self.std).to(dtype)


def spread_over_ranks(
    vision: Callable[[list[GenericVisualInputs]], Tensor],
    visual: GenericVisualInputs,
    visual_tokens: list[int],
    blank: GenericVisualInputs,
    indices: list[np.ndarray],
    group: dist.ProcessGroup,
) -> Tensor:
    """The features that this rank wants, each computed on one rank of the group: (m, D), or (1 + n, m, D).

    `visual_tokens` is how many features each item has; `indices` lists for every rank of the group the
    features, counted in document order, that it wants. A rank without items computes `blank` instead, so that
    all ranks do the same collectives.
    """
    items, size, rank = visual.items(), group.size(), group.rank()
    shares = balanced_shares(visual_tokens, size)
    own_items = [items[i] for i in shares[rank]]
    features = vision(own_items or [blank]).movedim(-2, 0)
    if not own_items:
        features = features[:0]
    # each rank sends every other the features that it wants
    maker, row = _makers(shares, visual_tokens)
    sent = [row[ids[maker[ids] == rank]] for ids in indices]
    received = np.bincount(maker[indices[rank]], minlength=size).tolist()
    flat = features.flatten(1).index_select(0, on_device(np.concatenate(sent), features.device))
    by_maker = all_to_all(group, flat, received, list(map(len, sent)))
    # they arrive sorted by the rank that made them, and go back into document order
    order = np.argsort(np.argsort(maker[indices[rank]], kind="stable"))
    of_rank = by_maker.index_select(0, on_device(order, features.device))
    return of_rank.unflatten(1, features.shape[1:]).movedim(0, -2)


def balanced_shares(sizes: list[int], ranks: int) -> list[list[int]]:
    """The indices of the items that each rank takes, ascending. The largest item is given out first, and each
    goes to the rank with the least load."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += sizes[i]
    return [sorted(share) for share in shares]


def _makers(shares: list[list[int]], sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every feature in document order, the rank that computes it and its row there."""
    starts = np.cumsum([0, *sizes])
    maker, row = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
    for rank, share in enumerate(shares):
        features = np.concatenate(
            [np.empty(0, np.int64), *(np.arange(starts[i], starts[i + 1]) for i in share)]
        )
        maker[features], row[features] = rank, np.arange(len(features))
    return maker, row


class VLMModel(MegatronModule):
    """One pipeline chunk of a vision-language model.

    The first chunk holds tower, projector and embedding, the last the output layer; every chunk takes the
    micro batch as a `Stream`. The tower is replicated over TP. With `adapters`, they alone are trained.
    """

    def __init__(
        self,
        megatron_config: LanguageModelConfig,
        description: Description,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        processor: Any | None = None,
    ):
        super().__init__(megatron_config)
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.adapters: Adapters | None = None
        self.model_type = ModelType.encoder_or_decoder  # Megatron's schedules read it
        self.share_embeddings_and_output_weights = megatron_config.tie_embeddings
        self.config_values = description.config_values
        self.visual_kinds = description.visual_kinds
        self.misfit = description.misfit
        self.bidirectional_images = description.bidirectional_images
        if pre_process:
            self.vision = description.build_vision()
            if megatron_config.recompute_granularity == "full":
                recompute_layers(self.vision)
            self.pixels = PixelNormalizer(processor)
            with torch.device("cpu"):  # also while a model is built on meta
                self._blank_image = GenericVisualInputs(**description.blank_image(0))
            self._visual_tokens = description.visual_tokens
            for param in self.vision.parameters():
                # buffers such as rotary frequencies keep their dtype
                param.data = param.data.to(megatron_config.params_dtype)
                param.average_gradients_across_tp_domain = True  # keeps the tower's TP replicas in step
        rotary = description.rotary()
        self.language_model = LanguageModel(megatron_config, rotary, pre_process, post_process, vp_stage)

    def layout(self, batch: Batch, ranks: int | None = None) -> StreamLayout:
        """How the rows of `batch`, on the host, become a stream on `ranks`, or all of context parallelism."""
        check_positions(int(batch["position_ids"].max()), self.config.most_positions)
        ranks = ranks or parallel_state.get_context_parallel_world_size()
        layout = StreamLayout(batch, self.visual_kinds, self.bidirectional_images, ranks)
        check_tokens(layout.ids[layout.real], layout.kinds, self.config.vocab_size)
        layout.ids = layout.ids.clip(max=self.config.vocab_size - 1)
        return layout

    def forward(self, stream: Stream, head: Callable[..., Tensor] = output_losses) -> Tensor:
        """On the last stage, the losses (n,) of the stream's outputs, or what another `head` makes of them.

        Other stages return hidden states for the next. There must be as many placeholders as features.
        """
        embedded = self._embed(stream) if self.pre_process else None
        return self.language_model.outputs(stream, embedded, head)

    def _embed(self, stream: Stream) -> Tensor:
        """Token embeddings with the visual features in place: (T, 1, D), this rank's part of T under SP.

        With deepstack, (T, 1 + n, D) as `models.language_model` wants it.
        """
        hidden_TD = self.language_model.embed(stream.input_ids)
        deep = stream.visual_inputs is not None or self.config.pipeline_model_parallel_size > 1
        extras_TD = [torch.zeros_like(hidden_TD)] * self.config.deepstack_layers * deep
        if stream.visual_inputs is not None:
            features, rows = self._features(stream, len(hidden_TD))
            features_MD, *deep_MD = features if features.dim() == 3 else [features]
            hidden_TD = hidden_TD.index_copy(0, rows, features_MD)
            extras_TD = [zero.index_copy(0, rows, f) for zero, f in zip(extras_TD, deep_MD, strict=True)]
        elif self.training and self._trains_vision():
            # none of its features: their gradient is zero, also where that of the hidden states is infinite
            # of a blank image, so that a micro batch without images starts the same collectives
            blank = self._blank_image.map_pixels(lambda pixels: on_device(pixels, hidden_TD.device))
            hidden_TD = hidden_TD + self.vision(**blank.as_model_kwargs()).flatten()[:0].sum()
        embedded = torch.stack((hidden_TD, *extras_TD), dim=1)
        if self.adapters and torch.is_grad_enabled():
            # Megatron's recomputation and schedules begin a backward pass only where inputs have gradients
            embedded.requires_grad_()
        return embedded

    def _trains_vision(self) -> bool:
        adapted = self.adapters and self.adapters.of_vision
        return bool(adapted) or any(param.requires_grad for param in self.vision.parameters())

    def _features(self, stream: Stream, length: int) -> tuple[Tensor, Tensor]:
        """The features (see `Description.build_vision`) of this rank's `length` tokens, and their rows."""
        visual = GenericVisualInputs(**stream.visual_inputs.normalized_for_model())
        counts, placeholders = self._visual_tokens(visual), len(stream.feature_rows)
        if sum(counts) != placeholders:
            raise ValueError(f"batch: {placeholders} placeholders for {sum(counts)} visual features.")
        group = parallel_state.get_tensor_and_context_parallel_group()
        if len(stream.plan.placement.pieces) == 1:  # generation: context-parallel ranks answer other prompts
            group = parallel_state.get_tensor_model_parallel_group()
        indices = [np.flatnonzero(self._wants(rank, stream, length)) for rank in range(group.size())]
        of_rank = indices[group.rank()]
        if self.config.images_spread:
            features = spread_over_ranks(self._tower, visual, counts, self._blank_image, indices, group)
        else:
            features = self._tower([visual])
            if len(of_rank) < placeholders:
                features = features.index_select(-2, on_device(of_rank, features.device))
        if self.config.sequence_parallel:
            # each tensor-parallel rank has a part of the tower's gradients, of which Megatron takes the mean
            ranks = self.config.tensor_model_parallel_size
            if features.requires_grad:
                features.register_hook(lambda gradient: gradient * ranks)
        rows = on_device(stream.feature_rows[of_rank] % length, features.device)
        return features.to(self.config.params_dtype), rows

    def _wants(self, rank: int, stream: Stream, length: int) -> np.ndarray:
        """Which features' tokens lie on `rank` of the group of tensor and context parallelism."""
        context_rank, tensor_rank = divmod(rank, self.config.tensor_model_parallel_size)
        is_here = stream.feature_ranks == context_rank
        if self.config.sequence_parallel:
            is_here &= stream.feature_rows // length == tensor_rank
        return is_here

    def _tower(self, items: list[GenericVisualInputs]) -> Tensor:
        """Features of what is on the host or the device; only this much of the pixels is on the device."""
        device = next(self.vision.parameters()).device
        first, *more = (item.map_pixels(lambda pixels: on_device(pixels, device)) for item in items)
        visual = GenericVisualInputs.cat([first, *more]) if more else first  # one is not copied again
        return self.vision(**self.pixels(visual.as_model_kwargs(), self.config.params_dtype))

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Called by Megatron's schedules with the previous stage's output."""
        self.language_model.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Called by Megatron to keep tied weights on the first and last stage equal."""
        return self.language_model.shared_embedding_or_output_weight()


def recompute_layers(vision: torch.nn.Module) -> None:
    """Makes the tower's layers keep only their inputs in training and run again in the backward pass."""
    for module in vision.modules():
        if isinstance(module, PreTrainedModel):
            module.gradient_checkpointing_enable({"use_reentrant": False})
            module.disable_input_require_grads()  # a frozen tower would be run again for nothing


# (stream, what the head made of it) -> (a scalar whose gradient is added to the others', what to report)
StreamLoss = Callable[[Stream, Tensor], tuple[Tensor, Any]]


def run_schedule(
    chunks: list[torch.nn.Module],
    streams: list[Stream],
    loss: StreamLoss,
    head: Callable[..., Tensor] = output_losses,
    forward_only: bool = False,
) -> list:
    """Returns what `loss` reports of each stream, on the last pipeline stage; elsewhere an empty list.

    `head`, a function of `models.head`, makes the outputs. Unless `forward_only`, gradients are added to this
    rank's buffers. The streams have one length if there are pipeline stages.
    """
    iterators = list(tee(streams, len(chunks)))
    ranks = parallel_state.get_context_parallel_world_size()
    return get_forward_backward_func()(
        forward_step_func=partial(vlm_step, loss, head),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(streams),
        seq_length=streams[0].input_ids.shape[1] * ranks,  # Megatron divides it by their number
        micro_batch_size=1 + extras_between_stages(get_model_config(chunks[0])),
        forward_only=forward_only,
    )


def vlm_step(
    loss: StreamLoss, head: Callable[..., Tensor], streams: Iterator[Stream], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, int, Any]]]:
    """Moves the next stream through one chunk. With its first two arguments bound, it is Megatron's step."""
    watchdog.beat()
    stream = next(streams)

    def loss_of_output(output: Tensor) -> tuple[Tensor, int, Any]:
        scalar, report = loss(stream, output)
        return scalar, 0, report  # no tokens for Megatron to divide by: `reduce_gradients` divides

    return model(stream, head), loss_of_output


def streams_of(
    chunks: list[torch.nn.Module], micro_batches: list[Batch], indices: list[np.ndarray] | None = None
) -> list[Stream]:
    """The micro batches on the device, padded so that sequence parallelism can cut them; of one length for
    pipelines.

    The micro batches are on the host, their pixels on the device. `indices` has for each the indices into
    B * S of the tokens whose outputs are computed; None: the trained tokens.
    """
    layout = get_attr_wrapped_model(chunks[0], "layout")
    layouts = [layout(batch) for batch in micro_batches]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    lengths = [-(-max(layout.longest, 1) // tp) * tp for layout in layouts]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        lengths = [max(lengths)] * len(lengths)
    rank = parallel_state.get_context_parallel_rank()
    windows = get_model_config(chunks[0]).layer_windows or (None,)
    return [
        layout.stream(rank, length, windows, setup.device(), places)
        for layout, length, places in zip(layouts, lengths, indices or [None] * len(lengths), strict=True)
    ]


@contextmanager
def in_evaluation(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Puts the chunks into evaluation mode, and each back into its own mode at the end."""
    were_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, was_training in zip(chunks, were_training, strict=True):
            chunk.train(was_training)
