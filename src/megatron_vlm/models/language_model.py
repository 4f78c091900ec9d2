"""The one place that builds Megatron's language model, and its layers that take more than hidden states.

Deepstack (arXiv 2406.04334) adds visual features to the hidden states after each of the first layers. They
travel, already at their tokens' places, as extra rows of the hidden states' batch axis: layer i of n takes
(S, 1 + n - i, D), adds the first of the extras to its output and passes on the rest. So sequence
parallelism, recomputation and differentiation treat them like the hidden states. They go to another
pipeline stage if a layer there needs them; all stages' messages then have room for what leaves the first.
Without pipelines, a stream without images has none.

Inputs of each layer's own ("per-layer embeddings", `LayerInputs`) are made from tokens and their first
hidden states. The table of tokens is cut along the vocabulary; the linears, a few hundred channels wide,
are whole on every rank of tensor parallelism and see, under sequence parallelism, the rank's own tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding, scatter_to_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn.functional import pad

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.models.layers.attention import CoreAttention, RotarySelfAttention
from megatron_vlm.models.layers.attention_plan import AttentionPlan
from megatron_vlm.models.layers.attention_sizes import DeltaHeads, Heads, LatentHeads, is_recurrent
from megatron_vlm.models.layers.cross_layer import CrossLayerTensors, publish
from megatron_vlm.models.layers.delta_net import GatedDeltaNet
from megatron_vlm.models.layers.fused import (
    GatedFeedForward,
    NormBefore,
    NormThenAdd,
    RMSNorm,
    Rotary,
    cheap_outputs,
    make_again,
)
from megatron_vlm.models.layers.latent_attention import LatentAttention
from megatron_vlm.models.layers.moe import MoE, Router
from megatron_vlm.models.stream import Stream
from megatron_vlm.parallel import linears, setup
from megatron_vlm.parallel.layout import megatron_settings, pipeline_layout, stage_layers
from megatron_vlm.parallel.linears import (
    BiasedRowParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
    embedded,
)
from megatron_vlm.validate import misfit


class DeepstackLayer(TransformerLayer):
    """A transformer layer that adds its own visual features, if it has any, to its output."""

    __call__ = torch.nn.Module.__call__  # Megatron's looks for CUDA graphs, of which there are none

    def forward(self, hidden_states: Tensor, **kwargs):
        layer = self._with_gradients if torch.is_grad_enabled() else self._without_gradients
        extras = hidden_states.shape[1] - 1
        if not extras:
            return layer(hidden_states, **kwargs)
        hidden, features, later_features = hidden_states.split([1, 1, extras - 1], dim=1)
        hidden, context = layer(hidden.contiguous(), **kwargs)
        return torch.cat((hidden + features, later_features), dim=1), context

    def _with_gradients(self, hidden: Tensor, **kwargs) -> tuple[Tensor, None]:
        if not self.config.norms_made_again:
            return super().forward(hidden, **kwargs)
        with cheap_outputs() as cheap:
            output, context = super().forward(hidden, **kwargs)
        make_again(cheap, output)
        return output, context

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

    def forward(self, ids_1T: Tensor, embedded_T1D: Tensor, aside: CrossLayerTensors) -> Tensor:
        """The embedded tokens, after which the aside has the inputs of each layer."""
        pad = self.config.pad_token
        is_pad = ids_1T == pad
        for token in self.config.placeholders:
            is_pad = is_pad | (ids_1T == token)
        of_tokens = embedded(self.embedding, ids_1T[0].masked_fill(is_pad[0], pad))[:, None]
        is_pad_T1 = is_pad.t()
        if self.config.sequence_parallel:
            is_pad_T1 = scatter_to_sequence_parallel_region(is_pad_T1)
        of_tokens = torch.where(is_pad_T1[..., None], of_tokens.detach(), of_tokens) * self.scale
        # a leaf was made by nothing that is trained
        source_T1D = embedded_T1D.detach() if embedded_T1D.is_leaf else embedded_T1D
        projected = self.projection(source_T1D) * self.config.hidden_size**-0.5
        context, of_tokens = (tensor.unflatten(-1, (-1, self.channels)) for tensor in (projected, of_tokens))
        inputs_T1LC = (self.norm(context) + of_tokens) * 2**-0.5
        return publish(embedded_T1D, aside, *inputs_T1LC.unbind(-2))


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


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class LanguageModelConfig(TransformerConfig):
    """Megatron's TransformerConfig, with the fields that our families need besides."""

    vocab_size: int = 0
    tie_embeddings: bool = False
    embedding_scale: float = 1.0  # text embeddings are multiplied by this; visual features are not
    # sliding window of each layer, None: whole document; RECURRENT: a gated delta net with `delta_heads`
    layer_windows: tuple[int | None, ...] = ()
    delta_heads: DeltaHeads | None = None
    latent_heads: LatentHeads | None = None  # all layers have `LatentAttention`
    layer_rotary: tuple[int, ...] = ()  # which rotary rule each layer uses; empty: all use the first
    most_positions: int | None = None  # the rotary rule is known for so many
    layer_heads: tuple[Heads, ...] = ()  # of each layer; empty: kv_channels and num_query_groups of all
    layer_ffn: tuple[int, ...] = ()  # of each layer's feed-forward; empty: ffn_hidden_size of all
    layer_inputs: int = 0  # channels of an input of each layer's own, see `LayerInputs`
    placeholders: tuple[int, ...] = ()  # tokens that have padding's input
    own_layer_spec: Callable[[LanguageModelConfig, int], ModuleSpec] | None = None  # a family's, from ours
    wide_norms: bool = False  # see `RMSNorm`
    logit_softcap: float | None = None  # logits are softcap * tanh(logits / softcap)
    norm_after_sublayer: bool = False  # Gemma: residual + norm(output)
    pad_token: int | None = None  # its embedding gets no gradient from its places in the text
    add_proj_bias: bool = False  # the output projection of attention has a bias
    deepstack_layers: int = 0  # the first layers that add visual features to their output
    attention_backends: Mapping[int, str] = field(default_factory=dict)  # by channels of a layer's heads
    norms_made_again: bool = False  # and outputs of gates, see `layers.fused.make_again`
    images_spread: bool = False  # images are spread over the tensor-parallel ranks, see `models.vlm`

    @property
    def padded_vocabulary(self) -> int:
        """Rows of embedding and output layer on all tensor-parallel ranks, see `weights.rules.Vocabulary`."""
        return self.vocab_size + -self.vocab_size % self.tensor_model_parallel_size


def check_positions(last: int, limit: int | None, whose: str = "a document") -> None:
    """Raises ValueError for a position that is not below `limit` (`LanguageModelConfig.most_positions`)."""
    if limit is not None and last >= limit:
        raise ValueError(
            f"{whose} has {last + 1} tokens, the checkpoint max_position_embeddings = {limit}: beyond these, "
            'the frequencies of its rotary rule "dynamic" depend on the longest row of a batch. '
            f"Use data.seq_length={limit} or less."
        )


def language_model_config(
    config: RunConfig, architecture: dict, stage_costs: tuple[int, float, float]
) -> LanguageModelConfig:
    """The family's architecture under the run's precision and layout; `pipeline_layout` takes `stage_costs`.

    Raises ConfigError if the layout does not divide the model.
    """
    if problem := misfit(config.parallel, architecture):
        raise ConfigError(problem)
    check_positions(config.data.seq_length - 1, architecture.get("most_positions"), "data.seq_length")
    on_cpu = not torch.cuda.is_available()
    dtype = DTYPES[config.model.dtype]
    recompute = {}
    if config.model.recompute == "full":
        layers = recomputed_layers(config, range(architecture["num_layers"]))
        recompute = {"recompute_granularity": "full", "recompute_method": "block"}
        recompute["recompute_num_layers"] = len(layers)
    return LanguageModelConfig(
        **{
            # our defaults; a family may replace any of them
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "moe_router_pre_softmax": architecture.get("moe_router_topk") == 1,  # Megatron asks for it
            # layers that differ cannot be one tensor in a checkpoint
            "hetereogenous_dist_checkpoint": bool({"layer_heads", "delta_heads"} & architecture.keys()),
            **architecture,
            **balancing_settings(config, architecture),
        },
        **recompute,
        norms_made_again=config.model.recompute == "selective",
        images_spread=config.parallel.images_spread,
        **megatron_settings(config.parallel),
        pipeline_model_parallel_layout=pipeline_layout(*stage_costs, config.parallel),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=on_cpu,
        perform_initialization=not config.model.load_weights,
        calculate_per_token_loss=True,  # ranks sum gradients, which `training.step` divides once
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=setup.device().type in linears.DEVICES,
        # These need CUDA extensions that we do not ask for.
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )


def recomputed_layers(config: RunConfig, layers: Sequence[int]) -> Sequence[int]:
    """Return which layers of a (virtual) pipeline stage are run again in the backward pass."""
    return layers[: config.model.recompute_layers] if config.model.recompute == "full" else layers[:0]


def balancing_settings(config: RunConfig, architecture: dict) -> dict:
    """Megatron's settings for the load-balancing loss of Transformers (Switch, arXiv 2101.03961), if any.

    Transformers balances all layers as one and counts a token once for each of its experts; Megatron sums
    over layers and counts a token once. So the coefficient is scaled: one layer has the same loss as in
    Transformers, several have the mean. Raises ConfigError for what only experts have in a model without.
    """
    # the run's setting goes over the checkpoint's
    coefficient = config.model.load_balancing
    if "num_moe_experts" not in architecture:
        settings = {"parallel.ep": config.parallel.ep > 1, "model.load_balancing": coefficient}
        for setting, is_set in settings.items():
            if is_set:
                raise ConfigError(f"{setting}: is for experts, and this model has none; drop it.")
        return {}
    if coefficient is None:
        coefficient = architecture.get("moe_aux_loss_coeff", 0.0)
    if not coefficient:
        return {"moe_router_load_balancing_type": "none"}
    if config.model.recompute == "full" and config.parallel.pp > 1:
        raise ValueError(
            f"model: load_balancing {coefficient} with recomputation and pp {config.parallel.pp} would weigh "
            "one micro batch by another's tokens; use no recomputation, pp 1 or no balancing."
        )
    layers, choices = sum(architecture["moe_layer_freq"]), architecture["moe_router_topk"]
    return {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": coefficient * choices / layers,
    }


def has_experts(megatron_config: LanguageModelConfig, layer: int) -> bool:
    """Whether `layer`, counted from 0 over the whole model, routes to experts."""
    return megatron_config.num_moe_experts is not None and bool(megatron_config.moe_layer_freq[layer])


def layer_spec(megatron_config: LanguageModelConfig, layer: int) -> ModuleSpec:
    """Transformer layer number `layer`: Megatron's parallel linears with our attention and norms."""
    qk_norm = RMSNorm if megatron_config.qk_layernorm else None
    self_attention = ModuleSpec(
        module=RotarySelfAttention,
        params={"attn_mask_type": AttnMaskType.arbitrary},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=BiasedRowParallelLinear if megatron_config.add_proj_bias else RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    # a recurrent layer and latent attention replace attention as a whole
    if is_recurrent(megatron_config, layer):
        self_attention = ModuleSpec(module=GatedDeltaNet)
    if megatron_config.latent_heads:
        self_attention = ModuleSpec(module=LatentAttention)
    # the outputs of attention and feed-forward are added as they are, or after a norm
    norm_then_add = ModuleSpec(NormThenAdd, params={"config": megatron_config})
    add = norm_then_add if megatron_config.norm_after_sublayer else plain_add
    mlp_linears = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    dense_mlp = partial(GatedFeedForward.as_mlp_submodule, submodules=mlp_linears)
    return ModuleSpec(
        module=DeepstackLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=NormBefore,
            self_attention=self_attention,
            self_attn_bda=add,
            pre_mlp_layernorm=NormBefore,
            mlp=MoE if has_experts(megatron_config, layer) else dense_mlp,
            mlp_bda=add,
        ),
    )


class LanguageModel(GPTModel):
    """GPTModel that takes its input embeddings from outside and its rotary tables from `rotary`.

    No other file uses GPTModel, which Megatron calls deprecated. From it come `embedding`, `decoder` and
    `output_layer` by a spec of each layer, the embedding that first and last stage share, names and shards in
    checkpoints, and `set_input_tensor`. `forward` gives `padding_mask` and `packed_seq_params` to the layers,
    begins with `_preprocess` and ends with `_postprocess`, which calls our head as `output_processor`.
    docs/design/architecture.md says why it is not HybridModel.
    """

    def __init__(
        self,
        megatron_config: LanguageModelConfig,
        rotary: Rotary,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ):
        if megatron_config.gradient_accumulation_fusion:
            linears.install()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        spec = megatron_config.own_layer_spec or layer_spec
        specs = [spec(megatron_config, layer) for layer in stage_layers(megatron_config, stage, vp_stage)]
        super().__init__(
            megatron_config,
            TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
            vocab_size=megatron_config.padded_vocabulary,
            max_sequence_length=0,  # only used by learned positions
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="none",
            share_embeddings_and_output_weights=megatron_config.tie_embeddings,
            vp_stage=vp_stage,
        )
        self.rotary = rotary
        if pre_process:
            weight = self.embedding.word_embeddings.weight
            # Megatron says it of tied weights: its hook would add what `gradient_of` returns
            weight.zero_out_wgrad = False
            weight.is_embedded = True
        if megatron_config.layer_inputs and pre_process:
            self.layer_inputs = LayerInputs(megatron_config)
        # rounded to the weights' dtype, as Transformers does
        self.embedding_scale = torch.tensor(
            megatron_config.embedding_scale, dtype=megatron_config.params_dtype, device="cpu"
        ).item()

    def embed(self, input_ids_1T: Tensor) -> Tensor:
        """Scaled text embeddings (T, D), under sequence parallelism of this rank's part of T.

        The padding token's embedding has no gradient, as in Transformers (`nn.Embedding` with padding_idx).
        If a checkpoint pads with a token of its text, such as the end of a turn, that token's embedding does
        not change. With tied weights it is still trained as an output weight.
        """
        hidden_TD = embedded(self.embedding.word_embeddings, input_ids_1T[0])
        if self.config.pad_token is not None:
            is_pad_T1 = input_ids_1T.t() == self.config.pad_token
            if self.config.sequence_parallel:
                is_pad_T1 = scatter_to_sequence_parallel_region(is_pad_T1)
            hidden_TD = torch.where(is_pad_T1, hidden_TD.detach(), hidden_TD)
        return hidden_TD * self.embedding_scale

    def outputs(self, stream: Stream, embedded: Tensor | None, head: Callable[..., Tensor]) -> Tensor:
        """Applies `head`, a function of `models.head`, to the last hidden states; other pipeline stages give
        the hidden states for the next. The first stage is given the embedded tokens."""
        if self.training:  # there is no balancing otherwise, and walking through all modules takes a while
            for router in (module for module in self.modules() if isinstance(module, Router)):
                router.trained_weight = stream.trained_weight
        plan = copy(stream.plan)  # so that its rotary tables live no longer than this pass
        plan.asides = defaultdict(CrossLayerTensors)
        if self.config.layer_inputs:
            embedded = self.layer_inputs(stream.input_ids, embedded, plan.asides[INPUTS])
        run = self if torch.is_grad_enabled() else self._without_gradients
        output = run(
            input_ids=None,
            position_ids=stream.position_ids,
            attention_mask=None,
            decoder_input=embedded,
            padding_mask=stream.routes,  # Megatron only hands it to each layer's feed-forward
            packed_seq_params=plan,
            output_processor=head,
            output_processor_context=stream,
        )
        if self.post_process:
            return output
        return fill_message(self.config, output, self.decoder.layers[-1].layer_number)

    def _without_gradients(
        self,
        input_ids: None,
        position_ids: Tensor,
        attention_mask: None,
        decoder_input: Tensor | None,
        padding_mask: Tensor,
        packed_seq_params: AttentionPlan,
        **head: Any,
    ) -> Tensor:
        """Calls the same modules in the same order as GPTModel, see `DeepstackLayer._without_gradients`."""
        hidden, *_, routes = self._preprocess(
            input_ids, position_ids, decoder_input, padding_mask, packed_seq_params=packed_seq_params
        )
        if not self.pre_process:
            hidden = self.decoder.input_tensor
        for layer in self.decoder.layers:
            hidden, _ = layer(hidden, packed_seq_params=packed_seq_params, padding_mask=routes)
        if self.decoder.final_layernorm is not None:
            hidden = self.decoder.final_layernorm(hidden)
        return self._postprocess(hidden, *[None] * 6, **head)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Called by Megatron's schedules with the previous stage's output."""
        message = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        if message is not None:
            message = read_message(self.config, message, self.decoder.layers[0].layer_number)
        super().set_input_tensor(message)

    def _preprocess(self, input_ids, position_ids, decoder_input=None, padding_mask=None, **arguments):
        routes = padding_mask
        if self.config.sequence_parallel:  # the router sees this rank's part of the tokens
            routes = scatter_to_sequence_parallel_region(routes.transpose(0, 1).contiguous()).transpose(0, 1)
        plan = arguments["packed_seq_params"]
        plan.turns = self.rotary.turns(position_ids, self.config)
        plan.query_scale = self.rotary.query_scales(position_ids, self.config)
        return decoder_input, None, None, None, None, routes
