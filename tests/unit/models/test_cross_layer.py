"""What layers lay aside for later layers comes back with its gradients, and only where it asked for them."""

from __future__ import annotations

import pytest
import torch

from megatron_vlm.models.layers.cross_layer import CrossLayerTensors, publish, read


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_return_to_who_put_in_and_none_are_left(trained):
    """Two take the same tensor, one of them beside another."""
    aside = CrossLayerTensors()
    hidden = torch.ones(2, requires_grad=True)
    first = torch.full((2,), 3.0, requires_grad=trained)
    second = torch.full((2,), 5.0, requires_grad=trained)
    carrier = publish(hidden, aside, first, second)
    carrier, taken = read(carrier, aside, 0)
    out = carrier * taken
    out, again, other = read(out, aside, 0, 1)
    (out * again * other).sum().backward()
    assert torch.equal(hidden.grad, torch.full((2,), 45.0))
    assert aside.gradients == {}
    if trained:
        assert torch.equal(first.grad, torch.full((2,), 30.0))
        assert torch.equal(second.grad, torch.full((2,), 9.0))


def test_what_is_put_in_without_gradients_is_trained_where_it_is_recomputed():
    """As Megatron's recomputation runs a layer."""
    aside = CrossLayerTensors()
    hidden, lent = (torch.ones(2, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        publish(hidden, aside, lent * 2)
    taking, taken = read(hidden.detach().requires_grad_(), aside, 0)
    (taking * taken).sum().backward()
    publish(hidden, aside, lent * 2).sum().backward()
    assert torch.equal(lent.grad, torch.full((2,), 2.0))
