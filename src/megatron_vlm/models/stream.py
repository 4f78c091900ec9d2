"""A micro batch as the model computes it: a stream of tokens, without the padding of its rows.

Nothing in a transformer layer but attention knows of rows, so rows are laid end to end and attention is told
where documents are. With context parallelism a rank has a part of the stream. All indices are made on the
host from the batch, which is still there, so that no rank ever waits for its device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.batch import IGNORE_INDEX, Batch, GenericVisualInputs, document_spans
from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement
from megatron_vlm.models.layers.moe import FREE_ROUTE, ROUTE_OF_PADDING
from megatron_vlm.models.positions import IMAGE, VIDEO, Kinds
from megatron_vlm.parallel.setup import on_device


@dataclass
class Stream:
    """One rank's tokens of a micro batch, on its device: T of them, padded at the end.

    input_ids       (1, T)
    position_ids    (1, T) or (3, 1, T)
    plan            what each token sees
    visual_inputs   of the whole micro batch, or None
    feature_ranks   (M,) the context-parallel ranks that hold the placeholders, on the host
    feature_rows    (M,) and where they lie there
    output_rows     (n,) the tokens whose loss or logits are wanted
    labels          (n,) of these
    weights         (n,) fp32, of these in the loss; None: 1 for each
    output_places   (n,) where their outputs stand among the `outputs` of all ranks
    outputs         how many those are
    trained_weight  sum of all weights of the micro batch, on all ranks of context parallelism
    routes          (1, T, layers, k) int16, the experts of each token; FREE_ROUTE where the router chooses,
                    ROUTE_OF_PADDING. (1, T, 1, 1) if it always chooses
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: AttentionPlan
    visual_inputs: GenericVisualInputs | None
    feature_ranks: np.ndarray
    feature_rows: np.ndarray
    output_rows: Tensor
    labels: Tensor
    weights: Tensor | None
    output_places: Tensor
    outputs: int
    trained_weight: float
    routes: Tensor


def check_tokens(ids: np.ndarray, kinds: np.ndarray, vocabulary: int) -> None:
    """Raises ValueError for a token of text that has no embedding; one in a feature's place needs none."""
    if (largest := int((ids * (kinds == 0)).max(initial=0))) >= vocabulary:
        raise ValueError(
            f"batch: token {largest} is outside of the model's vocabulary of {vocabulary}: the tokenizer of "
            "model.hf_path has more tokens than the weights have rows. Add these with Transformers "
            "(resize_token_embeddings), and save the model there."
        )


class StreamLayout:
    """How the rows of `batch`, which is on the host, become a stream on `ranks` context-parallel ranks.

    `kinds` says which tokens stand for visual features; with `bidirectional_images`, each run of them in a
    document is a block whose tokens all see each other, see `Description`.
    """

    def __init__(self, batch: Batch, kinds: Kinds, bidirectional_images: bool | str, ranks: int):
        self.batch = batch
        self.ids, documents = batch["input_ids"].numpy().ravel(), document_spans(batch["attention_mask"])
        self.real = np.flatnonzero(batch["attention_mask"])  # places of the stream -> indices into B * S
        # of each place; of one document at a time, as what opens in one closes there
        self.kinds = np.concatenate([np.empty(0, np.int64), *(kinds(self.ids[span]) for span in documents)])
        lengths = [span.stop - span.start for span in documents]
        blocks = _blocks(lengths, self.kinds > 0) if bidirectional_images else []
        self.placement = Placement(lengths, blocks, ranks, bidirectional_images)

    @property
    def longest(self) -> int:
        """The most tokens that a rank holds."""
        return max(map(len, self.placement.tokens))

    def stream(
        self,
        rank: int,
        length: int,
        windows: Iterable[int | None],
        device: torch.device,
        indices: np.ndarray | None = None,
    ) -> Stream:
        """The tokens of `rank`, padded to `length`.

        `indices` into B * S name the tokens whose outputs are computed; None: the trained tokens.
        """
        plan = AttentionPlan(self.placement, rank, length, windows, device)
        is_real = self.real[plan.places]
        row_of = np.full(self.batch["input_ids"].numel(), -1)  # index into B * S -> where it lies here
        row_of[is_real] = np.arange(len(is_real))
        token_index = np.zeros(length, np.int64)  # padding repeats the first token; nothing depends on it
        token_index[: len(is_real)] = is_real
        labels = self.batch["labels"].numpy().ravel() if "labels" in self.batch else np.empty(0)
        trained = np.flatnonzero(labels != IGNORE_INDEX)
        weights = self.batch["loss_mask"].numpy().ravel()[trained] if len(trained) else np.ones(0, np.float32)
        only_ones, of_loss = (weights == 1).all(), indices is None
        indices = trained if of_loss else indices
        output_places = np.flatnonzero(row_of[indices] >= 0)

        # places of all placeholders in the stream: of images in order, then of videos
        placeholders = np.concatenate([np.flatnonzero(self.kinds == kind) for kind in (IMAGE, VIDEO)])
        routes = torch.full((length, 1, 1), FREE_ROUTE, dtype=torch.int16)
        if "routes" in self.batch:
            routes = self.batch["routes"].flatten(0, 1)[token_index]
        routes[len(is_real) :] = ROUTE_OF_PADDING

        def here(numbers: np.ndarray | Tensor) -> Tensor:
            return on_device(numbers, device)

        return Stream(
            input_ids=here(self.ids[None, token_index]),
            position_ids=here(self.batch["position_ids"].flatten(-2)[..., None, token_index]),
            plan=plan,
            visual_inputs=self.batch["visual_inputs"],
            feature_ranks=self.placement.owner[placeholders],
            feature_rows=self.placement.row[placeholders],
            output_rows=here(row_of[indices[output_places]]),
            labels=here(labels[indices[output_places]] if len(labels) else labels),
            weights=None if only_ones or not of_loss else here(weights[output_places]),
            output_places=here(output_places),
            outputs=len(indices),
            trained_weight=weights.sum(dtype=np.float64).item(),
            routes=here(routes[None]),
        )


def _blocks(lengths: list[int], visual: np.ndarray) -> list[tuple[int, int, int]]:
    """(document, start, stop) of each run of visual tokens."""
    blocks, first = [], 0
    for document, length in enumerate(lengths):
        edges = np.flatnonzero(np.diff(visual[first : first + length], prepend=False, append=False)).tolist()
        blocks += [(document, *edge) for edge in zip(edges[::2], edges[1::2], strict=True)]
        first += length
    return blocks
