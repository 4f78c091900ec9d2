"""Where the time of a step goes, what it waits for, and what is compiled for it."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gpu_check.rows import Row
from gpu_check.sizes import ON_CUDA, About, Sizes, described, documents_of
from gpu_check.stack import MODEL, OurStep, documents, packed, run_config
from megatron_vlm.callbacks import Callbacks, Run
from megatron_vlm.callbacks.profiler import Profiler
from megatron_vlm.config import PROFILE_WARM_UP, RunConfig
from megatron_vlm.job.step_schedule import StepSchedule

STEPS = 2  # that are recorded


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    tokens = sizes.rows[0]
    limits: list[str] = []
    with recompile_limits(limits):
        step = OurStep(run_config(tokens), described(MODEL, sizes.dense))
        batch = packed(documents(documents_of(tokens), step.description))
        config = RunConfig(run_dir=str(about.folder))
        profiler = Profiler(STEPS)
        run = Run(config, StepSchedule(config.train, STEPS), Callbacks([profiler]), model=step.chunks)
        run.callbacks.on_train_begin(run)
        for _ in range(PROFILE_WARM_UP + STEPS):
            step(batch)
            run.callbacks.on_step_end(run, {})
        run.callbacks.close()
    for line in profiler.text.splitlines()[1:]:
        *name, milliseconds, share = line.split()
        if line.startswith("trace: "):
            yield Row("profile", "the trace, for ui.perfetto.dev", line.split()[1].rstrip(","))
        else:
            yield Row("profile", f"{' '.join(name)}, milliseconds a step ({share})", float(milliseconds))
    yield from compiled(limits)
    yield from waits(lambda: step(batch))


def compiled(limits: list[str]) -> Iterator[Row]:
    from torch._dynamo.utils import compilation_time_metrics, counters

    yield Row("profile", "graphs compiled", float(counters["stats"]["unique_graphs"]), 12)
    yield Row("profile", "functions that met the limit of recompilations", float(len(limits)), 0)
    yield from (Row("profile", text, "recompilations", wrong=True) for text in limits)
    spent = sum(compilation_time_metrics.get("_compile.compile_inner", ()))
    yield Row("profile", "seconds of compilation", float(spent))


@contextmanager
def recompile_limits(found: list[str]) -> Iterator[None]:
    """Inside, messages of torch's compiler about its limit are put into `found`."""

    class Limits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "recompile_limit" in record.getMessage():
                found.append(record.getMessage().splitlines()[0][:200])

    logger, handler = logging.getLogger("torch._dynamo"), Limits()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def waits(step: Callable[[], object]) -> Iterator[Row]:
    """What the host waits for in one step, by `torch.cuda.set_sync_debug_mode`, and where."""
    if not ON_CUDA:
        yield Row("profile", "waits of a step", "no CUDA")
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{each.filename.split('site-packages/')[-1]}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message)
    )
    yield Row("profile", "waits of a step", float(places.total()))
    for place, count in places.most_common():
        yield Row("profile", f"waits at {place}", float(count))
