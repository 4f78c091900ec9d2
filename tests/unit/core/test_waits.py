"""Where the host waits for the device: nowhere but where a table says why. Operations on tensors of host and
device, which a GPU refuses, are none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
import parity
import pytest
import torch
from pairs import covering, pairs_of
from torch import Tensor

import rehearse_waits
from device_waits import WaitRecorder, waiting_on_shapes
from megatron_vlm.config import ParallelConfig
from megatron_vlm.extras.plan.recorder import META
from megatron_vlm.models.families import load
from megatron_vlm.parallel.setup import on_device
from tiny.checkpoints import TINY_FAMILIES

REASONS = rehearse_waits.REASONS


@pytest.fixture
def rehearsing() -> Iterator[WaitRecorder]:
    run = rehearse_waits.run_of(ParallelConfig(), 1)
    with waiting_on_shapes(run, rehearse_waits.description_of("gemma3"), 1, 0) as recorder:
        yield recorder


PINNED = {
    "to": lambda x, host: host.pin_memory().to(META, non_blocking=True),
    "copy_": lambda x, host: x.copy_(host.pin_memory(), non_blocking=True),
    "a part": lambda x, host: host.pin_memory()[1:].to(META, non_blocking=True),
    "on_device": lambda x, host: on_device(host.t(), META),
    "on_device, numpy": lambda x, host: on_device(np.arange(3), META),
    "a number": lambda x, host: x * torch.tensor(2.0) + 1,
    "filled": lambda x, host: torch.full((), 2.0, device=META) * x,
}
WAITS = {
    "item": lambda x, host: x.sum().item(),
    "bool": lambda x, host: bool(x.any()),
    "cpu": lambda x, host: x.cpu(),
    "tolist": lambda x, host: x.long().sum().tolist(),
    "into the host's": lambda x, host: host.clone().copy_(x),
    "synchronize": lambda x, host: torch.cuda.synchronize(),
    "stream": lambda x, host: torch.cuda.current_stream().synchronize(),
    "event": lambda x, host: torch.cuda.Event().synchronize(),
    "blocking": lambda x, host: host.pin_memory().to(META),
    "pageable": lambda x, host: host.to(META, non_blocking=True),
    "another dtype": lambda x, host: host.pin_memory().to(META, torch.bfloat16, non_blocking=True),
    "turned": lambda x, host: host.pin_memory().t().to(META, non_blocking=True),
    "blocking copy_": lambda x, host: x.copy_(host.pin_memory()),
    "pageable copy_": lambda x, host: x.copy_(host, non_blocking=True),
    "made there": lambda x, host: torch.tensor([1, 2], device=META),
    "list of rows": lambda x, host: x[torch.tensor([0, 1])],
    "rows set": lambda x, host: x.index_put_((torch.tensor([0, 1]),), x[:2]),
}
REFUSED = {
    "index_select": lambda x, host: x.index_select(0, torch.tensor([0, 1])),
    "gather": lambda x, host: x.gather(0, torch.zeros(1, 8, dtype=torch.long)),
    "matmul": lambda x, host: x @ host.t(),
    "linear": lambda x, host: torch.nn.functional.linear(x, host),
    "embedding": lambda x, host: torch.nn.functional.embedding(torch.tensor([0, 1]), x),
    "conv": lambda x, host: torch.nn.functional.conv1d(x[None], torch.ones(2, 4, 3)),
    "searchsorted": lambda x, host: torch.searchsorted(x, host),
}


def backward(x: Tensor, host: Tensor) -> None:
    x = x.requires_grad_() * 1
    x.register_hook(lambda gradient: gradient @ host.t() @ host)
    x.sum().backward()


REFUSED["backward"] = backward
Do = Callable[[Tensor, Tensor], object]


def done(recorder: WaitRecorder, do: Do) -> Counter[str]:
    x, host = torch.zeros(4, 8, device=META), torch.ones(4, 8)
    recorder.waits = Counter()
    do(x, host)
    return recorder.waits


@pytest.mark.parametrize("do", PINNED.values(), ids=PINNED)
def test_nobody_waits_for_pinned_copies(rehearsing, do):
    assert not done(rehearsing, do)


@pytest.mark.parametrize("do", WAITS.values(), ids=WAITS)
def test_every_wait_is_counted_with_its_place(rehearsing, do):
    found = done(rehearsing, do)
    assert found.total() == 1 and "core/test_waits.py:" in next(iter(found)), found


def check(waits: dict[str, dict[str, int]], runs: Iterable[str] = rehearse_waits.PARTS) -> None:
    assert waits.keys() == {part for run in runs for part in rehearse_waits.PARTS[run]}
    unnamed = {part: set(places) - REASONS.keys() for part, places in waits.items()}
    assert not any(unnamed.values()), unnamed
    more = {
        (part, place): count
        for part, places in waits.items()
        for place, count in places.items()
        if count > (REASONS[place].most or count)
    }
    assert not more


# layout and rank, in `make test`, of Gemma3; the first stage of a pipeline does other things than the last
OFTEN = {("TP2+SP", 1): ("policy",), ("PP2·VPP2", 1): ("preferences",), ("CP2", 1): ("training",)}


def cells() -> list:
    """`make test-long` has few besides: each two of family, kind of parallelism, run, and first or last rank
    meet in one, and every layout has a model with experts and one without. `make test-soak` has all."""
    runs = [*rehearse_waits.PARTS]
    every = [
        (family, layout, rank, runs[(number + place + turn) % len(runs)])
        for number, family in enumerate(TINY_FAMILIES)
        for place, layout in enumerate(parity.layouts_of(family))
        for rank in sorted({0, parity.LAYOUTS[layout][0] - 1})
        for turn in range(len(runs))  # the first of equal cells is chosen, so another run for each
    ]
    short = [cell for cell in every if cell[0] == "gemma3" and cell[3] in OFTEN.get(cell[1:3], ())]
    in_short = set().union(*map(shows, short))
    further = [cell for cell in every if cell[0] in parity.IN_LONG[1:2]]
    paired = covering(further, lambda cell: shows(cell) - in_short)
    long, soak = [pytest.mark.long], [pytest.mark.soak]
    return [
        pytest.param(*cell, marks=[] if cell in short else long if cell in paired else soak) for cell in every
    ]


def shows(cell: tuple[str, str, int, str]) -> set[Hashable]:
    family, layout, rank, run = cell
    kinds = parity.kinds_of_parallelism(*parity.LAYOUTS[layout])
    met = [pairs_of((family, kind, bool(rank), run)) for kind in kinds]
    return set().union(*met, {(layout, load(family).has_experts)})


@pytest.mark.parametrize(("family", "layout", "rank", "run"), cells())
def test_a_run_waits_where_the_table_says(family, layout, rank, run):
    gpus, parallel = parity.LAYOUTS[layout]
    check(rehearse_waits.waits(family, parallel, gpus, rank, [run]), [run])


def test_the_report_names_every_wait_in_each_kind_of_layout():
    report = json.loads(rehearse_waits.REPORT.read_text(encoding="utf-8"))
    rows = report["rows"]
    assert report["reasons"] == {place: reason.why for place, reason in REASONS.items()}
    families = {row["family"] for row in rows}
    cells = {(name, layout) for name in families for layout in rehearse_waits.layouts_of(name, every=False)}
    assert {(row["family"], row["layout"]) for row in rows} >= cells
    for row in rows:
        check(row["waits"])
