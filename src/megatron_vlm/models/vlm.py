"""VLMModel: HF tower and projector, placement of their features, then Megatron's language model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from transformers import PreTrainedModel

from megatron_vlm.batch import Batch, GenericVisualInputs
from megatron_vlm.models.adapters.model import Adapters
from megatron_vlm.models.description import Description
from megatron_vlm.models.head import output_losses
from megatron_vlm.models.language_model import LanguageModel, LanguageModelConfig
from megatron_vlm.models.pixels import PixelNormalizer
from megatron_vlm.models.stream import Stream, StreamLayout, check_positions, check_tokens
from megatron_vlm.models.vision_parallel import spread_over_ranks
from megatron_vlm.parallel.transfer import on_device


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
        self.misfit = description.data_needs.misfit
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

        With deepstack, (T, 1 + n, D) as `models.deepstack` wants it.
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

    def _features(self, stream: Stream, held: int) -> tuple[Tensor, Tensor]:
        """The features (see `Description.build_vision`) of this rank's `held` tokens, and their rows."""
        visual = GenericVisualInputs(**stream.visual_inputs.normalized_for_model())
        counts, placeholders = self._visual_tokens(visual), len(stream.feature_rows)
        if sum(counts) != placeholders:
            raise ValueError(f"batch: {placeholders} placeholders for {sum(counts)} visual features.")
        group = parallel_state.get_tensor_and_context_parallel_group()
        if len(stream.plan.placement.pieces) == 1:  # generation: context-parallel ranks answer other prompts
            group = parallel_state.get_tensor_model_parallel_group()
        wanted = [np.flatnonzero(self._wants(rank, stream, held)) for rank in range(group.size())]
        mine = wanted[group.rank()]
        if self.config.images_spread:
            features = spread_over_ranks(self._tower, visual, counts, self._blank_image, wanted, group)
        else:
            features = self._tower([visual])
            if len(mine) < placeholders:
                features = features.index_select(-2, on_device(mine, features.device))
        if self.config.sequence_parallel:
            # each tensor-parallel rank has a part of the tower's gradients, of which Megatron takes the mean
            ranks = self.config.tensor_model_parallel_size
            if features.requires_grad:
                features.register_hook(lambda gradient: gradient * ranks)
        rows = on_device(stream.feature_rows[mine] % held, features.device)
        return features.to(self.config.params_dtype), rows

    def _wants(self, rank: int, stream: Stream, held: int) -> np.ndarray:
        """Which features' tokens lie on `rank` of the group of tensor and context parallelism."""
        context_rank, tensor_rank = divmod(rank, self.config.tensor_model_parallel_size)
        here = stream.feature_ranks == context_rank
        if self.config.sequence_parallel:
            here &= stream.feature_rows // held == tensor_rank
        return here

    def _tower(self, items: list[GenericVisualInputs]) -> Tensor:
        """Features of what is on the host or the device; only this much of the pixels is on the device."""
        device = next(self.vision.parameters()).device
        first, *others = (item.map_pixels(lambda pixels: on_device(pixels, device)) for item in items)
        visual = GenericVisualInputs.cat([first, *others]) if others else first  # one is not copied again
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
