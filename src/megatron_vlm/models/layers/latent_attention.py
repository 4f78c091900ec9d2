"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over our stream of documents.

Megatron-Core's own (0.19, `transformer.multi_latent_attention`) makes rotary tables from places in a row and
knows no other positions, and hands its attention the bounds of packed rows where ours takes a plan. The
parameters here have its names and its layout.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import pad

from megatron_vlm.models.layers.attention import CoreAttention
from megatron_vlm.models.layers.attention_plan import AttentionPlan
from megatron_vlm.models.layers.fused import RMSNorm, rotate
from megatron_vlm.parallel.linears import (
    BiasedRowParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
)

# of the norms between two linears, which in Transformers have the default whatever `rms_norm_eps` says
LATENT_EPS = 1e-6


class LatentAttention(MegatronModule):
    """Attention whose queries, and whose keys and values, come through a few channels between two linears.

    The first linears are whole on every rank of tensor parallelism, as the key's turned channels, which all
    heads share; the second ones are cut by heads. Queries, keys and values are filled up with zeros to one
    width, as kernels, exchange and cache take them.
    """

    def __init__(self, config, layer_number: int, pg_collection: ProcessGroupCollection, **_):
        super().__init__(config)
        self.heads = heads = config.latent_heads
        self.tp_group = pg_collection.tp
        width = config.hidden_size
        number = config.num_attention_heads
        common = {"config": config, "skip_bias_add": False, "tp_group": self.tp_group}

        def cut_by_heads(inputs: int, channels: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs,
                number * channels,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                **common,
            )

        # queries, by way of a lower rank if there is one
        if heads.query_rank is None:
            self.linear_q_proj = cut_by_heads(width, heads.scores)
        else:
            self.linear_q_down_proj = WholeLinear(width, heads.query_rank, config, config.add_qkv_bias)
            self.q_layernorm = RMSNorm(config, heads.query_rank, LATENT_EPS)
            self.linear_q_up_proj = cut_by_heads(heads.query_rank, heads.scores)
        # keys and values: down to one rank that all heads share, and up to each head
        compressed = heads.rank + heads.turned
        self.linear_kv_down_proj = WholeLinear(width, compressed, config, config.add_qkv_bias)
        self.kv_layernorm = RMSNorm(config, heads.rank, LATENT_EPS)
        self.linear_kv_up_proj = cut_by_heads(heads.rank, heads.plain + heads.value)
        output_linear = BiasedRowParallelLinear if config.add_proj_bias else RowParallelLinear
        self.linear_proj = output_linear(
            number * heads.value,
            width,
            init_method=config.output_layer_init_method,
            bias=config.add_proj_bias,
            input_is_parallel=True,
            is_expert=False,
            **common,
        )
        self.core_attention = CoreAttention(
            config, layer_number, softmax_scale=config.softmax_scale, pg_collection=pg_collection
        )

    def forward(self, hidden_T1D: Tensor, *_, packed_seq_params: AttentionPlan, **__):
        query = self._queries(hidden_T1D, packed_seq_params)
        key, value = self._keys_and_values(hidden_T1D, packed_seq_params)
        query, key, value = (self._filled(x) for x in (query, key, value))
        context = self.core_attention(query, key, value, packed_seq_params)
        context = context.unflatten(-1, (-1, self.heads.channels))[..., : self.heads.value]
        return self.linear_proj(context.flatten(2))

    def _filled(self, x: Tensor) -> Tensor:
        missing = self.heads.channels - x.shape[-1]
        return pad(x, (0, missing)) if missing else x

    def _queries(self, hidden_T1D: Tensor, plan: AttentionPlan) -> Tensor:
        """(T, 1, H, plain + turned) of this rank's heads."""
        if self.heads.query_rank is None:
            rows, _ = self.linear_q_proj(hidden_T1D)
        else:
            rows, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_T1D)))
        query = rows.unflatten(-1, (-1, self.heads.scores))
        plain, turned = query.split((self.heads.plain, self.heads.turned), dim=-1)
        if plan.query_scale is not None:  # the table for queries has it for the turned channels
            plain = plain * plan.query_scale
        turned = rotate(turned, *plan.turns[0][0], self.config.rotary_interleaved)
        return torch.cat((plain, turned), dim=-1)

    def _keys_and_values(self, hidden_T1D: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """(T, 1, H, plain + turned) and (T, 1, H, value) of this rank's heads."""
        heads = self.heads
        latent, shared = self.linear_kv_down_proj(hidden_T1D).split((heads.rank, heads.turned), dim=-1)
        rows, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        plain, value = rows.unflatten(-1, (-1, heads.plain + heads.value)).split(
            (heads.plain, heads.value), dim=-1
        )
        # its gradient is the sum over the heads of all ranks
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared.contiguous(), group=self.tp_group)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        turned = rotate(shared[:, :, None], *plan.turns[0][-1], self.config.rotary_interleaved)
        return torch.cat((plain, turned.expand(*plain.shape[:-1], -1)), dim=-1), value
