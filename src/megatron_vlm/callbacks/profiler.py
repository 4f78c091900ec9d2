"""Where the time of some steps goes: a trace for a viewer and a table by parts of the model."""

import os
from bisect import bisect
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.config import PROFILE_WARM_UP
from megatron_vlm.files import atomic_write
from megatron_vlm.job import watchdog
from megatron_vlm.messages import join_lines
from megatron_vlm.models.language_model import LanguageModel
from megatron_vlm.models.layers.attention import CoreAttention
from megatron_vlm.models.layers.moe import MoE
from megatron_vlm.models.vlm import VLMModel

MODULES = {CoreAttention: "attention", MoE: "experts", LanguageModel: "language model"}
# Ranges that the code itself names, each where it is; all other time of a step is "other".
WHOLE = ("data", "step")
PARTS = {*MODULES.values(), "tower", "head", "optimizer", "data"}
OPERATIONS = {  # names of operations begin with, on any thread
    **dict.fromkeys(("nccl:", "c10d::", "record_param_comms"), "communication"),
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad": "gradients",
}


class Profiler(Callback):
    """Records `steps` steps of a run, after a warm-up.

    One rank of each pipeline stage records. Its trace and its table go into `<run_dir>/profile`, and the
    first rank's table is printed. It changes no number of the run, and writes nothing of steps that do not
    come.
    """

    def __init__(self, steps: int):
        self._steps = steps
        self._profiler: profile | None = None

    def on_train_begin(self, run: Run) -> None:
        ranks = (parallel_state.get_data_parallel_rank, parallel_state.get_tensor_and_context_parallel_rank)
        if any(rank() for rank in ranks):
            return
        first = run.step + 1 + PROFILE_WARM_UP
        name = f"steps_{first}-{first + self._steps - 1}_rank{dist.get_rank()}"
        self._path = Path(run.config.run_dir, "profile", name)
        self._hooks = name_ranges(run.model)
        self._run = run
        if not torch.cuda.is_available():
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports that as an error
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + torch.cuda.is_available()],
            schedule=schedule(wait=PROFILE_WARM_UP - 1, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._profiler.start()

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.on_trace_ready = None  # `step` has written, or not all steps are there
            self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        watchdog.beat(f"writing the profile {self._path}")
        for hook in self._hooks:
            hook.remove()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(f"{self._path}.json.gz")
        watchdog.beat("adding up the profile")
        table_of_parts = table(seconds_by_part(profiler.events()), self._steps)
        atomic_write(f"{self._path}.txt", table_of_parts + "\n")
        trace = f"trace: {self._path}.json.gz, for https://ui.perfetto.dev"
        self.text = join_lines([table_of_parts, trace])
        self._run.message(self.text)


def name_ranges(chunks: list[torch.nn.Module]) -> list[Any]:
    """Hooks that name what modules do in the forward pass; each has `remove`."""
    modules = []
    for module in (module for chunk in chunks for module in chunk.modules()):
        modules += [(module, name) for kind, name in MODULES.items() if isinstance(module, kind)]
        if isinstance(module, VLMModel) and module.pre_process:
            modules.append((module.vision, "tower"))
    return [hook for module, name in modules for hook in _named(module, name)]


def _named(module: torch.nn.Module, name: str) -> tuple[Any, Any]:
    entered: list[record_function] = []

    def enter(*_: Any) -> None:
        entered.append(record_function(name))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)


def seconds_by_part(events: list[FunctionEvent]) -> dict[str, float]:
    """The seconds of all recorded steps by part, with "all" for their sum and more where there is a GPU.

    On a CPU they are the seconds of the thread that trains, so they add up. On a GPU a part's seconds are its
    kernels', which may run beside each other, and "device idle" is when none ran. The operations of a
    backward pass belong to the part of the operation that they are the gradient of.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU and not event.is_async]
    steps = sorted((e.time_range.start, e.time_range.end, e.name) for e in on_host if e.name in WHOLE)
    starts = [start for start, *_ in steps]

    def recorded(event: FunctionEvent) -> bool:
        at = bisect(starts, event.time_range.start) - 1
        return at >= 0 and event.time_range.start <= steps[at][1]

    # only events within a recorded step count, on the thread that trains or on its kernels
    part_of = _parts(on_host)
    trains = {e.thread for e in on_host if e.name == "step"}
    seconds: dict[str, float] = defaultdict(float)
    for event in filter(recorded, on_host):
        if torch.cuda.is_available():
            seconds[part_of[id(event)]] += event.self_device_time_total / 1e6
        elif event.thread in trains:
            seconds[part_of[id(event)]] += event.self_cpu_time_total / 1e6
    # what is left of the whole is time in which the device waits
    seconds["all"] = sum(stop - start for start, stop, _ in steps) / 1e6
    if torch.cuda.is_available():
        seconds["data"] = sum(stop - start for start, stop, name in steps if name == "data") / 1e6
        seconds["device idle"] = seconds["all"] - _busy(filter(recorded, events))
    return dict(seconds)


def _parts(on_host: list[FunctionEvent]) -> dict[int, str]:
    """The part of every event, by its id."""
    forward: dict[tuple[int, int], FunctionEvent] = {}
    by_start = sorted(on_host, key=lambda e: (e.time_range.start, -e.time_range.end))
    for event in by_start:  # of operations with one number, the last made the node of the backward pass
        if not event.fwd_thread and event.sequence_nr >= 0:
            forward[event.thread, event.sequence_nr] = event
    part_of: dict[int, str] = {}
    for event in by_start:  # what an event is in comes before it
        part_of[id(event)] = _own_part(event, forward, part_of) or part_of.get(id(event.cpu_parent), "other")
    return part_of


def _own_part(event: FunctionEvent, forward: dict, part_of: dict[int, str]) -> str | None:
    """The part of an event, None if the event around it has it. Only backward nodes have a forward thread."""
    if event.name in PARTS:
        return event.name
    operations = (part for name, part in OPERATIONS.items() if event.name.startswith(name))
    origin = forward.get((event.fwd_thread, event.sequence_nr)) if event.fwd_thread else None
    return next(operations, part_of.get(id(origin)))


def _busy(events: Any) -> float:
    """Seconds in which at least one kernel ran."""
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    busy, until = 0.0, 0.0
    for event in sorted(kernels, key=lambda e: e.time_range.start):
        busy += max(0.0, event.time_range.end - max(event.time_range.start, until))
        until = max(until, event.time_range.end)
    return busy / 1e6


def table(seconds: dict[str, float], steps: int) -> str:
    """Milliseconds of a step by part, the longest first."""
    total = seconds["all"]
    parts = sorted(((name, s) for name, s in seconds.items() if name != "all"), key=lambda entry: -entry[1])
    lines = [f"{'part':<16}{'ms a step':>12}{'share':>8}"]
    for name, seconds_of_part in [*parts, ("all", total)]:
        lines.append(f"{name:<16}{1000 * seconds_of_part / steps:>12.1f}{seconds_of_part / total:>8.1%}")
    return join_lines(lines)
