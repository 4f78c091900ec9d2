"""A small Megatron GPT for the tests of `parallel` and `training`, no tower and no family."""

from __future__ import annotations

from megatron_vlm.parallel import cpu

cpu.install()

import torch  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core import tensor_parallel as tp  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import transformer_block  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_vlm.config import ParallelConfig  # noqa: E402
from megatron_vlm.models.layers.moe import FREE_ROUTE, MoE  # noqa: E402
from megatron_vlm.parallel.layout import megatron_settings  # noqa: E402

SEQ, ROWS, VOCAB = 16, 2, 64


class FreelyRoutedMoE(MoE):
    """Experts of a model without streams: its router chooses for every token."""

    def forward(self, hidden_SBD, padding_mask=None):
        length, rows, _ = hidden_SBD.shape
        return super().forward(hidden_SBD, torch.full((rows, length, 1, 1), FREE_ROUTE, dtype=torch.int16))


class RMSNorm(torch.nn.Module):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def build(parallel: ParallelConfig, moe=False, dtype=torch.float32, only_embedding=False) -> list:
    """This rank's model chunks, one per virtual stage, each in Megatron's DDP."""
    LocalSpecProvider.layer_norm = lambda self, **_: RMSNorm
    transformer_block.LayerNormImpl = RMSNorm
    config = _config(parallel, moe, dtype)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    if moe:
        spec.submodules.mlp = FreelyRoutedMoE
    stages = range(parallel.vpp) if parallel.vpp > 1 else [None]
    models = [_gpt(config, spec, vp) for vp in stages]
    if only_embedding:
        for name, parameter in ((n, p) for model in models for n, p in model.named_parameters()):
            parameter.requires_grad_("word_embeddings" in name)
    return [_wrap(config, parallel, model, first=i == 0) for i, model in enumerate(models)]


def _config(parallel, moe, dtype) -> TransformerConfig:
    experts = dict(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )
    return TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        use_cpu_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        calculate_per_token_loss=True,
        **megatron_settings(parallel),
        **(experts if moe else {}),
    )


def _gpt(config, spec, vp_stage) -> torch.nn.Module:
    ends = dict(ignore_virtual=False, vp_stage=vp_stage)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=ps.is_pipeline_first_stage(**ends),
        post_process=ps.is_pipeline_last_stage(**ends),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
    )
    for parameter in model.parameters():
        tp.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if not config.bf16:
        return model
    narrow = Float16Module(config, model)
    for name, parameter in narrow.named_parameters():
        if name.endswith("pre_mlp_layernorm.weight"):  # some stay as they are, beside others of their group
            parameter.data = parameter.data.float()
    return narrow


def _wrap(config, parallel, model, first) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, ddp, model, disable_bucketing=not first)


def micro_batches(step: int, count: int = 4) -> list[torch.Tensor]:
    """The (ROWS, SEQ + 1) tokens of one global step's micro batches, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator) for _ in range(count)]


def run_step(chunks: list, step: int, optimizer=None, scheduler=None, count: int = 4) -> float:
    """Mean loss per token of one global step of `count` micro batches, equal on every rank."""
    dp, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
    mine = micro_batches(step, count)[rank::dp]
    for chunk in chunks:
        chunk.zero_grad_buffer()
        chunk.config.finalize_model_grads_func = finalize_model_grads
    out = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[iter(mine) for _ in chunks],
        model=chunks,
        num_microbatches=len(mine),
        seq_length=SEQ,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    if optimizer is not None:
        ok, _, _ = optimizer.step()
        assert ok
        optimizer.zero_grad()
        scheduler.step(increment=1)
    total = sum(o["sum"] for o in out) if out else torch.zeros(())
    total = total / (count * ROWS * SEQ)
    if ps.is_pipeline_last_stage():
        torch.distributed.all_reduce(total, group=ps.get_data_parallel_group())
    last = ps.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast(total, last, group=ps.get_pipeline_model_parallel_group())
    return total.item()


def _forward(iterator, model):
    tokens = next(iterator)
    positions = torch.arange(SEQ)[None].expand(ROWS, -1)
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    out = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss(losses):
        total = losses.float().sum()
        return total, torch.tensor(losses.numel(), dtype=torch.int), {"sum": total.detach()}

    return out, loss
