"""The copies of an offloaded Adam overlap, and no order that its streams allow changes a bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_vlm.training import optimizer
from megatron_vlm.training.optimizer import OffloadedAdam, offload

SIZES, STEPS = (1, 999, 16, 3000, 0, 257), 3
METHODS = ("_fetch", "_update", "_send")


class Device:
    """Stands in for torch.cuda's streams: operations wait in a list until `run`, and some for others."""

    def __init__(self, monkeypatch):
        self.operations: list[tuple[str, Callable[[], None], set[int]]] = []  # method, call, those before it
        self.waiting: set[int] = set()
        self.main = self.current = Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        streams = {"_fetch": "arriving", "_send": "leaving"}
        for name in METHODS:
            monkeypatch.setattr(OffloadedAdam, name, self._later(name, streams.get(name)))

    @contextmanager
    def _on(self, stream: Stream):
        self.current, before = stream, self.current
        yield
        self.current = before

    def _later(self, name: str, stream_name: str | None) -> Callable:
        method = getattr(OffloadedAdam, name)

        def later(adam: OffloadedAdam, *arguments) -> list:
            stream = getattr(adam, stream_name) if stream_name else self.main
            results: list = []

            def call() -> None:
                results.extend(method(adam, *arguments) or ())

            self.operations.append((name, call, set(stream.last)))
            stream.last = {len(self.operations) - 1}
            self.waiting |= stream.last
            return results

        return later

    def run(self, first: Callable[[tuple[str, int]], float]) -> None:
        """Calls all; of those that wait for no other, the one for which `first` is least."""
        while self.waiting:
            ready = [number for number in self.waiting if not self.operations[number][2] & self.waiting]
            number = min(ready, key=lambda i: first((self.operations[i][0], i)))
            self.operations[number][1]()
            self.waiting.remove(number)

    def seconds(self, costs: dict[str, float]) -> float:
        ends: list[float] = []
        for name, _, before in self.operations:
            ends.append(costs[name] + max((ends[i] for i in before), default=0.0))
        return max(ends)


class Stream:
    def __init__(self):
        self.last: set[int] = set()  # what the next operation waits for

    def wait_stream(self, other: Stream) -> None:
        self.last |= other.last


def adam_of(sizes, is_offloaded: bool) -> tuple[OffloadedAdam, list[torch.Tensor], list[torch.Tensor]]:
    """Adam, its parameters and the model's in bf16; every third is in fp32 alone."""
    generator = torch.Generator().manual_seed(0)
    mains = [torch.randn(size, generator=generator) for size in sizes]
    short = [main for number, main in enumerate(mains) if number % 3 != 2]
    models = [main.bfloat16() for main in short]
    groups = [{"params": mains[:3], "weight_decay": 0.1}, {"params": mains[3:], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.1, fused=True)
    if is_offloaded:
        offload(
            SimpleNamespace(
                optimizer=adam, shard_fp32_from_float16_groups=[short], shard_float16_groups=[models]
            )
        )
    return adam, mains, models


def gradients(mains: list[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, main in enumerate(mains):
        main.grad = torch.randn(len(main), generator=generator) if number != step else None


def numbers_of(adam, mains, models) -> list[torch.Tensor]:
    states = [[adam.state[main][name] for name in ("exp_avg", "exp_avg_sq", "step")] for main in mains]
    params = [adam.state[main].get("param", main) for main in mains]
    return [tensor.clone() for tensor in [*sum(states, []), *params, *models]]


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    """What torch's own AdamW makes of it."""
    adam, mains, models = adam_of(SIZES, False)
    for step in range(STEPS):
        gradients(mains, step)
        adam.step()
        for model, main in zip(models, [m for i, m in enumerate(mains) if i % 3 != 2], strict=True):
            model.copy_(main)
    for main in mains:  # torch makes a state at the first gradient
        assert adam.state[main]
    return numbers_of(adam, mains, models)


ORDERS = {
    "copies to the device first": lambda operation: METHODS.index(operation[0]),
    "copies to the host first": lambda operation: -METHODS.index(operation[0]),
    "the last first": lambda operation: -operation[1],
} | {
    f"random {seed}": partial(lambda generator, _: generator.random(), random.Random(seed))
    for seed in range(20)
}


@pytest.mark.parametrize("bucket", [1 << 20, 1024, 192])
def test_buckets_change_no_bit(monkeypatch, plain, bucket):
    monkeypatch.setattr(optimizer, "BUCKET", bucket)
    adam, mains, models = adam_of(SIZES, True)
    for step in range(STEPS):
        gradients(mains, step)
        adam.step()
    assert all(map(torch.equal, numbers_of(adam, mains, models), plain))


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_that_the_streams_allow_gives_the_same_bits(monkeypatch, plain, order):
    monkeypatch.setattr(optimizer, "BUCKET", 192)
    device = Device(monkeypatch)
    adam, mains, models = adam_of(SIZES, True)
    for step in range(STEPS):
        gradients(mains, step)
        adam.step()
        device.run(ORDERS[order])
    assert all(map(torch.equal, numbers_of(adam, mains, models), plain))


def test_a_step_begins_when_the_one_before_has_ended(monkeypatch):
    """Else it would read what is still on its way to the host, or use memory that is still read."""
    monkeypatch.setattr(optimizer, "BUCKET", 192)
    device = Device(monkeypatch)
    adam, mains, _ = adam_of(SIZES, True)
    for step in (1, 1):
        before = set(device.waiting)
        gradients(mains, step)
        adam.step()
    befores: list[set[int]] = []
    for _, _, direct in device.operations:
        befores.append(direct.union(*(befores[i] for i in direct)))
    assert before and all(before <= befores[number] for number in device.waiting - before)


def test_copies_in_and_out_and_updates_overlap(monkeypatch):
    """32 buckets whose copies take a second each way and whose update takes a tenth."""
    monkeypatch.setattr(optimizer, "BUCKET", 1024)
    device = Device(monkeypatch)
    adam, mains, _ = adam_of([32_000, 0, 0, 0], True)
    gradients(mains, 1)
    adam.step()
    assert device.seconds({"_fetch": 1.0, "_update": 0.1, "_send": 1.0}) < 1.1 * 32


def test_a_step_holds_two_buckets_on_the_device(monkeypatch):
    from megatron_vlm.extras.plan.recorder import TensorMemory

    monkeypatch.setattr(optimizer, "BUCKET", 1024)
    adam, mains, models = adam_of([32_000, 0, 0, 0], True)
    gradients(mains, 1)
    with TensorMemory() as memory:
        memory.count_all([adam.state, mains, models, [main.grad for main in mains]])
        before = memory.alive
        adam.step()
    assert memory.peak - before == 2 * 12 * 1024
