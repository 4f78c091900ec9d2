"""The pieces of a model on one rank: their parameters, and what a layer keeps for its backward pass.

The real model is built on shapes, without pipeline stages, and its first layers are run, until each kind of
layer was met. So no formula repeats what the model does.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_vlm.config import RunConfig, fewest_processes
from megatron_vlm.extras.plan.rehearsal import META, as_on_a_gpu, example_batch, model_on_shapes, on_shapes
from megatron_vlm.models.description import Description
from megatron_vlm.models.head import output_losses
from megatron_vlm.models.schedule import streams_of
from megatron_vlm.models.vlm import VLMModel

# Numbers of one rank: "dense" and "experts", apart as other ranks hold the experts' optimizer state, and
# "trained_dense" and "trained_experts" of them
Parameters = Counter[str]
LAYERS = "language_model.decoder.layers."


@dataclass(frozen=True)
class Pieces:
    """The pieces of a model on one rank of a layout without pipeline stages."""

    layers: list[Parameters]
    saved: list[float]  # bytes that each layer keeps of a micro batch for its backward pass
    vision: Parameters  # tower and projector
    inputs: Parameters  # besides these, of the first stage: the embedding
    outputs: Parameters  # of the last stage: the last norm, and an output layer of its own
    tied_outputs: Parameters  # of the last stage besides, if it is not the first: the embedding once more


def measure_pieces(config: RunConfig, description: Description) -> Pieces:
    """Return the pieces under the run's tensor, context and expert parallelism."""
    config = as_on_a_gpu(config)
    if config.model.recompute == "full":
        config.model.recompute = "none"
    config.parallel = replace(config.parallel, pp=1, vpp=1)
    gpus = fewest_processes(config.parallel)  # on more of them a rank has the same pieces
    config.train.global_batch_size = config.train.micro_batch_size * gpus
    with on_shapes(config, description, gpus, 0):
        [model] = model_on_shapes(config, description)
        layers: list[Parameters] = [Counter() for _ in range(model.config.num_layers)]
        kinds: list[list[Hashable]] = [[] for _ in layers]
        other_parts: dict[str, Parameters] = defaultdict(Counter)
        for name, parameter in _named_parameters(model):
            if name.startswith(LAYERS):
                number, _, part = name.removeprefix(LAYERS).partition(".")
                layers[int(number)] += _count(name, parameter)
                kinds[int(number)].append((part, parameter.shape, parameter.requires_grad))
            else:
                other_parts[_place(name)] += _count(name, parameter)
        saved = _saved_by_layers(config, description, model, [tuple(kind) for kind in kinds])
    tied_outputs = other_parts["embedding"] if model.config.tie_embeddings else Counter()
    inputs = other_parts["embedding"] + other_parts["inputs"]
    return Pieces(layers, saved, other_parts["vision"], inputs, other_parts["outputs"], tied_outputs)


def _named_parameters(model: VLMModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Give adapters' parameters the name of the weight that they adapt."""
    yield from (pair for pair in model.named_parameters() if not pair[0].startswith("adapters."))
    for lora in model.adapters.children() if model.adapters else ():
        yield from ((lora.target.weight, parameter) for parameter in lora.parameters())


def _count(name: str, parameter: nn.Parameter) -> Parameters:
    kind = "experts" if ".experts." in name else "dense"
    size = parameter.numel()
    return Counter({kind: size, f"trained_{kind}": size * parameter.requires_grad})


def _place(name: str) -> str:
    if name.startswith("vision."):
        return "vision"
    if ".embedding." in name:
        return "embedding"
    is_last = name.startswith(("language_model.output_layer.", "language_model.decoder."))
    return "outputs" if is_last else "inputs"


def _saved_by_layers(
    config: RunConfig, description: Description, model: VLMModel, kinds: Sequence[Hashable]
) -> list[float]:
    # the second layer of a kind is measured, as the first may keep what all share, such as rotary tables
    measured = {kind: [i for i, other in enumerate(kinds) if other == kind][:2][-1] for kind in kinds}
    decoder = model.language_model.decoder
    decoder.layers = decoder.layers[: max(measured.values()) + 1]
    running: list[int | None] = [None]
    for number, layer in enumerate(decoder.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: running.append(number))
        layer.register_forward_hook(lambda *_: running.append(None))
    kept: list[tuple[int | None, Tensor]] = []
    [stream] = streams_of([model], [example_batch(config, description) | {"visual_inputs": None}])
    tokens = stream.input_ids.shape[1]
    if config.parallel.sequence_parallel:
        tokens //= config.parallel.tp
    hidden = torch.empty(tokens, 1, model.config.hidden_size, dtype=model.config.params_dtype, device=META)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((running[-1], t)), lambda t: t):
        model.language_model.outputs(stream, hidden.requires_grad_(), output_losses)
    counted = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: Counter[int | None] = Counter()
    for number, tensor in kept:
        storage = tensor.untyped_storage()
        if tensor.is_meta and storage._cdata not in counted:
            counted.add(storage._cdata)
            saved[number] += storage.nbytes()
    kept.clear()  # the graph holds the hook, which holds these, which hold it
    return [saved[measured[kind]] for kind in kinds]
