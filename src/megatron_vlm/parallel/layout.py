"""How many processes go where, as plain arithmetic: usable before torch is imported or a model built."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vlm.config import ParallelConfig


@dataclass(frozen=True)
class LayoutLimits:
    """What a model allows; a field that is None is not checked."""

    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    num_experts: int | None = None


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    return world_size // (parallel.tp * parallel.pp * parallel.cp)


def sequence_parallel(parallel: ParallelConfig) -> bool:
    """`parallel.sp`, or its default: on exactly when tp > 1."""
    return parallel.tp > 1 if parallel.sp is None else parallel.sp


def megatron_settings(parallel: ParallelConfig) -> dict[str, int | bool | None]:
    """What a Megatron `TransformerConfig` must be told of this layout, as keyword arguments.

    With interleaved stages the point-to-point messages are sent one by one: in a batch, two stages that
    exchange activations and gradients with the same peer take one for the other (wrong losses, no error).
    """
    interleaved = parallel.vpp > 1
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "sequence_parallel": sequence_parallel(parallel),
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def check_layout(parallel: ParallelConfig, world_size: int, limits: LayoutLimits | None = None) -> None:
    """Raise ValueError when `parallel` cannot run on `world_size` processes, or not with this model."""
    for name in ("tp", "pp", "vpp", "cp", "ep"):
        if getattr(parallel, name) < 1:
            raise ValueError(
                f"parallel: {name} {getattr(parallel, name)} is not a size; set {name} to 1 or more."
            )
    _divides_world(parallel, ("tp", "pp", "cp"), world_size)
    _divides_world(parallel, ("tp", "ep", "pp"), world_size)
    if parallel.vpp > 1 and parallel.pp == 1:
        raise ValueError(
            f"parallel: vpp {parallel.vpp} needs a pipeline, pp is 1; set pp to 2 or more or vpp to 1."
        )
    if parallel.tp == 1 and sequence_parallel(parallel):
        raise ValueError(
            "parallel: sp true needs tensor parallelism, tp is 1; set tp to 2 or more or sp to false."
        )
    if parallel.tp > 1 and parallel.ep > 1 and not sequence_parallel(parallel):
        raise ValueError(
            f"parallel: tp {parallel.tp} · ep {parallel.ep} needs sequence parallelism, sp is false; "
            "set sp to true."
        )
    if limits is not None:
        _fits_model(parallel, limits)


def _divides_world(parallel: ParallelConfig, names: tuple[str, ...], world_size: int) -> None:
    sizes = [(name, getattr(parallel, name)) for name in names]
    needed = 1
    for _, size in sizes:
        needed *= size
    if world_size % needed:
        product = " · ".join(f"{name} {size}" for name, size in sizes)
        below = world_size // needed * needed
        starts = f"{below} or {below + needed}" if below else f"{needed}"
        raise ValueError(
            f"parallel: {product} = {needed} does not divide {world_size} processes; "
            f"change one size or start {starts}."
        )


def _fits_model(parallel: ParallelConfig, limits: LayoutLimits) -> None:
    tp, stages = parallel.tp, parallel.pp * parallel.vpp
    if limits.num_layers is not None and limits.num_layers % stages:
        raise ValueError(
            f"parallel: pp {parallel.pp} · vpp {parallel.vpp} = {stages} stages do not divide the model's "
            f"{limits.num_layers} layers; change pp or vpp."
        )
    if limits.num_heads is not None and limits.num_heads % tp:
        raise ValueError(
            f"parallel: tp {tp} does not divide the model's {limits.num_heads} heads; change tp."
        )
    if limits.num_kv_heads is not None and limits.num_kv_heads % tp and tp % limits.num_kv_heads:
        raise ValueError(
            f"parallel: tp {tp} and the model's {limits.num_kv_heads} key/value heads do not divide "
            "one another; change tp."
        )
    if parallel.ep > 1 and (limits.num_experts or 0) % parallel.ep:
        raise ValueError(
            f"parallel: ep {parallel.ep} does not divide the model's {limits.num_experts} experts; change ep."
        )
    if parallel.ep > 1 and not limits.num_experts:
        raise ValueError(f"parallel: ep {parallel.ep}, but the model has no experts; set ep to 1.")
