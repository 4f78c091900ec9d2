"""Experts of each token: as a sample brings them, or as the policy chose them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn
from torch import distributed as dist

from megatron_vlm.models.layers.moe import FREE_ROUTE, Router
from megatron_vlm.parallel.setup import on_device
from megatron_vlm.rl.micro_batches import Document, MicroBatch

FIELD = "routes"
Chosen = dict[int, list[Tensor]]  # layer, counted from 1 -> (T, k) of each micro batch, of this rank's tokens


def add_routes(rows: list[MicroBatch], chunks: list[nn.Module]) -> None:
    """Gives rows the routes of their samples, which may lack them. Raises ValueError for impossible ones."""
    config = get_model_config(chunks[0])
    for row in rows:
        if not any(_routes_of(document) is not None for document in row.documents):
            continue
        if not config.num_moe_experts:
            raise ValueError(
                f"sample {row.documents[0].number}: it has {FIELD}, the model has no experts; leave them out."
            )
        row.batch["routes"] = torch.cat([_routes(document, config) for document in row.documents])[None]


def _routes_of(document: Document) -> Tensor | None:
    routes = document.sample.get(FIELD)
    return torch.as_tensor(routes).cpu() if routes is not None and len(routes) else None


def _routes(document: Document, config) -> Tensor:
    """(T, layers, k) int16, checked."""
    tokens, shape = len(document.input_ids), (config.num_layers, config.moe_router_topk)
    routes_TLJ = torch.full((tokens, *shape), FREE_ROUTE, dtype=torch.int16)
    routes = _routes_of(document)
    if routes is None:
        return routes_TLJ
    place = f"sample {document.number}: {FIELD}"
    if routes.is_floating_point() or len(routes) not in (tokens, tokens - 1) or routes.shape[1:] != shape:
        raise ValueError(
            f"{place} are {routes.dtype} {tuple(routes.shape)} for {tokens} tokens; give whole numbers "
            f"(tokens, layers, experts of each), here ({tokens}, {shape[0]}, {shape[1]}), or one token less."
        )
    # layers without experts keep FREE_ROUTE, and so does a last token that was left out
    with_experts = torch.tensor(config.moe_layer_freq, dtype=torch.bool)
    routes_TLJ[: len(routes), with_experts] = routes.long()[:, with_experts].clamp(-1, 2**15 - 1).short()
    # sorted, equal experts are neighbours and a negative one comes first
    ordered = routes_TLJ.sort(-1).values
    free = ordered[..., -1] < 0
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    wrong = ~free & ((ordered[..., 0] < 0) | twice | (ordered[..., -1] >= config.num_moe_experts))
    if wrong.any():
        token, layer = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{place} of token {token} in layer {layer} are {routes[token, layer].tolist()}; give {shape[1]} "
            f"different experts below {config.num_moe_experts}, or only {FREE_ROUTE} if the router chooses."
        )
    return routes_TLJ


@contextmanager
def recorded(chunks: list[nn.Module]) -> Iterator[Chosen]:
    """Records what the routers choose inside, where nothing is recomputed. Raises ValueError without any."""
    chosen: Chosen = {}
    if not get_model_config(chunks[0]).num_moe_experts:
        raise ValueError(f"{FIELD}: the model has no experts; ask for log-probabilities alone.")

    def note(router: Router, _, output: tuple[Tensor, Tensor]) -> None:
        chosen.setdefault(router.layer_number, []).append(output[1])

    routers = (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router))
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def of_samples(chosen: Chosen, rows: list[MicroBatch], chunks: list[nn.Module]) -> list[Tensor]:
    """(T, layers, k) int16 of each sample, on the host of every rank that has a part of the model; FREE_ROUTE
    in layers without experts. Collective over these ranks."""
    config, layout = get_model_config(chunks[0]), get_attr_wrapped_model(chunks[0], "layout")
    device = next(chunks[0].parameters()).device
    rank, cut = parallel_state.get_tensor_model_parallel_rank(), config.sequence_parallel
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    placed: dict[int, Tensor] = {}
    for number, row in enumerate(rows):
        if not row.documents:
            continue
        shape = row.batch["input_ids"].numel(), config.num_layers, config.moe_router_topk
        # FREE_ROUTE is the least number: a maximum over ranks leaves what one of them knows
        routes_TLJ = torch.full(shape, FREE_ROUTE, dtype=torch.int32, device=device)
        tokens = layout(row.batch).placement.tokens[parallel_state.get_context_parallel_rank()]
        for layer, of_rows in chosen.items():
            experts = of_rows[number]
            rank_tokens = tokens[rank * len(experts) :][: len(experts)] if cut else tokens
            routes_TLJ[on_device(rank_tokens, device), layer - 1] = experts[: len(rank_tokens)].int()
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(routes_TLJ, op=dist.ReduceOp.MAX, group=group)
        parts = routes_TLJ.cpu().short().split([len(document.input_ids) for document in row.documents])
        placed |= {document.number: part for document, part in zip(row.documents, parts, strict=True)}
    return [placed[number] for number in sorted(placed)]
