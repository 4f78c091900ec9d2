"""Any source that `data.records.opening` opens (JSON(L), meta file, parquet, hub name) → an Energon dataset.

What is written, ready for stock `energon` and for this package:

    OUTPUT/train-00000.tar      per sample `<key>.json` (the conversation and its `images` in order) and
                                `<key>.img000.jpg`, ... (the source's own encoded files, each decoded once),
                                `<key>.vid000.mp4`, ... or, for a list of frames, `<key>.vid000f0000.jpg`, ...
    OUTPUT/.nv-meta/            Energon's index, `split.yaml` with explicit shard names, `dataset.yaml`
    OUTPUT/skipped.jsonl        every record left out: source, record number, split, reason, detail

A key is the split and the record's number in its source (JSONL lines count from 0, blank lines included).
Of a meta file the first epoch is written, and the number is the row's number in it.
Every record belongs to exactly one split. OUTPUT appears by one rename when everything is written.

The shards are the same bytes from this process, several, or a Ray cluster.

Plain WebDataset shards become an Energon dataset where they are, or in OUTPUT as links: `index_shards`.
"""

import functools
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import tarfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml
from megatron.energon import BaseWebdatasetFactory, __version__
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.indexing import DuplicateSampleKeyError
from megatron.energon.flavors.webdataset.prepare import IndexSample, SqliteIndexWriterAggregator
from tqdm import tqdm

from megatron_vlm import stores
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import REASONS, BadSample
from megatron_vlm.data.chatml.record import Columns, load_media, parse_record
from megatron_vlm.data.load.energon import EnergonSamples
from megatron_vlm.data.load.energon_safety import META
from megatron_vlm.data.load.start_notes import LOOKED_AT, first_notes, sample_sources
from megatron_vlm.data.on_disk.paths import sources_of, tar_shards
from megatron_vlm.data.records.opening import kind_of, open_table, source_splits
from megatron_vlm.data.shard_format import sample_parts
from megatron_vlm.files import atomic_directory, atomic_write, open_file, open_to_write, refuse_existing
from megatron_vlm.imports import optional_package
from megatron_vlm.inputs import attribute_errors_to, explain_file
from megatron_vlm.messages import join_lines

DEFAULT_SPLITS = {"train": 0.9, "val": 0.1}
FEW_RECORDS = 3000  # for fewer, worker processes cost more to start than they save
FEW_SHARDS = 16  # for fewer, more than two processes cost more to start than they save
FORMATS = {"auto": None, "json": "json", "jsonl": "json", "hf": "hf", "meta": "meta"}
MOST_NAMED = 10  # bad shards, or kinds of bad samples, that a message names
SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
DATASET_YAML = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


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


@dataclass
class PrepareSummary:
    """The counts of what was written; `str()` gives the table that the command prints."""

    output: Path
    samples: dict[str, int]  # per split
    shards: dict[str, int]  # per split
    images: int | None  # None if nobody has counted them
    total_bytes: int  # of the shards
    skipped: dict[str, int]  # per reason
    seconds: float
    notes: list[str]  # what the first records of the sources tell

    def __str__(self) -> str:
        lines = [f"{self.output}: {self.total_bytes / 1e6:.1f} MB in {self.seconds:.1f} s"]
        lines += [
            f"  {split}: {count} samples in {self.shards[split]} shards"
            for split, count in self.samples.items()
        ]
        if self.images is not None:
            lines += [f"  {self.images} images", f"  {sum(self.skipped.values())} records skipped"]
        lines += [f"    {reason}: {count}" for reason, count in sorted(self.skipped.items())]
        return "\n".join(lines + [f"  {note}" for note in self.notes])


@attribute_errors_to("source")
def prepare_energon_dataset(
    source: str | Path | Mapping[str, str | Path],
    output: str | Path,
    *,
    image_root: str | Path | None = None,
    format: str = "auto",
    splits: Mapping[str, float] | None = None,
    samples_per_shard: int = 1000,
    workers: int | None = None,
    seed: int = 1234,
    columns: Mapping[str, str] | None = None,
    datasets: Sequence[str] = (),
    engine: str = "local",
    progress: bool = True,
) -> PrepareSummary:
    """Write `source` as an Energon dataset to `output`, all of it or nothing.

    `source` is a file or folder, divided over `splits` (relative sizes; exact counts, the same for the same
    `seed`), or a mapping from split name to file or folder. With `splits` None, a Hugging Face source with
    several splits keeps them ("validation" becomes "val"); any other source gets DEFAULT_SPLITS. Image paths
    are relative to `image_root`, by default the source's folder, and may not leave it. `columns` and
    `datasets` are as in `open_table`. `workers` None means one process for few records and one per core for
    more; a script that asks for several needs the usual `if __name__ == "__main__"`. `engine` "ray" writes
    the same files on a Ray cluster whose machines share source and output.

    Raises FileExistsError if `output` holds anything, ValueError for bad arguments or if every record was
    skipped. On any error or interrupt nothing is left behind.
    """
    started = time.monotonic()
    output = Path(output).resolve()  # the rename at the end cannot replace a link
    if output.is_mount():
        raise ValueError(f"prepare: {output} is a mounted file system; choose a folder in it.")
    refuse_existing(output)
    if format not in FORMATS:
        raise ValueError(f"prepare: format is {format!r}; choose one of {', '.join(FORMATS)}.")
    if engine not in ENGINES:
        raise ValueError(f"prepare: engine is {engine!r}; choose one of {', '.join(ENGINES)}.")
    options = RecordSource(
        path="",
        media_dir=None if image_root is None else str(image_root),
        columns=tuple((columns or {}).items()),
        datasets=tuple(datasets),
        kind=FORMATS[format],
    )
    parts = _plan(source, options, splits, seed)
    with atomic_directory(output) as aside:
        total = sum(len(part.rows) for part in parts)
        jobs = _shard_jobs(parts, aside, samples_per_shard)
        if workers is None and engine == "local":
            workers = 1 if total < FEW_RECORDS else os.cpu_count() or 1
        with tqdm(total=total, unit="record", desc="prepare", disable=None if progress else True) as bar:
            results = []
            for result in ENGINES[engine](jobs, workers):
                results.append(result)
                bar.update(result.samples + len(result.skipped_lines))
        results.sort(key=lambda result: result.order)
        names = list(dict.fromkeys(name for part in parts for name in part.splits))
        notes = [note for part in parts for note in first_notes(sample_sources(part.source.open()))]
        summary = _finish(aside, output, names, results, notes)
    summary.seconds = time.monotonic() - started
    return summary


# -- splits


@dataclass
class _Part:
    """A source and, for each split that gets records of it, where these stand among `rows`."""

    source: RecordSource
    rows: np.ndarray  # of the source's table, in stored order; for a meta file, those of its first epoch
    splits: dict[str, np.ndarray]


def _plan(source, options: RecordSource, splits: Mapping[str, float] | None, seed: int) -> list[_Part]:
    if isinstance(source, Mapping):
        if splits is not None:
            raise ValueError("prepare: `splits` divides one source; with a source per split leave it out.")
        sources = {}
        for name, path in source.items():
            of_path = _sources(path, options)
            if len(of_path) > 1:
                raise ValueError(
                    f"prepare: source of split {name!r} has splits {sorted(of_path)} of its own; give the "
                    "folder or file of one."
                )
            [sources[name]] = of_path.values()
    else:
        sources = _sources(source, options)
        if splits is not None and len(sources) > 1:
            raise ValueError(
                f"prepare: {source} has splits {sorted(sources)} of its own, so it cannot be divided by "
                f"{dict(splits)}; leave `splits` out to keep them, or give the folder of one."
            )
        if len(sources) == 1:  # no splits of its own, or a single one: its records are divided
            [only] = sources.values()
            rows = _rows(only, seed)
            return [_Part(only, rows, _draw_splits(len(rows), splits or DEFAULT_SPLITS, seed))]
    parts = []
    for name, split_source in sources.items():
        _check_split_name(name)
        rows = _rows(split_source, seed)
        parts.append(_Part(split_source, rows, {name: np.arange(len(rows))}))
    return parts


def _rows(source: RecordSource, seed: int) -> np.ndarray:
    return np.sort(source.open().rows_of(0, seed))


def _sources(path: str | Path, options: RecordSource) -> dict[str, RecordSource]:
    """The source; or, for a Hugging Face source with splits, one source per split."""
    if not (stores.is_store(path) or Path(path).exists() or options.kind == "hf"):
        raise FileNotFoundError(f"prepare: source {path} does not exist; a hub name needs format hf.")
    source = replace(options, path=str(path), kind=options.kind or kind_of(path))
    names = (source_splits(path) if source.kind == "hf" else []) or [None]
    renamed = {} if "val" in names else {"validation": "val"}
    return {renamed.get(name, str(name)): replace(source, split=name) for name in names}


def _check_split_name(name: str) -> None:
    if not SPLIT_NAME.fullmatch(name):
        raise ValueError(f"prepare: split name {name!r}; use letters, digits, '-' and '_'.")


def _draw_splits(total: int, ratios: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """The places of each split's records, drawn from `total`."""
    for name, ratio in ratios.items():
        _check_split_name(name)
        if not 0 < ratio < math.inf:
            raise ValueError(f"prepare: split {name!r} has size {ratio}; it must be a positive number.")
    sizes = _split_sizes(total, list(ratios.values()))
    assignment = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
    np.random.default_rng(seed).shuffle(assignment)
    return {name: np.flatnonzero(assignment == number) for number, name in enumerate(ratios)}


def _split_sizes(total: int, ratios: list[float]) -> list[int]:
    """Whole numbers in proportion that add up to `total`; none is 0 if there are enough records."""
    exact = [total * ratio / sum(ratios) for ratio in ratios]
    sizes = [math.floor(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    if total >= len(sizes):
        while 0 in sizes:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[sizes.index(0)] += 1
    return sizes


def _shard_jobs(parts: list[_Part], folder: Path, samples_per_shard: int) -> Iterator[ShardJob]:
    """One job for each shard; the items of a shard are made when it is asked for."""
    order = itertools.count()
    for part in parts:
        table = part.source.open()
        for split, places in part.splits.items():
            for shard, start in enumerate(range(0, len(places), samples_per_shard)):
                chosen = places[start : start + samples_per_shard].tolist()
                rows = part.rows[chosen].tolist()
                # a meta file's rows are numbered by their place, others by their number in the file
                numbers = chosen if part.source.kind == "meta" else [table.origin(row)[1] for row in rows]
                path = folder / f"{split}-{shard:05d}.tar"
                items = list(zip(numbers, rows, strict=True))
                yield ShardJob(next(order), split, path, part.source, items)


# -- index and summary


def _finish(
    folder: Path, output: Path, splits: list[str], results: list[ShardResult], notes: list[str]
) -> PrepareSummary:
    """Write the index and `skipped.jsonl`. Raises ValueError when no sample was written."""
    skipped: Counter = sum((result.skipped for result in results), Counter())
    skipped_lines = [line for result in results for line in result.skipped_lines]
    if skipped_lines:
        atomic_write(folder / "skipped.jsonl", skipped_lines)
    results_with_samples = [result for result in results if result.samples]
    if not results_with_samples:
        examples = [line.decode().rstrip() for line in skipped_lines[:3]]
        outcome = (
            f"skipped {dict(skipped)} of the source's records, such as" if skipped else "it has no records."
        )
        remedies = [f"{reason}: {REASONS[reason]}" for reason in skipped]
        raise ValueError(join_lines([f"prepare: nothing to write; {outcome}", *examples, *remedies, *notes]))
    for result in results:  # Energon would count a shard without samples
        if not result.samples:
            result.path.unlink()
    shards = {split: [r.path.name for r in results_with_samples if r.split == split] for split in splits}
    _write_index(folder, folder / META, shards)
    return PrepareSummary(
        output=output,
        samples={split: sum(r.samples for r in results_with_samples if r.split == split) for split in splits},
        shards={split: len(names) for split, names in shards.items()},
        images=sum(result.images for result in results_with_samples),
        total_bytes=sum(result.path.stat().st_size for result in results_with_samples),
        skipped=dict(skipped),
        seconds=0.0,
        notes=notes,
    )


def _write_index(
    folder: Path, meta: Path, splits: Mapping[str, Sequence[str]], workers: int = 1, progress: bool = False
) -> dict[str, int]:
    """Write Energon's own index of the shards in a folder, and return the samples of each shard.

    The split file names each shard, so no pattern or ratio decides later. Raises ValueError that names all
    shards that cannot be read.
    """
    names = [name for of_split in splits.values() for name in of_split]
    # all shards are read before an error is raised, so that it names each that is damaged
    jobs = ((folder, name, number) for number, name in enumerate(names))
    counts, errors = {}, []
    meta.mkdir(exist_ok=True)
    index = SqliteIndexWriterAggregator(EPath(meta / "index.sqlite"), total_tasks=len(names))
    index.on_start(None)
    with tqdm(total=len(names), unit="shard", desc="index", disable=None if progress else True) as bar:
        for name, rows, error in run_here(jobs, workers, index_shard):
            try:
                index.on_item(rows, None)
                counts[name] = rows[-1].shard_info.count if rows else 0
            except DuplicateSampleKeyError as duplicate:
                error = (
                    f"the key {duplicate.sample_key} comes twice, here or in another shard, or its parts are "
                    "apart; in a copy, `energon prepare --fix-duplicates` renames keys"
                )
            errors += [f"{name}: {error}"] if error else []
            bar.update()
    index.on_finish(None)
    if errors:
        fact = f"prepare: {len(errors)} of {len(names)} shards of {folder} cannot be read"
        remedy = "restore them, or give the names of the others"
        raise ValueError(join_lines([f"{fact}; {remedy}.", *errors[:MOST_NAMED]]))
    info = {"energon_version": __version__, "shard_counts": {name: counts[name] for name in names}}
    atomic_write(meta / ".info.json", json.dumps(info, indent=2))
    atomic_write(meta / "index.uuid", str(uuid.uuid4()))
    parts = {split: names for split, names in splits.items() if names}
    atomic_write(meta / "split.yaml", yaml.safe_dump({"exclude": [], "split_parts": parts}, sort_keys=False))
    atomic_write(meta / "dataset.yaml", DATASET_YAML)
    return counts


def index_shard(job: tuple[Path, str, int]) -> tuple[str, list, str]:
    """Write the `.idx` of a shard; return its name, rows of Energon's index, and why it cannot be read."""
    folder, name, number = job
    log = logging.getLogger(SqliteIndexWriterAggregator.__module__)
    log.addFilter(_raise_logged_error)
    rows = []
    try:
        with open_file(folder / name) as file:
            tarfile.open(fileobj=file, mode="r:").close()  # a compressed one cannot be trained from
            for row in BaseWebdatasetFactory._preprocess_tar(name, {name: number}, EPath(folder), 1):
                _end_if_stopped()
                rows.append(row)
            if not rows[-1].shard_info.count:
                raise ValueError("it holds no file whose name is KEY.PART")
            last = [row for row in rows if isinstance(row, IndexSample)][-1]
            file.seek(last.byte_offset + last.byte_size)
            if any(file.read(tarfile.BLOCKSIZE)):  # tarfile stops there without an error
                raise ValueError(f"it is damaged or cut short after the sample {last.sample_key}")
    except InterruptedError:
        raise
    except (tarfile.TarError, OSError, ValueError) as error:
        if not isinstance(error, tarfile.TarError):
            return name, [], str(error)
        kind = explain_file(folder / name)
        return name, [], f"is {kind}" if kind else f"is cut short, damaged or compressed ({error})"
    finally:
        log.removeFilter(_raise_logged_error)
    return name, rows, ""


def _raise_logged_error(record: logging.LogRecord) -> bool:
    """Raise what Energon logs of a shard before it goes on with the next one; a filter of its log."""
    if record.exc_info:
        raise record.exc_info[1]
    return True


@attribute_errors_to("sources")
def index_shards(
    sources: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    splits: Mapping[str, float] | None = None,
    workers: int | None = None,
    seed: int = 1234,
    progress: bool = True,
) -> PrepareSummary:
    """Make an Energon dataset of plain WebDataset shards, without copying or changing them.

    `sources` are folders of .tar shards, shards, or patterns of their names. Their index is written beside
    them if `output` is None, and else to that folder, with links to them. `splits` are relative sizes, in
    whole shards; by default all are for training. At least two processes read them. `energon prepare`
    writes the same files.

    Raises FileExistsError if `output` holds anything or the shards have an index, ValueError for shards that
    cannot be read and keys that are not unique. Then there is no `.nv-meta`; `.idx` files may be there.
    """
    started = time.monotonic()
    folders, files = zip(*map(tar_shards, sources), strict=True)
    folder = Path(os.path.commonpath(folders))
    names = sorted({str(file.relative_to(folder)) for of_source in files for file in of_source})
    if patterns := [name for name in names if re.search(r"[{}\\]", name)]:
        raise ValueError(f"prepare: {folder / patterns[0]}: to Energon this is a pattern; rename it.")
    # whole shards are drawn for each split
    drawn = _draw_splits(len(names), splits or {"train": 1.0}, seed)
    shards = {split: [names[number] for number in numbers] for split, numbers in drawn.items()}
    # shards are read in other processes: Energon's reading catches every exception, an interrupt, too
    workers = max(2, workers or (1 if len(names) < FEW_SHARDS else os.cpu_count() or 1))
    output = folder if output is None else Path(output).resolve()
    is_in_place = output.resolve() == folder.resolve()
    with atomic_directory(output / META if is_in_place else output, "give a folder as OUTPUT") as aside:
        for name in names if not is_in_place else ():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).symlink_to(folder / name)
        place, meta = (folder, aside) if is_in_place else (aside, aside / META)
        counts = _write_index(place, meta, shards, workers, progress)
    return PrepareSummary(
        output=output,
        samples={split: sum(map(counts.get, names)) for split, names in shards.items()},
        shards={split: len(names) for split, names in shards.items()},
        images=None,
        total_bytes=sum((folder / name).stat().st_size for name in names),
        skipped={},
        seconds=time.monotonic() - started,
        notes=[note for split in shards if shards[split] for note in _unreadable_samples(output, split)],
    )


def _unreadable_samples(folder: Path, split: str) -> Iterator[str]:
    """Yield a line for each reason to drop samples, of samples from a split's first to its last."""
    raw = SimpleNamespace(decoder=None)
    samples = EnergonSamples(DataConfig(train_data_path=str(folder)), sources_of(str(folder)), raw, split)
    numbers = np.linspace(0, len(samples) - 1, min(LOOKED_AT, len(samples)), dtype=int).tolist()
    problems: Counter = Counter()
    for number in numbers:
        try:
            parse_record(samples.record(number)[0])
        except BadSample as bad:
            problems[bad.detail] += 1
    remedy = "say what its parts are as data.columns.NAME=PART, or give data.cooker=FILE.py:NAME"
    for detail, count in problems.most_common(MOST_NAMED):
        yield f"{split}: {count} of {len(numbers)} samples looked at cannot be read: {detail}; {remedy}"


# -- shards, in any process

_stop: Any = None  # in a worker: set in the main process to end it


def _init_worker(stop: Any) -> None:
    """Ctrl-C reaches the whole process group; the main process alone decides, through `stop`."""
    global _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop = stop


def _end_if_stopped() -> None:
    if _stop is not None and _stop.is_set():
        raise InterruptedError("prepare was interrupted")


def run_here(jobs: Iterator[Any], workers: int, work: Callable | None = None) -> Iterator[Any]:
    """Results of jobs on this machine, in order of completion; the work is `write_shard` or another."""
    work = work or write_shard
    if workers <= 1:
        yield from map(work, jobs)
        return
    context = multiprocessing.get_context("forkserver")  # the main process may hold Arrow's threads
    context.set_forkserver_preload(["megatron_vlm.data.chatml.sample"])
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _init_worker, (stop,))
    try:
        wait_for_one = partial(wait, return_when=FIRST_COMPLETED)
        submit = partial(pool.submit, work)
        for future in _completed(jobs, submit, wait_for_one, workers):
            yield future.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _completed(jobs: Iterator[Any], submit: Callable, wait_for_one: Callable, workers: int) -> Iterator:
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
    table = job.source.open()
    result = ShardResult(job.order, job.split, job.path)
    with open_to_write(job.path, "xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for number, index in job.items:
            _end_if_stopped()
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
