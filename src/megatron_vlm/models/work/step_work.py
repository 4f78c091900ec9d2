"""The work that the batches of a training step are for a model: tokens, images, and model FLOPs.

Model FLOPs are the operations that the step's documents and images need, however they are computed: what is
computed again (recomputation), padding and blank images count nothing. It is what PaLM's model FLOP
utilisation counts (arXiv 2204.02311, appendix B), with three differences for this package's batches:
attention counts the pairs of tokens that see each other, documents and windows for themselves and without the
half that a causal mask hides; the output layer counts trained tokens only; the tower counts its images.

A product of (m, k) and (k, n) is 2 m k n operations in the forward pass, as many for the gradient of its
input, and as many for its weight's, if that is trained. What is in front of all that is trained has no
gradients.
"""

from collections import Counter
from typing import NamedTuple

from megatron_vlm.batch import IGNORE_INDEX, Batch, GenericVisualInputs
from megatron_vlm.config import RunConfig
from megatron_vlm.models.description import Description
from megatron_vlm.models.stream import StreamLayout
from megatron_vlm.models.work import costs


class Work(NamedTuple):
    """The work of micro batches. `places` are tokens of rows with padding; a video counts as one image."""

    flops: float
    tokens: int
    places: int
    images: int


class StepWork:
    """Counts what micro batches ask of one model; everything is read on the host."""

    def __init__(self, config: RunConfig, description: Description):
        self._description = description
        architecture = description.architecture
        layers = range(architecture["num_layers"])
        # An adapter's own products are too few to count. The hidden states have gradients in any case:
        # embeddings or adapters are trained, or images come from what is.
        reference = costs.reference_passes(config)
        passes = 2 + ("language_model" not in config.frozen) + reference
        self._per_token = passes * sum(costs.product_flops(architecture, i) for i in layers)
        # no weights: gradients of all that goes in
        self._per_token += (3 + reference) * sum(costs.delta_rule_flops(architecture, i) for i in layers)
        self._per_trained_token = passes * costs.output_flops(architecture)
        windows = architecture.get("layer_windows") or [None] * len(layers)
        self._per_pair: Counter[int | None] = Counter()  # by window, over its layers
        for layer, window in enumerate(windows):
            self._per_pair[window] += (3 + reference) * costs.pair_flops(architecture, layer)
        self._per_unit, self._per_feature, self._per_tower_pair = tower_flops(config, description)

    def of(self, batch: Batch) -> Work:
        """The work of a micro batch on the first pipeline stage, which has the images."""
        layout = StreamLayout(
            batch, self._description.visual_kinds, self._description.bidirectional_images, ranks=1
        )
        trained = int((batch["labels"] != IGNORE_INDEX).sum())
        flops = self._per_token * len(layout.real) + self._per_trained_token * trained
        flops += self._attention(layout)
        images = 0
        if batch["visual_inputs"] is not None:
            visual = GenericVisualInputs(**batch["visual_inputs"].normalized_for_model())
            tokens_N = self._description.visual_tokens(visual)
            images = len(tokens_N)
            flops += self._per_feature * sum(tokens_N) + self._per_unit * self._description.tower_units(
                visual
            )
            flops += self._per_tower_pair * self._description.tower_pairs(visual)
        return Work(float(flops), len(layout.real), batch["input_ids"].numel(), images)

    def _attention(self, layout: StreamLayout) -> float:
        """Over all layers, of pairs of a token and one that it sees, in an image block also a later one."""
        placement = layout.placement
        lengths = placement.ends - placement.starts
        blocks = [stop - start for _, start, stop in placement.blocks]
        later = sum(costs.pairs_seen(length - 1, None) for length in blocks)

        def pairs(window: int | None) -> float:
            behind = sum(costs.pairs_seen(placement.behind(length, window), None) for length in blocks)
            return costs.pairs_seen(lengths, window).sum() + placement.has_blocks(window) * later + behind

        return sum(flops * pairs(window) for window, flops in self._per_pair.items())


def tower_flops(config: RunConfig, description: Description) -> tuple[float, float, float]:
    """Operations of tower and projector for each of `Description.tower_units`; of what works on features
    alone, for each of them; and of the tower's attention for a pair of patches. They come from passes of an
    image of shapes alone, with what the run freezes, and of the same image as a `Description.clip`."""
    image, vision, visual = costs.tower_of_shapes(config, description, 0)

    def operations_of(visual: GenericVisualInputs) -> tuple[int, int]:
        with costs.counted() as operations:
            features = vision(**visual.as_model_kwargs())
            if features.requires_grad:
                features.sum().backward()
            for _ in range(costs.reference_passes(config)):
                vision(**visual.as_model_kwargs())
        return operations()

    products, attention = operations_of(visual)
    units = description.tower_units(image)
    per_unit = products / units
    per_feature = 0.0
    if description.clip:
        more, _ = operations_of(description.clip(visual))
        per_unit = (more - products) / (description.tower_units(description.clip(image)) - units)
        per_feature = (products - per_unit * units) / sum(description.visual_tokens(image))
    return per_unit, per_feature, attention / max(1, description.tower_pairs(image))
