"""The gated delta net of Qwen3.5, in the place of a layer's attention.

Megatron-Core's own (0.19, `ssm.gated_delta_net`) needs the package `fla`, calls CUDA by name, and refuses
packed rows where it is to be deterministic. The parameters here have its names. It could take this one's
place if it had none of these limits, with another order of the rows of `in_proj`: here a head of keys has its
rows together, so that a checkpoint goes from any tensor parallelism to any other.

Convolution and rule take the documents of a stream in one call: by flash-linear-attention's kernels where a
check before the run took them, else in plain PyTorch. The kernels are for CUDA and 16 bits. They get the
chunks of documents beside their bounds: else they would count them on the device, and the host would wait for
it.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import softplus

from megatron_vlm.models.layers.attention_plan import AttentionPlan
from megatron_vlm.models.layers.attention_sizes import RECURRENT, DeltaHeads
from megatron_vlm.models.layers.delta_rule import CutDocuments, DeltaRule, Documents, Recomputed, convolved
from megatron_vlm.models.layers.fused import Norm, statistics_dtype
from megatron_vlm.parallel.linears import ColumnParallelLinear, RowParallelLinear

CONVOLVED_AT_ONCE = 2**26  # numbers that are convolved at once in PyTorch


class Kernels(NamedTuple):
    """The package's functions, or others with their signatures."""

    rule: Callable  # fla.ops.gated_delta_rule.chunk_gated_delta_rule
    convolution: Callable  # fla.modules.convolution.causal_conv1d


def installed_kernels() -> Kernels | None:
    """The package's kernels; None if it is not installed. Its import takes seconds and asks for the card."""
    if find_spec("fla") is None:
        return None
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return Kernels(chunk_gated_delta_rule, causal_conv1d)


class GatedDeltaNet(MegatronModule):
    """norm(delta rule(silu(convolution(q, k, v)))) * silu(z), between two linears.

    For T tokens, G of this rank's heads of keys, each with R heads of values. `in_proj` gives each head of
    keys its q and k (K each), its v (R * V), b and a (R each), which are the strength and the decay of the
    rule, and z (R * V).
    """

    kernels: Kernels | None = None  # for all of this process, if a check before the run took them

    def __init__(self, config, layer_number: int, pg_collection: ProcessGroupCollection, **_):
        super().__init__(config)
        self.group = pg_collection.cp
        ranks = config.tensor_model_parallel_size
        self.tp_group = pg_collection.tp
        self.heads = heads = config.delta_heads
        self.ratio = heads.values // heads.keys
        self.sizes = sizes_of_head(heads)
        common = {"config": config, "bias": False, "skip_bias_add": False, "tp_group": self.tp_group}
        width = config.hidden_size
        values = heads.values * heads.value_channels
        rows = heads.keys * sum(self.sizes)
        self.in_proj = ColumnParallelLinear(
            width, rows, init_method=config.init_method, gather_output=False, **common
        )
        self.out_proj = RowParallelLinear(
            values,
            width,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            is_expert=False,
            **common,
        )
        empty = {"dtype": config.params_dtype, "device": self.in_proj.weight.device}
        channels = heads.keys // ranks * sum(self.sizes[:3])
        self.conv1d = nn.Parameter(torch.empty(channels, 1, heads.taps, **empty))
        self.dt_bias = nn.Parameter(torch.ones(heads.values // ranks, **empty))
        # in fp32, as published checkpoints have them beside weights in bf16: that would not hold the values
        empty["dtype"] = statistics_dtype(config.params_dtype)
        self.A_log = nn.Parameter(torch.empty(heads.values // ranks, **empty))
        self.out_norm = nn.Parameter(torch.ones(heads.value_channels, **empty))
        if config.perform_initialization:
            nn.init.uniform_(self.conv1d, -(heads.taps**-0.5), heads.taps**-0.5)
            with torch.no_grad():
                self.A_log.uniform_(0.01, 16).log_()
        for weight in (self.conv1d, self.dt_bias, self.A_log):
            weight.tensor_model_parallel = True

    def forward(self, hidden_T1D: Tensor, *_, packed_seq_params: AttentionPlan, **__) -> tuple[Tensor, None]:
        rows, _ = self.in_proj(hidden_T1D)
        rows_TGX = rows.squeeze(1).unflatten(-1, (-1, sum(self.sizes)))
        mixed_TGX, gate_TGX = rows_TGX.tensor_split([sum(self.sizes[:-1])], dim=-1)
        recur = packed_seq_params.recur or GatedDeltaNet.recur
        outputs_TGRV = recur(self, mixed_TGX, packed_seq_params)
        # each rank has the gradient from its heads
        weight_V = copy_to_tensor_model_parallel_region(self.out_norm, group=self.tp_group)
        gated = Recomputed.apply(self._gated, outputs_TGRV, gate_TGX, weight_V)
        return self.out_proj(gated.flatten(1)[:, None])

    def _gated(self, outputs_TGRV: Tensor, gate_TGX: Tensor, weight_V: Tensor) -> Tensor:
        normed = Norm.apply(outputs_TGRV, weight_V, self.config.layernorm_epsilon, False, False)
        gate = nn.functional.silu(gate_TGX.view_as(outputs_TGRV).float())
        return (normed * gate).to(normed.dtype)

    def recur(self, mixed_TGX: Tensor, plan: AttentionPlan) -> Tensor:
        """Convolution and rule over the documents of a plan; (T, G, R, V)."""
        documents = plan.views[RECURRENT]
        cut = documents.cut
        if cut is None:
            return self._of_documents(mixed_TGX, documents.whole)
        of_whole = self._of_documents(mixed_TGX.index_select(0, cut.others), documents.whole)
        shared = self._of_documents(self._to_heads(mixed_TGX, cut), cut.documents, self.group.rank())
        return torch.cat((of_whole, self._to_tokens(shared, cut))).index_select(0, cut.joined)

    def _to_heads(self, mixed_TGX: Tensor, cut: CutDocuments) -> Tensor:
        """All tokens of cut documents, for this rank's part of the heads."""
        ranks = self.group.size()
        sent = mixed_TGX.index_select(0, cut.rows).unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        count = cut.counts[self.group.rank()]
        received = all_to_all(self.group, sent.contiguous(), cut.counts, [count] * ranks)
        return received.index_select(0, cut.order)

    def _to_tokens(self, outputs_MGRV: Tensor, cut: CutDocuments) -> Tensor:
        """This rank's tokens of cut documents, for all heads."""
        ranks = self.group.size()
        count = cut.counts[self.group.rank()]
        sent = outputs_MGRV.index_select(0, cut.back)
        received = all_to_all(self.group, sent, [count] * ranks, cut.counts)
        return received.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)

    def _of_documents(self, mixed_TGX: Tensor, documents: Documents, part: int | None = None) -> Tensor:
        """(T, G, R, V) of documents. `part`: of this part of the heads, as many as `mixed_TGX` has."""
        conv = self._part(self.conv1d, part).squeeze(1)
        convolved_TC = convolution(self.to_convolve(mixed_TGX), conv, documents, self.kernels)
        return delta_rule(*self.rule_inputs(convolved_TC, mixed_TGX, part), documents, self.kernels)

    def to_convolve(self, mixed_TGX: Tensor) -> Tensor:
        """(T, C): q, k and v of all heads."""
        return mixed_TGX[..., : sum(self.sizes[:3])].flatten(1)

    def rule_inputs(
        self, convolved_TC: Tensor, mixed_TGX: Tensor, part: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """query, key, value, decay and beta of the rule."""
        query, key, value = convolved_TC.unflatten(1, (mixed_TGX.shape[1], -1)).split(self.sizes[:3], dim=-1)
        b_TGR, a_TGR = mixed_TGX[..., -2 * self.ratio :].chunk(2, dim=-1)
        A_log = self._part(self.A_log, part)
        dt_bias = self._part(self.dt_bias, part)
        decay = -A_log.exp() * softplus(a_TGR.flatten(1).float() + dt_bias)
        return query, key, value.unflatten(-1, (self.ratio, -1)), decay.view_as(a_TGR), b_TGR.sigmoid()

    def _part(self, weight: Tensor, part: int | None) -> Tensor:
        return weight if part is None else weight.chunk(self.group.size())[part]

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict[str, ShardedTensor]:
        cut = {name: 0 for name in ("conv1d", "dt_bias", "A_log")}
        parameters = {name: param for name, param in self.named_parameters(recurse=False)}
        sharded = make_sharded_tensors_for_checkpoint(parameters, prefix, cut, sharded_offsets)
        for name, module in self.named_children():
            sharded |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return sharded


def sizes_of_head(heads: DeltaHeads) -> tuple[int, ...]:
    """The rows of q, k, v, b, a and z in `in_proj`, of each head of keys."""
    ratio = heads.values // heads.keys
    values = ratio * heads.value_channels
    return heads.key_channels, heads.key_channels, values, ratio, ratio, values


def convolution(x_TC: Tensor, weight_CW: Tensor, documents: Documents, by: Kernels | None) -> Tensor:
    """`rule.convolved` over documents. In PyTorch, which takes several tensors in fp32, long streams are
    convolved some channels after the other."""
    if by is None or not len(x_TC):
        at_once = max(1, CONVOLVED_AT_ONCE // max(1, len(x_TC)))
        slabs = zip(x_TC.split(at_once, 1), weight_CW.split(at_once), strict=True)
        parts = [Recomputed.apply(convolved, x, weight, documents.place) for x, weight in slabs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    stream = {"cu_seqlens": documents.bounds, "chunk_indices": documents.chunks}
    return by.convolution(x_TC[None], weight_CW, activation="silu", **stream)[0][0]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Documents,
    by: Kernels | None,
) -> Tensor:
    """`rule.DeltaRule` over documents. The package counts heads of values, as they lie here: all that share a
    head of keys, then the next."""
    if by is None or not len(value):
        return DeltaRule.apply(query, key, value, decay, beta, documents.number)
    outputs, _ = by.rule(
        query[None],
        key[None],
        value.flatten(1, 2)[None],
        decay.flatten(1, 2)[None],
        beta.flatten(1, 2)[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=documents.bounds,
        chunk_indices=documents.chunks,
    )
    return outputs[0].view(value.shape)
