"""ShareGPT/LLaVA JSON(L) or a Hugging Face `datasets` folder → a sharded Energon dataset.

What is written, ready for stock `energon` and for this package:

    OUTPUT/train-00000.tar      per sample `<key>.json` (the conversation and its `images` in order) and
                                `<key>.img000.jpg`, ... (the source's own encoded files, each decoded once)
    OUTPUT/.nv-meta/            Energon's index, `split.yaml` with explicit shard names, `dataset.yaml`
    OUTPUT/skipped.jsonl        every record left out: source, record number, split, reason, detail

A key is the split and the record's number in its source (a JSONL line counts from 0, blank ones included).
Every record belongs to exactly one split. OUTPUT appears by one rename when everything is written.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

DEFAULT_SPLITS = {"train": 0.9, "val": 0.1}
FEW_RECORDS = 3000  # below this, starting worker processes costs more than they save
FORMATS = ("auto", "json", "jsonl", "hf")
SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
DATASET_YAML = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


@dataclass
class PrepareSummary:
    """What was written; `str()` gives the table that the command prints."""

    output: Path
    samples: dict[str, int]  # per split
    shards: dict[str, int]  # per split
    images: int
    total_bytes: int  # of the shards
    skipped: dict[str, int]  # per reason
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.output}: {self.total_bytes / 1e6:.1f} MB in {self.seconds:.1f} s"]
        lines += [
            f"  {split}: {count} samples in {self.shards[split]} shards"
            for split, count in self.samples.items()
        ]
        lines += [f"  {self.images} images", f"  {sum(self.skipped.values())} records skipped"]
        lines += [f"    {reason}: {count}" for reason, count in sorted(self.skipped.items())]
        return "\n".join(lines)


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
    progress: bool = True,
) -> PrepareSummary:
    """Write `source` as an Energon dataset to `output`, all of it or nothing.

    `source` is a file or folder, divided over `splits` (relative sizes; exact counts, the same for the same
    `seed`), or a mapping from split name to file or folder. With `splits` None, a Hugging Face source with
    several splits of its own keeps them ("validation" becomes "val"), any other gets DEFAULT_SPLITS.
    Image paths are relative to `image_root`, by default the source's folder, and may not leave it.
    JSONL and Hugging Face sources are streamed; a JSON array is loaded whole. `workers` None means one
    process for few records and one per core for more; a script that asks for several needs the usual
    `if __name__ == "__main__"`.

    Raises FileExistsError when `output` holds anything, ValueError for bad arguments and when every record
    was skipped. On any error or interrupt nothing is left behind.
    """
    started = time.monotonic()
    output = Path(output).absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"prepare: {output} is not empty; choose another output or remove it first.")
    if samples_per_shard < 1:
        raise ValueError(f"prepare: samples_per_shard is {samples_per_shard}; it must be at least 1.")
    parts = _plan(source, image_root, format, splits, seed)
    partial = output.parent / f".{output.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        total = sum(part.count for part in parts)
        jobs = _shard_jobs(parts, partial, samples_per_shard)
        if workers is None:
            workers = 1 if total < FEW_RECORDS else os.cpu_count() or 1
        with tqdm(total=total, unit="record", desc="prepare", disable=None if progress else True) as bar:
            results = sorted(_run(jobs, workers, bar), key=lambda result: result.order)
        names = list(dict.fromkeys(name for part in parts for name in part.split_names))
        summary = _finish(partial, output, names, results)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    summary.seconds = time.monotonic() - started
    return summary


# -- sources: picklable, small; `items` runs in the main process, `read` in the workers


@dataclass(frozen=True)
class JsonSource:
    path: Path
    image_root: Path
    lines: bool  # JSON Lines, else one JSON array

    def items(self) -> Iterator[tuple[int, Any]]:
        """(record number, the undecoded line or the record)."""
        if not self.lines:
            yield from enumerate(_load_array(self.path))
            return
        with self.path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file) if line.strip())

    def count(self) -> int:
        return sum(1 for _ in self.items()) if self.lines else len(_load_array(self.path))

    def read(self, item: Any) -> Any:
        from megatron_vlm.data.chatml import BadSample

        try:
            return json.loads(item) if self.lines else item
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, nested beyond reason
            raise BadSample("bad_json", str(error)) from error


@dataclass(frozen=True)
class HFSource:
    path: Path
    image_root: Path
    split: str | None

    def items(self) -> Iterator[tuple[int, int]]:
        yield from ((index, index) for index in range(self.count()))

    def count(self) -> int:
        return len(_open_rows(self.path, self.split))

    def read(self, item: int) -> Any:
        from megatron_vlm.data.records import without_nulls

        return without_nulls(_open_rows(self.path, self.split)[item])


@functools.lru_cache(maxsize=1)
def _load_array(path: Path) -> list:
    try:
        records = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"prepare: {path} is not valid JSON ({error}); repair it or convert to JSONL."
        ) from error
    if not isinstance(records, list):
        raise ValueError(
            f"prepare: {path} holds a JSON {type(records).__name__}; expected an array of records."
        )
    return records


@functools.lru_cache(maxsize=8)
def _open_rows(path: Path, split: str | None) -> Any:
    from megatron_vlm.data.hf_rows import open_rows

    return open_rows(path, split)


# -- splits


@dataclass
class _Part:
    """A source and the split of each of its records: one name for all, or an array of indices into names."""

    source: JsonSource | HFSource
    split_names: list[str]
    count: int
    assignment: Any = None

    def records(self) -> Iterator[tuple[str, int, Any]]:
        for position, (number, item) in enumerate(self.source.items()):
            index = 0 if self.assignment is None else self.assignment[position]
            yield self.split_names[index], number, item


def _plan(source, image_root, format: str, splits, seed: int) -> list[_Part]:
    if format not in FORMATS:
        raise ValueError(f"prepare: format is {format!r}; choose one of {', '.join(FORMATS)}.")
    if isinstance(source, Mapping):
        if splits is not None:
            raise ValueError("prepare: `splits` divides one source; with a source per split leave it out.")
        named = {name: _sources(Path(path), image_root, format) for name, path in source.items()}
        for name, found in named.items():
            if len(found) > 1:
                raise ValueError(
                    f"prepare: source of split {name!r} has splits {sorted(found)} of its own; give the "
                    "folder or file of one."
                )
        sources = {name: next(iter(found.values())) for name, found in named.items()}
    else:
        sources = _sources(Path(source), image_root, format)
        if splits is not None and len(sources) > 1:
            raise ValueError(
                f"prepare: {source} has splits {sorted(sources)} of its own, so it cannot be divided by "
                f"{dict(splits)}; leave `splits` out to keep them, or give the folder of one."
            )
        if len(sources) == 1:
            return [_divide(next(iter(sources.values())), splits or DEFAULT_SPLITS, seed)]
    for name in sources:
        _check_split_name(name)
    return [_Part(source, [name], source.count()) for name, source in sources.items()]


def _sources(path: Path, image_root, format: str) -> dict[str, JsonSource | HFSource]:
    """The source or, for a Hugging Face source, one per split of its own."""
    if not path.exists():
        raise FileNotFoundError(f"prepare: source {path} does not exist.")
    folder = path if path.is_dir() else path.parent
    root = Path(image_root) if image_root is not None else folder
    if not root.is_dir():
        raise FileNotFoundError(f"prepare: image root {root} is not a folder.")
    format = _detect_format(path) if format == "auto" else format
    if format != "hf":
        return {"all": JsonSource(path, root, lines=format == "jsonl")}
    from megatron_vlm.data.hf_rows import split_names

    names = split_names(path) or [None]
    return {"val" if name == "validation" else str(name): HFSource(path, root, name) for name in names}


def _detect_format(path: Path) -> str:
    if path.is_dir() or path.suffix in (".parquet", ".arrow"):
        return "hf"
    if path.suffix == ".json":
        with path.open("rb") as file:
            return "json" if file.read(4096).lstrip()[:1] == b"[" else "jsonl"
    return "jsonl"


def _check_split_name(name: str) -> None:
    if not SPLIT_NAME.fullmatch(name):
        raise ValueError(f"prepare: split name {name!r}; use letters, digits, '-' and '_'.")


def _divide(source: JsonSource | HFSource, ratios: Mapping[str, float], seed: int) -> _Part:
    import numpy as np

    for name, ratio in ratios.items():
        _check_split_name(name)
        if not (math.isfinite(ratio) and ratio > 0):
            raise ValueError(f"prepare: split {name!r} has size {ratio}; it must be a positive number.")
    total = source.count()
    sizes = _split_sizes(total, list(ratios.values()))
    assignment = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
    np.random.default_rng(seed).shuffle(assignment)
    return _Part(source, list(ratios), total, assignment)


def _split_sizes(total: int, ratios: list[float]) -> list[int]:
    """Whole numbers in proportion that add up to `total`; none is 0 while there are records enough."""
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


# -- shards


@dataclass(frozen=True)
class _ShardJob:
    order: int
    split: str
    path: Path
    source: JsonSource | HFSource
    items: list[tuple[int, Any]]


@dataclass
class _ShardResult:
    order: int
    split: str
    path: Path
    samples: int = 0
    images: int = 0
    skipped: Counter = field(default_factory=Counter)


def _shard_jobs(parts: list[_Part], folder: Path, samples_per_shard: int) -> Iterator[_ShardJob]:
    """Jobs in source order; at most one shard per split is held here."""
    numbers: Counter = Counter()

    def job(part: _Part, split: str, items: list) -> _ShardJob:
        numbers[split] += 1
        path = folder / f"{split}-{numbers[split] - 1:05d}.tar"
        return _ShardJob(sum(numbers.values()), split, path, part.source, items)

    for part in parts:
        pending: dict[str, list] = {name: [] for name in part.split_names}
        for split, number, item in part.records():
            pending[split].append((number, item))
            if len(pending[split]) == samples_per_shard:
                yield job(part, split, pending[split])
                pending[split] = []
        for split, items in pending.items():
            if items:
                yield job(part, split, items)


_stop: Any = None  # set in the main process to end the workers
_done: Any = None  # records dealt with, for the progress bar


def _init_worker(stop: Any, done: Any) -> None:
    """Ctrl-C reaches the whole process group; the main process alone decides, through `stop`."""
    global _stop, _done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop, _done = stop, done


def _run_in_worker(job: _ShardJob) -> _ShardResult:
    def tick() -> None:
        with _done.get_lock():
            _done.value += 1
        if _stop.is_set():
            raise InterruptedError("prepare was interrupted")

    return _write_shard(job, tick)


def _run(jobs: Iterator[_ShardJob], workers: int, bar: tqdm) -> Iterator[_ShardResult]:
    """Results in order of completion, with at most two jobs per worker in flight."""
    if workers <= 1:
        yield from (_write_shard(job, bar.update) for job in jobs)
        return
    context = multiprocessing.get_context("forkserver")  # the main process may hold Arrow's threads
    context.set_forkserver_preload(["megatron_vlm.data.records"])
    stop, done = context.Event(), context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, context, _init_worker, (stop, done))
    try:
        pending: set[Future] = set()
        for job in jobs:
            pending.add(pool.submit(_run_in_worker, job))
            while len(pending) >= 2 * workers:
                pending = yield from _collect(pending, done, bar)
        while pending:
            pending = yield from _collect(pending, done, bar)
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(pending: set[Future], done: Any, bar: tqdm):
    finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
    if done.value > bar.n:
        bar.update(done.value - bar.n)
    for future in finished:
        yield future.result()
    return pending


def _write_shard(job: _ShardJob, tick) -> _ShardResult:
    """One tar and, when records were left out, `<shard>.skipped` beside it."""
    from megatron_vlm.data.chatml import BadSample

    result = _ShardResult(job.order, job.split, job.path)
    with tarfile.open(job.path, "w") as tar, job.path.with_suffix(".skipped").open("w") as skipped:
        for number, item in job.items:
            try:
                parts = _sample_parts(job.source, item)
            except BadSample as bad:
                result.skipped[bad.reason] += 1
                entry = {"source": str(job.source.path), "record": number, "split": job.split}
                skipped.write(json.dumps(entry | {"reason": bad.reason, "detail": bad.detail}) + "\n")
            else:
                for name, content in parts.items():
                    _add(tar, f"{job.split}-{number:09d}.{name}", content)
                result.samples += 1
                result.images += len(parts) - 1
            tick()
    return result


def _sample_parts(source: JsonSource | HFSource, item: Any) -> dict[str, bytes]:
    """The files of one sample by name, checked as the encoder will check them. Raises BadSample."""
    from megatron_vlm.data.records import check_sample, conversation_json, conversation_of, images_of

    record = source.read(item)
    conversation, images = conversation_of(record), images_of(record, source.image_root)
    extensions = check_sample(conversation, images)
    names = [f"img{index:03d}.{extension}" for index, extension in enumerate(extensions)]
    described = conversation | {"images": names} if names else conversation
    return {"json": conversation_json(described), **dict(zip(names, images, strict=True))}


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


# -- index and summary


def _finish(folder: Path, output: Path, splits: list[str], results: list[_ShardResult]) -> PrepareSummary:
    """Write the index and `skipped.jsonl`. Raises ValueError when no sample was written."""
    skipped: Counter = sum((result.skipped for result in results), Counter())
    _merge_skipped(folder / "skipped.jsonl", results)
    kept = [result for result in results if result.samples]
    if not kept:
        examples = (folder / "skipped.jsonl").read_text().splitlines()[:3] if skipped else []
        raise ValueError(
            "\n".join(
                [f"prepare: nothing to write; skipped {dict(skipped)} of the source's records.", *examples]
            )
        )
    for result in results:
        if not result.samples:
            result.path.unlink()
    shards = {split: [r.path.name for r in kept if r.split == split] for split in splits}
    _write_index(folder, shards)
    return PrepareSummary(
        output=output,
        samples={split: sum(r.samples for r in kept if r.split == split) for split in splits},
        shards={split: len(names) for split, names in shards.items()},
        images=sum(result.images for result in kept),
        total_bytes=sum(result.path.stat().st_size for result in kept),
        skipped=dict(skipped),
        seconds=0.0,
    )


def _merge_skipped(path: Path, results: list[_ShardResult]) -> None:
    files = [result.path.with_suffix(".skipped") for result in results]
    if any(result.skipped for result in results):
        with path.open("w") as merged:
            for file in files:
                merged.write(file.read_text())
    for file in files:
        file.unlink()


def _write_index(folder: Path, shards: dict[str, list[str]]) -> None:
    """Energon's own index; the split file names each shard, so nothing depends on patterns or ratios."""
    import yaml
    from megatron.energon import BaseWebdatasetFactory

    names = [name for split in shards.values() for name in split]
    with contextlib.redirect_stdout(io.StringIO()):
        BaseWebdatasetFactory.prepare_dataset(
            folder, names, split_parts_patterns=[], shuffle_seed=None, workers=min(4, len(names))
        )
    meta = folder / ".nv-meta"
    parts = {split: names for split, names in shards.items() if names}
    (meta / "split.yaml").write_text(yaml.safe_dump({"exclude": [], "split_parts": parts}, sort_keys=False))
    (meta / "dataset.yaml").write_text(DATASET_YAML)


# -- command


def prepare_command(
    sources: Annotated[
        list[str], typer.Argument(help="A JSON, JSONL or HF dataset; or one per split as SPLIT=PATH.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder to write; must be empty or absent.")],
    image_root: Annotated[
        Path | None, typer.Option(help="Folder of the images; default: the source's.")
    ] = None,
    format: Annotated[str, typer.Option(help="auto, json, jsonl or hf.")] = "auto",
    split: Annotated[
        list[str] | None, typer.Option(help="NAME=SIZE, relative; repeat. Default: train=0.9 val=0.1.")
    ] = None,
    samples_per_shard: Annotated[int, typer.Option(min=1)] = 1000,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one per core, one for few records.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which record goes to which split.")] = 1234,
) -> None:
    """Write image conversations as an Energon dataset.

    Example: prepare conversations.jsonl dataset/ --image-root images/ --split train=0.95 --split val=0.05

    Example with a held-out file: prepare train=train.jsonl val=held_out.jsonl dataset/
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that cleaning up runs
    try:
        summary = prepare_energon_dataset(
            _parse_sources(sources),
            output,
            image_root=image_root,
            format=format,
            splits=_parse_sizes(split) if split else None,
            samples_per_shard=samples_per_shard,
            workers=workers,
            seed=seed,
        )
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(str(summary))
    if summary.skipped:
        typer.echo(f"  named in {summary.output / 'skipped.jsonl'}")


def _parse_sources(sources: list[str]) -> str | dict[str, str]:
    if len(sources) == 1 and (Path(sources[0]).exists() or "=" not in sources[0]):
        return sources[0]
    pairs = [source.partition("=") for source in sources]
    named = {name: path for name, _, path in pairs if path}
    if len(named) < len(sources):
        raise ValueError(f"prepare: sources {sources}; give one, or each once as SPLIT=PATH.")
    return named


def _parse_sizes(pairs: list[str]) -> dict[str, float]:
    sizes = {}
    for pair in pairs:
        name, _, size = pair.partition("=")
        try:
            sizes[name] = float(size)
        except ValueError as error:
            raise ValueError(f"prepare: --split {pair}; write NAME=SIZE, such as train=0.9.") from error
    return sizes
