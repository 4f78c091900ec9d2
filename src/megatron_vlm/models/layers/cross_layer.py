"""Tensors that later layers take beside their hidden states, such as keys and values of an earlier layer.

They are in one `CrossLayerTensors`, which goes through all layers in the plan. Recomputation runs a layer
again from its hidden states alone, so no autograd graph may lead from a layer into it. Who reads a tensor
leaves its gradient there, and who published it finds the sum. Both are functions of what goes from layer to
layer (`carrier`), whose gradient has passed all readers before it comes to the publisher.
"""

from typing import Any

import torch
from torch import Tensor


class CrossLayerTensors:
    """Tensors that one put in, and the gradients that others left."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        self.trained = True  # false where who put in asks for no gradient

    def add(self, place: int, gradient: Tensor) -> None:
        gradient_before = self.gradients.get(place)
        self.gradients[place] = gradient if gradient_before is None else gradient_before + gradient


def publish(carrier: Tensor, aside: CrossLayerTensors, *tensors: Tensor) -> Tensor:
    """The carrier, after which `take` gives these tensors; a layer that is recomputed puts them in again."""
    # A layer that will be recomputed first runs without gradients, and cannot say yet what it needs.
    aside.trained = not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors)
    return _Put.apply(carrier, aside, *tensors)


def read(carrier: Tensor, aside: CrossLayerTensors, *places: int) -> tuple[Tensor, ...]:
    """The carrier, and the aside's tensors of these numbers."""
    if not aside.trained:
        return carrier, *(aside.tensors[place] for place in places)
    return _Take.apply(carrier, aside, places)


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carrier: Tensor, aside: CrossLayerTensors, *tensors: Tensor) -> Tensor:
        aside.tensors = [tensor.detach() for tensor in tensors]
        ctx.aside = aside
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Any, ...]:
        gradients = ctx.aside.gradients
        return gradient, None, *(gradients.pop(place, None) for place in range(len(ctx.aside.tensors)))


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, carrier: Tensor, aside: CrossLayerTensors, places: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.aside = aside
        ctx.places = places
        return carrier.view_as(carrier), *(aside.tensors[place].detach() for place in places)

    @staticmethod
    def backward(ctx, gradient: Tensor, *gradients: Tensor) -> tuple[Any, ...]:
        for place, of_taken in zip(ctx.places, gradients, strict=True):
            ctx.aside.add(place, of_taken)
        return gradient, None, None
