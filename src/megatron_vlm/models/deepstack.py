"""Deepstack (arXiv 2406.04334): visual features added to the hidden states after each of the first layers.

The features, already at their tokens' places, travel as extra rows of the hidden states' batch axis: layer i
of n takes (S, 1 + n - i, D), adds the first of the extras to its output and passes on the rest. So sequence
parallelism, recomputation and differentiation treat them like the hidden states. They go to another pipeline
stage if a layer there needs them; all stages' messages then have room for what leaves the first. Without
pipelines, a stream without images has none.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import pad

from megatron_vlm.parallel.layout import stage_layers


class DeepstackLayer(TransformerLayer):
    """A transformer layer that adds its own visual features, if it has any, to its output."""

    __call__ = torch.nn.Module.__call__  # Megatron's looks for CUDA graphs, of which there are none

    def forward(self, hidden_states: Tensor, **kwargs):
        layer = super().forward if torch.is_grad_enabled() else self._without_gradients
        extras = hidden_states.shape[1] - 1
        if not extras:
            return layer(hidden_states, **kwargs)
        hidden, mine, rest = hidden_states.split([1, 1, extras - 1], dim=1)
        hidden, context = layer(hidden.contiguous(), **kwargs)
        return torch.cat((hidden + mine, rest), dim=1), context

    def _without_gradients(
        self, hidden: Tensor, packed_seq_params, padding_mask: Tensor | None, **_
    ) -> tuple[Tensor, None]:
        """Calls the same modules in the same order as Megatron's layer. That also prepares to recompute and
        offload them."""
        attended = self.self_attention(self.input_layernorm(hidden), packed_seq_params=packed_seq_params)
        add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        hidden = add(attended, hidden, self.hidden_dropout)
        fed = self.mlp(self.pre_mlp_layernorm(hidden), padding_mask=padding_mask)
        add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
        return add(fed, hidden, self.hidden_dropout), None


def plain_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Megatron's bias-dropout-add for models without dropout."""
    return _added


def _added(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
    output, bias = output_and_bias
    return residual + (output if bias is None else output + bias)


def extras_before(config: TransformerConfig, layer_number: int) -> int:
    """For how many layers the input of layer `layer_number` (counted from 1) carries features."""
    return max(0, config.deepstack_layers - (layer_number - 1))


def extras_between_stages(config: TransformerConfig) -> int:
    """For how many layers a message between pipeline stages has room for features."""
    if not config.deepstack_layers or config.pipeline_model_parallel_size == 1:
        return 0
    virtual = config.virtual_pipeline_model_parallel_size
    first_stage = stage_layers(config, 0, 0 if virtual else None)
    return extras_before(config, len(first_stage) + 1)


def fill_message(config: TransformerConfig, hidden_SBD: Tensor, last_layer: int) -> Tensor:
    """The output of a stage, padded to the size that messages have."""
    extras = extras_before(config, last_layer + 1)
    unused = extras_between_stages(config) - extras
    if not unused:
        return hidden_SBD
    rows = hidden_SBD.shape[1] // (1 + extras)
    return pad(hidden_SBD, (0, 0, 0, unused * rows))


def read_message(config: TransformerConfig, message_SBD: Tensor, first_layer: int) -> Tensor:
    """The part of a message that a stage's first layer takes."""
    room, extras = extras_between_stages(config), extras_before(config, first_layer)
    if room == extras:
        return message_SBD
    rows = message_SBD.shape[1] // (1 + room)
    return message_SBD[:, : rows * (1 + extras)].contiguous()
