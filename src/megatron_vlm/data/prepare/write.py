"""Writes records as webdataset shards: the same bytes from this process, several, or a Ray cluster."""

import functools
import io
import itertools
import json
import multiprocessing
import os
import signal
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vlm.files import open_to_write
from megatron_vlm.imports import optional_package


@dataclass(frozen=True)
class RecordSource:
    """The arguments of `open_table`, so that any process can open the source."""

    path: str
    split: str | None = None
    media_dir: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    datasets: tuple[str, ...] = ()
    kind: str | None = None

    @functools.lru_cache(maxsize=8)  # noqa: B019  a process opens few sources
    def open(self) -> Any:
        from megatron_vlm.data.chatml.record import Columns
        from megatron_vlm.data.records.opening import open_table

        return open_table(
            self.path,
            self.split,
            columns=Columns(dict(self.columns)),
            media_dir=self.media_dir,
            datasets=self.datasets,
            kind=self.kind,
        )


@dataclass(frozen=True)
class ShardJob:
    """A shard to write; for each record, `items` has the number that names it and its row in the table."""

    order: int
    split: str
    path: Path
    source: RecordSource
    items: list[tuple[int, int]]


@dataclass
class ShardResult:
    order: int
    split: str
    path: Path
    samples: int = 0
    images: int = 0
    skipped: Counter = field(default_factory=Counter)  # of each reason, so many records
    skipped_lines: list[bytes] = field(default_factory=list)  # a line of JSON for each


_stop: Any = None  # in a worker: set in the main process to end it


def _init_worker(stop: Any) -> None:
    """Ctrl-C reaches the whole process group; the main process alone decides, through `stop`."""
    global _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop = stop


def run_here(jobs: Iterator[ShardJob], workers: int) -> Iterator[ShardResult]:
    """Results of jobs on this machine, in order of completion."""
    if workers <= 1:
        yield from map(write_shard, jobs)
        return
    context = multiprocessing.get_context("forkserver")  # the main process may hold Arrow's threads
    context.set_forkserver_preload(["megatron_vlm.data.chatml.sample"])
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _init_worker, (stop,))
    try:
        wait_for_one = partial(wait, return_when=FIRST_COMPLETED)
        submit = partial(pool.submit, write_shard)
        for future in _completed(jobs, submit, wait_for_one, workers):
            yield future.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _completed(jobs: Iterator[ShardJob], submit: Callable, wait_for_one: Callable, workers: int) -> Iterator:
    """Results of the jobs, once `submit` has them; at most two jobs per worker are in flight."""
    pending: list = []
    for job in itertools.chain(jobs, [None]):
        if job is not None:
            pending.append(submit(job))
        while pending and (job is None or len(pending) >= 2 * workers):
            done, pending = map(list, wait_for_one(pending))
            yield from done


def run_on_ray(jobs: Iterator[ShardJob], workers: int | None) -> Iterator[ShardResult]:
    """`run_here` as tasks on the Ray cluster at RAY_ADDRESS, or on one of `workers` cores started here.

    All machines of the cluster must have this package, and see source and output under the same paths.
    `workers` None: every core of the cluster. Raises ImportError if the package `ray` is not installed.
    """
    ray = optional_package("ray", "prepare: --engine ray")
    started = not ray.is_initialized()
    if started and "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    elif started:
        ray.init(log_to_driver=False, num_cpus=workers, include_dashboard=False)
    try:
        workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        task = ray.remote(max_retries=0)(write_shard)
        for done in _completed(jobs, task.remote, ray.wait, workers):
            yield ray.get(done)
    finally:
        if started:
            ray.shutdown()  # ends its tasks too


ENGINES = {"local": run_here, "ray": run_on_ray}


def write_shard(job: ShardJob) -> ShardResult:
    """Writes one tar. Raises InterruptedError if the main process is to end."""
    from megatron_vlm.data.accounts.drops import BadSample
    from megatron_vlm.data.chatml.record import load_media, parse_record
    from megatron_vlm.data.shard_format import sample_parts

    table = job.source.open()
    result = ShardResult(job.order, job.split, job.path)
    with open_to_write(job.path, "xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for number, index in job.items:
            if _stop is not None and _stop.is_set():
                raise InterruptedError("prepare was interrupted")
            try:
                record, root = table.record(index)
                conversation = parse_record(record)
                images, videos = load_media(conversation, root)
                parts = sample_parts(conversation, images, videos)  # checked as the encoder will
            except BadSample as bad:
                result.skipped[bad.reason] += 1
                source, number = table.origin(index)
                entry = {"source": source, "record": number, "split": job.split}
                line = json.dumps(entry | {"reason": bad.reason, "detail": bad.detail})
                result.skipped_lines.append(line.encode() + b"\n")
            else:
                for name, content in parts.items():
                    info = tarfile.TarInfo(f"{job.split}-{number:09d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                result.samples += 1
                result.images += sum(name.startswith("img") for name in parts)
    return result
