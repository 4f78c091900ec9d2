"""Whether a layout fits the processes, their GPUs, and a model of given sizes; without torch."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from megatron_vlm.config import ConfigError, ParallelConfig

# sizes of a model by Megatron's names: under which keys config.json has them
KEYS = {
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "num_moe_experts": ("num_experts", "n_routed_experts"),
}


def layout_problems(parallel: ParallelConfig, world_size: int | None) -> Iterator[str]:
    """Messages for the user about a wrong layout; `world_size` None: any number of processes."""
    if parallel.vpp > 1 and parallel.pp == 1:
        yield f"parallel: vpp {parallel.vpp} divides pipeline stages, but pp is 1; raise pp or use vpp 1."
    if parallel.vision_dp and parallel.tp * parallel.cp == 1:
        yield "parallel: vision_dp spreads images over tp · cp ranks, here one; raise tp or cp, or drop it."
    if parallel.sp and parallel.tp == 1:
        yield "parallel: sp splits the sequence over tensor-parallel ranks, but tp is 1; raise tp or drop sp."
    if parallel.tp > 1 and parallel.tp_comm_overlap and not parallel.sequence_parallel:
        yield "parallel: tp_comm_overlap needs sequence parallelism; turn it off, or drop sp=false."
    if parallel.tp > 1 and parallel.ep > 1 and not parallel.sequence_parallel:
        yield f"parallel: tp {parallel.tp} · ep {parallel.ep} needs sequence parallelism; drop sp=false."
    if world_size is None or min(parallel.model_size, parallel.ep) < 1:
        return
    yield from _size_problem({"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp}, world_size)
    if parallel.ep > 1:
        yield from _size_problem({"pp": parallel.pp, "ep": parallel.ep}, world_size)


def sizes_in(config_json: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that a config.json states. Those that it leaves to Transformers' defaults are not here."""
    text = config_json.get("text_config")
    text = text if isinstance(text, dict) else config_json
    sizes = {name: text.get(key) for name, keys in KEYS.items() for key in keys if key in text}
    if "num_global_key_value_heads" in text:  # the layers differ
        sizes.pop("num_query_groups", None)
    if "num_hidden_layers" in text and not any("expert" in key for key in text):
        sizes["num_moe_experts"] = 0
    return {name: size for name, size in sizes.items() if type(size) is int}


def misfit(parallel: ParallelConfig, sizes: Mapping[str, Any]) -> str | None:
    """Why a layout does not divide a model, whose sizes have Megatron's names; unknown ones are left out.
    Megatron refuses some of it, too, but does not say what to do."""
    tp = parallel.tp
    experts = sizes.get("num_moe_experts") or 0
    stages = parallel.pp * parallel.vpp
    layers = sizes.get("num_layers")
    if layers and stages > layers:
        return (
            f"parallel: pp · vpp = {stages} stages are more than the model's {layers} layers; "
            "lower pp or vpp."
        )
    if parallel.ep > 1 and sizes.get("num_moe_experts") == 0:
        return (
            f"parallel: ep {parallel.ep} spreads experts, and the model has none; drop it, or use tp or pp."
        )
    if experts and tp > 1 and not parallel.sequence_parallel:
        return f"parallel: a mixture of experts at tp {tp} needs sequence parallelism; drop sp=false."
    layer_heads = sizes.get("layer_heads") or ()
    if stages > 1 and (sizes.get("layer_inputs") or any(heads.source is not None for heads in layer_heads)):
        return (
            f"parallel: pp {parallel.pp} would cut a model whose layers take keys and values or inputs from "
            "earlier stages, which is not implemented; use pp 1, with tp, cp or recomputation."
        )
    groups = {heads.groups for heads in layer_heads} or {sizes.get("num_query_groups")}
    delta_heads = sizes.get("delta_heads")
    divisors = [
        ("tp · cp", tp * parallel.cp, "key heads of gated delta nets", delta_heads and delta_heads.keys),
        ("tp", tp, "attention heads", sizes.get("num_attention_heads")),
        *[("tp", tp, "key/value heads", count) for count in groups],
        ("tp", tp, "feed-forward channels", sizes.get("ffn_hidden_size")),
        ("tp", tp, "shared expert channels", sizes.get("moe_shared_expert_intermediate_size")),
        ("ep", parallel.ep, "experts", experts),
    ]
    for name, size, of_what, count in divisors:
        if count and count % size:
            return f"parallel: {name} = {size} does not divide the model's {count} {of_what}; change {name}."
    return None


def check_gpus(processes: int, gpus: int) -> None:
    """Raises ConfigError unless each process of a machine has a GPU, if the machine has any."""
    if 0 < gpus < processes:
        raise ConfigError(
            f"--nproc: {processes} processes need a GPU each, and this machine shows {gpus}; start at most "
            f"{gpus} here, or show more in CUDA_VISIBLE_DEVICES."
        )


def _size_problem(sizes: dict[str, int], world_size: int) -> Iterator[str]:
    size = prod(sizes.values())
    if world_size % size == 0:
        return
    named = " · ".join(f"{name} {value}" for name, value in sizes.items())
    below = world_size // size * size
    start = f"{below} or {below + size}" if below else f"{size}"
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    yield f"parallel: {named} = {size} does not divide {processes}; change one size or start {start}."
