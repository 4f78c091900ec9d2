"""Inputs of each layer's own ("per-layer embeddings"), made from tokens and their first hidden states.

The table of tokens is cut along the vocabulary; the linears, a few hundred channels wide, are whole on every
rank of tensor parallelism and see, under sequence parallelism, the rank's own tokens.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_vlm.models.layers.aside import Aside, put
from megatron_vlm.models.layers.norms import RMSNorm
from megatron_vlm.parallel.linears import WholeLinear

INPUTS = -1  # their place among `AttentionPlan.asides`


class LayerInputs(MegatronModule):
    """Puts aside (T, 1, C) for each layer: (norm(linear(embedded)) + embedding of the token) / √2.

    A placeholder has the embedding of padding, which has no gradient, as in Transformers (Gemma4TextModel).
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.channels = channels = config.layer_inputs
        width = config.num_layers * channels
        self.embedding = VocabParallelEmbedding(
            config.padded_vocabulary,
            width,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )
        self.projection = WholeLinear(config.hidden_size, width, config)
        self.norm = RMSNorm(config, channels, config.layernorm_epsilon)
        # rounded to the weights' dtype, as Transformers does
        self.scale = torch.tensor(channels**0.5, dtype=config.params_dtype, device="cpu").item()

    def forward(self, ids_1T: Tensor, embedded_T1D: Tensor, aside: Aside) -> Tensor:
        """The embedded tokens, after which the aside has the inputs of each layer."""
        pad = self.config.pad_token
        is_pad = ids_1T == pad
        for token in self.config.placeholders:
            is_pad = is_pad | (ids_1T == token)
        own = self.embedding(ids_1T.masked_fill(is_pad, pad))
        is_pad_T1 = is_pad.t()
        if self.config.sequence_parallel:
            is_pad_T1 = scatter_to_sequence_parallel_region(is_pad_T1)
        else:
            own = own.transpose(0, 1)
        own = torch.where(is_pad_T1[..., None], own.detach(), own) * self.scale
        # a leaf was made by nothing that is trained
        source_T1D = embedded_T1D.detach() if embedded_T1D.is_leaf else embedded_T1D
        projected = self.projection(source_T1D) * self.config.hidden_size**-0.5
        context, own = (each.unflatten(-1, (-1, self.channels)) for each in (projected, own))
        inputs_T1LC = (self.norm(context) + own) * 2**-0.5
        return put(embedded_T1D, aside, *inputs_T1LC.unbind(-2))


class OwnInput(nn.Module):
    """A layer's use of its own input: hidden + norm(projection(activation(gate(hidden)) * input)), times
    a number of the checkpoint's, which is not trained."""

    def __init__(self, config: Any):
        super().__init__()
        self.activation = config.activation_func
        self.gate = WholeLinear(config.hidden_size, config.layer_inputs, config)
        self.projection = WholeLinear(config.layer_inputs, config.hidden_size, config)
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def forward(self, hidden_T1D: Tensor, input_T1C: Tensor) -> Tensor:
        gated = self.activation(self.gate(hidden_T1D)) * input_T1C
        return (hidden_T1D + self.norm(self.projection(gated))) * self.layer_scalar
