"""VLMModel: HF tower and projector, placement of their features, then Megatron's language model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from transformers import PreTrainedModel

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.config import RunConfig
from megatron_vlm.models.costs import image_cost, stage_costs
from megatron_vlm.models.families.base import Family
from megatron_vlm.models.language_model import LanguageModel, LanguageModelConfig, language_model_config
from megatron_vlm.models.pixels import PixelNormalizer
from megatron_vlm.models.vision_parallel import spread_over_ranks
from megatron_vlm.parallel.layout import pipeline_layout


class VLMModel(MegatronModule):
    """One pipeline chunk of a vision-language model.

    The first chunk holds tower, projector and embedding, the last the output layer; every chunk takes the
    batch contract's `input_ids`, `position_ids` and `attention_mask`. The tower is replicated over TP.
    """

    def __init__(
        self,
        megatron_config: LanguageModelConfig,
        family: Family,
        hf_config: Any,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        processor: Any | None = None,
    ):
        super().__init__(megatron_config)
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.model_type = ModelType.encoder_or_decoder  # Megatron's schedules read it
        self.share_embeddings_and_output_weights = megatron_config.tie_embeddings
        self.visual_kinds = family.visual_kinds(hf_config)
        self.bidirectional_images = family.bidirectional_images
        if pre_process:
            self.vision = family.build_vision(hf_config)
            if megatron_config.recompute_granularity == "full":
                recompute_layers(self.vision)
            self.pixels = PixelNormalizer(processor)
            self._blank_image = GenericVisualInputs(**family.blank_image(hf_config, 0))
            self._visual_tokens = partial(family.visual_tokens, hf_config)
            for param in self.vision.parameters():
                # buffers such as rotary frequencies keep their dtype
                param.data = param.data.to(megatron_config.params_dtype)
                param.average_gradients_across_tp_domain = True  # keeps the tower's TP replicas in step
        self.language_model = LanguageModel(
            megatron_config, family.rotary(hf_config), pre_process, post_process, vp_stage
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        visual_inputs: GenericVisualInputs | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """On the last stage, the loss of each token (B, S), or logits (B, S, V / tp) without labels.

        Other stages return hidden states for the next. There must be as many placeholders as features.
        """
        kinds_BS = self.visual_kinds(input_ids)
        hidden_SBD = self._embed(input_ids, kinds_BS, visual_inputs) if self.pre_process else None
        return self.language_model(
            input_ids=None,
            position_ids=position_ids,
            attention_mask=self._segments(attention_mask, kinds_BS > 0),
            decoder_input=hidden_SBD,
            labels=labels,
            padding_mask=attention_mask == 0,
        )

    def _embed(
        self, input_ids: Tensor, kinds_BS: Tensor, visual_inputs: GenericVisualInputs | None
    ) -> Tensor:
        """Token embeddings with the visual features in place: (S, B, D), this rank's part of S under SP.

        With deepstack, (S, B * (1 + n), D) as `models.layers.deepstack` wants it.
        """
        hidden_BSD = self.language_model.embed(input_ids)
        extras_BSD = [torch.zeros_like(hidden_BSD)] * self.config.deepstack_layers
        if visual_inputs is not None:
            features = self._features(visual_inputs, hidden_BSD.device).to(hidden_BSD.dtype)
            features_MD, *deep_MD = features if features.dim() == 3 else [features]
            places_M = placeholders(kinds_BS, len(features_MD))
            hidden_BSD = _put(hidden_BSD, places_M, features_MD)
            extras_BSD = [_put(zero, places_M, f) for zero, f in zip(extras_BSD, deep_MD, strict=True)]
        elif self.training and any(param.requires_grad for param in self.vision.parameters()):
            hidden_BSD = hidden_BSD + 0.0 * self._features_of_blank(hidden_BSD.device).sum()
        hidden_SBD = torch.cat((hidden_BSD, *extras_BSD)).transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            hidden_SBD = tensor_parallel.scatter_to_sequence_parallel_region(hidden_SBD)
        return hidden_SBD

    def _features(self, visual_inputs: GenericVisualInputs, device: torch.device) -> Tensor:
        """The tower's output for all items of the micro batch, see `Family.build_vision`."""
        visual = GenericVisualInputs(**visual_inputs.normalized_for_model())
        if not self.config.images_spread:
            return self._tower(**visual.as_model_kwargs())
        group = parallel_state.get_tensor_model_parallel_group()
        blank = self._blank_image.to(device)
        return spread_over_ranks(self._tower, visual, self._visual_tokens(visual), blank, group)

    def _tower(self, **visual: Tensor) -> Tensor:
        return self.vision(**self.pixels(visual, self.config.params_dtype))

    def _features_of_blank(self, device: torch.device) -> Tensor:
        """Features of a blank image, so that a micro batch without images starts the same collectives."""
        return self.vision(**self._blank_image.to(device).as_model_kwargs())

    def _segments(self, documents_BS: Tensor, is_visual_BS: Tensor) -> Tensor:
        """Document and bidirectional block of every token, see `models.layers.attention`."""
        blocks_BS = torch.zeros_like(documents_BS)
        if self.bidirectional_images:
            before_BS = torch.nn.functional.pad(is_visual_BS, (1, 0))[:, :-1]
            blocks_BS = (is_visual_BS & ~before_BS).cumsum(1, dtype=documents_BS.dtype) * is_visual_BS
        return torch.stack((documents_BS, blocks_BS))

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


def placeholders(kinds_BS: Tensor, count: int) -> Tensor:
    """(M,) indices into B * S of the first `count` placeholders: those of images in order, then of videos.

    The device checks, without a wait, that there are no other placeholders.
    """
    kinds = kinds_BS.flatten()
    torch._assert_async((kinds > 0).sum() == count, "placeholders and visual features differ")
    text_last = torch.where(kinds > 0, kinds, kinds.max() + 1)
    return torch.argsort(text_last, stable=True)[:count]


def _put(hidden_BSD: Tensor, places_M: Tensor, features_MD: Tensor) -> Tensor:
    return hidden_BSD.flatten(0, 1).index_copy(0, places_M, features_MD).view_as(hidden_BSD)


def build_model(
    config: RunConfig,
    family: Family,
    hf_config: Any,
    device: torch.device,
    processor: Any | None = None,
) -> list[VLMModel]:
    """This rank's model chunks (several with virtual pipeline stages), with `model.freeze` applied.

    Raw pixels of the data path need the checkpoint's `processor`, see `models.pixels`.
    """
    architecture = family.architecture(hf_config)
    costs = architecture["num_layers"], 0.0, 0.0
    if config.parallel.pp > 1:
        costs = stage_costs(config, architecture, image_cost(config, family, hf_config))
    layout = pipeline_layout(*costs, config.parallel)
    megatron_config = language_model_config(config, architecture, layout)
    check_divisible(megatron_config)
    vpp = config.parallel.vpp
    chunks = []
    for stage in range(vpp):
        vp_stage = stage if vpp > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunks.append(VLMModel(megatron_config, family, hf_config, first, last, vp_stage, processor))
    for chunk in chunks:
        freeze(chunk, family, config.model.freeze)
        chunk.to(device)
    return chunks


def freeze(model: VLMModel, family: Family, groups: list[str]) -> None:
    """Turns off the gradients of all parameters in the named groups."""
    prefixes = tuple(prefix for group in groups for prefix in family.groups[group])
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(prefixes))


def check_divisible(megatron_config: LanguageModelConfig) -> None:
    """Raises ValueError, before anything is built, if the layout does not divide the model."""
    tp, stages = megatron_config.tensor_model_parallel_size, megatron_config.pipeline_model_parallel_size
    stages *= megatron_config.virtual_pipeline_model_parallel_size or 1
    if megatron_config.num_moe_experts and tp > 1 and not megatron_config.sequence_parallel:
        raise ValueError(
            f"parallel: a mixture of experts at tp {tp} needs sequence parallelism; drop sp=false."
        )
    divisors = [
        ("tp", tp, "key/value heads", megatron_config.num_query_groups),
        ("tp", tp, "feed-forward channels", megatron_config.ffn_hidden_size),
        ("tp", tp, "shared expert channels", megatron_config.moe_shared_expert_intermediate_size or 0),
        ("tp", tp, "vocabulary entries", megatron_config.vocab_size),
        ("ep", megatron_config.expert_model_parallel_size, "experts", megatron_config.num_moe_experts or 0),
    ]
    for name, size, of_what, count in divisors:
        if count % size:
            raise ValueError(
                f"parallel: {name} = {size} does not divide the model's {count} {of_what}; change {name}."
            )
    if stages > megatron_config.num_layers:
        raise ValueError(
            f"parallel: pp · vpp = {stages} stages are more than the model's {megatron_config.num_layers} "
            "layers; lower pp or vpp."
        )
