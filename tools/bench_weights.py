"""Measure import and export of a generated checkpoint of real shape against plain reading and writing.

python tools/bench_weights.py     write reports/bench_weights.json, which reports/weights.md shows
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "reports" / "bench_weights.json"
CONFIG = ROOT / "src" / "megatron_vlm" / "recipes" / "configs" / "qwen3_vl_30b_a3b.json"
BLOCK = 2**24
LAYOUTS = {"1 process": 1, "a rank of TP2·EP2": 2}  # the size of TP and of EP


# --- what is measured ------------------------------------------------------------------------------------


class Memory:
    """Peaks of this process's anonymous and file-backed resident memory above its start, by sampling."""

    def __enter__(self) -> Memory:
        self._start, self.anonymous, self.mapped = resident(), 0, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            anonymous, mapped = (now - start for now, start in zip(resident(), self._start, strict=True))
            self.anonymous, self.mapped = max(self.anonymous, anonymous), max(self.mapped, mapped)


def resident() -> tuple[int, int]:
    """Bytes of anonymous and of file-backed memory."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def plain_read(folder: Path) -> None:
    """Read every byte of the files through one buffer."""
    buffer = bytearray(BLOCK)
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def plain_load(folder: Path) -> None:
    """Read every byte of the files into fresh memory, which weights need in any case."""
    held = []
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file:
            held.append(mmap.mmap(-1, path.stat().st_size))
            view = memoryview(held[-1])
            while read := file.readinto(view[:BLOCK]):
                view = view[read:]


def plain_write(source: Path, target: Path) -> None:
    """Write as many bytes as the weights of `source`, in as many files, from one buffer to the disk."""
    buffer = memoryview(os.urandom(BLOCK))
    target.mkdir()
    for path in weight_files(source):
        with (target / path.name).open("wb", buffering=0) as file:
            left = path.stat().st_size
            while left:
                left -= file.write(buffer[:left])
    flush(target)


def flush(folder: Path) -> None:
    for path in weight_files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def forget(folder: Path) -> None:
    """Drop the files from the page cache, as far as the kernel follows POSIX_FADV_DONTNEED."""
    flush(folder)
    for path in weight_files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- the checkpoint --------------------------------------------------------------------------------------


def generate(folder: Path, layers: int) -> None:
    """Write Qwen3-VL-30B-A3B with fewer layers and random bits, experts transposed as in published files."""
    import torch
    from transformers import AutoModelForImageTextToText

    from megatron_vlm.models.hf import load_config
    from megatron_vlm.models.weights.files import SafetensorsFile, Stored, split

    stored = json.loads(CONFIG.read_text())
    stored["text_config"]["num_hidden_layers"] = layers
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(stored))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(load_config(folder), trust_remote_code=False)
    shapes = {name: (t.mT if ".experts." in name else t).shape for name, t in model.state_dict().items()}
    tensors = [Stored(name, torch.bfloat16, tuple(shape)) for name, shape in shapes.items()]
    weight_map = {}
    for number, held in enumerate(split(tensors, 2**32), start=1):
        file = SafetensorsFile(folder / f"model-{number:05d}.safetensors", held)
        for tensor in held:
            fill(file, tensor)
            weight_map[tensor.name] = file.path.name
        file.close()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def fill(file, tensor) -> None:
    """Write random numbers below 2; a tensor of many experts one row of the first axis at a time."""
    import torch

    rows = range(tensor.shape[0]) if len(tensor.shape) == 3 else [None]
    for row in rows:
        bits = torch.empty(tensor.shape if row is None else tensor.shape[1:], dtype=torch.int16)
        file.write(
            tensor.name, bits.random_(-(2**15), 2**15 - 1).bitwise_and_(~0x4000).view(torch.bfloat16), row
        )


# --- the model -------------------------------------------------------------------------------------------


@contextmanager
def processes(size: int) -> Iterator:
    """Lays this process out as the only one, or the first of several that do not exist: enough to import."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_vlm.config import ParallelConfig, RunConfig
    from megatron_vlm.parallel import setup

    run = RunConfig(parallel=ParallelConfig(tp=size, ep=size))
    run.model.dtype = "bf16"
    if size == 1:
        setup.init_distributed(run.parallel, seed=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        setup._make_groups(run.parallel)
    try:
        yield run
    finally:
        setup.shutdown()


def empty_model(run, folder: Path):
    """(chunks, where their weights come from). The weights are allocated but no memory is touched yet."""
    import torch

    from megatron_vlm.models.families import describe
    from megatron_vlm.models.hf import load_config
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.parallel import setup

    hf_config = load_config(folder)
    description = describe(hf_config)
    with torch.device("meta"):
        chunks = build_model(run, description, torch.device("meta"))
    return [chunk.to_empty(device=setup.device()) for chunk in chunks], description.weight_map


# --- the table -------------------------------------------------------------------------------------------


def measure(folder: Path, repeats: int) -> Iterator[dict]:
    """The rows of the report: medians of the times, peaks of the memory."""
    for cache in ("cold", "warm"):
        for name, size in LAYOUTS.items():
            with processes(size) as run:
                yield row(
                    f"import, {name}, {cache} cache", [read_once(run, folder, cache) for _ in range(repeats)]
                )
    with processes(1) as run:
        yield row("export, 1 process, to disk", [write_once(run, folder) for _ in range(repeats)])


def read_once(run, folder: Path, cache: str) -> dict:
    from megatron_vlm.models.weights.importing import import_hf

    prepare, plain_way = (forget, plain_read) if cache == "cold" else (plain_read, plain_load)
    release_freed()
    chunks, weight_map = empty_model(run, folder)
    prepare(folder)
    plain = seconds(lambda: plain_way(folder))
    prepare(folder)
    with Memory() as memory:
        ours = seconds(lambda: import_hf(chunks, folder, weight_map))
    return once(chunks, ours, held(chunks), plain, size_of(folder), memory)


def write_once(run, folder: Path) -> dict:
    from megatron_vlm.models.weights.exporting import export_hf
    from megatron_vlm.models.weights.importing import import_hf

    release_freed()
    chunks, weight_map = empty_model(run, folder)
    import_hf(chunks, folder, weight_map)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        plain = seconds(lambda: plain_write(folder, Path(name) / "plain"))
        shutil.rmtree(Path(name) / "plain")

        def export() -> None:
            export_hf(chunks, Path(name) / "export", folder, weight_map)
            flush(Path(name) / "export")

        with Memory() as memory:
            ours = seconds(export)
        check_equal(folder, Path(name) / "export")
    return once(chunks, ours, size_of(folder), plain, size_of(folder), memory)


def release_freed() -> None:
    """Give back the memory of the previous run, so that it neither counts for the next one nor helps it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def once(chunks, ours: float, nbytes: int, plain: float, plain_bytes: int, memory: Memory) -> dict:
    return {
        "held": held(chunks),
        "nbytes": nbytes,
        "rate": nbytes / ours,
        "plain_rate": plain_bytes / plain,
        "anonymous": memory.anonymous,
        "mapped": memory.mapped,
    }


def row(what: str, runs: list[dict]) -> dict:
    fractions = [run["rate"] / run["plain_rate"] for run in runs]
    found = {
        "what": what,
        **{name: runs[0][name] for name in ("held", "nbytes")},
        **{name: statistics.median(run[name] for run in runs) for name in ("rate", "plain_rate")},
        "fraction": statistics.median(fractions),
        "fractions": fractions,
        **{name: max(run[name] for run in runs) for name in ("anonymous", "mapped")},
    }
    print(f"{what}: {found['rate'] / 1e9:.2f} GB/s, {found['fraction']:.0%} of plain", flush=True)
    return found


def held(chunks) -> int:
    """Bytes of this rank's weights."""
    import torch

    return sum(t.nbytes for chunk in chunks for t in chunk.state_dict().values() if torch.is_tensor(t))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def check_equal(source: Path, exported: Path) -> None:
    """Raises AssertionError unless the tensors are the same, bit by bit."""
    import torch

    from megatron_vlm.models.weights.files import HFCheckpoint

    mine, theirs = HFCheckpoint(exported), HFCheckpoint(source)
    assert mine.files.keys() == theirs.files.keys()
    for key in theirs.files:
        values = [checkpoint.slices(key)[...].view(torch.int16) for checkpoint in (mine, theirs)]
        assert torch.equal(*values), key


def largest(folder: Path) -> int:
    from megatron_vlm.models.weights.files import HFCheckpoint

    checkpoint = HFCheckpoint(folder)
    return max(checkpoint.stored(key).nbytes for key in checkpoint.files)


def take(arguments: argparse.Namespace) -> None:
    """Generate, measure and write the report; what was generated is removed."""
    with tempfile.TemporaryDirectory(prefix="bench_weights_", dir=arguments.folder) as name:
        folder = Path(name) / "checkpoint"
        generate(folder, arguments.layers)
        report = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {name: version(name) for name in ("torch", "megatron-core", "safetensors")},
            "checkpoint": {
                "bytes": size_of(folder),
                "largest_tensor": largest(folder),
                "layers": arguments.layers,
            },
            "rows": list(measure(folder, arguments.repeats)),
        }
    REPORT.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2, help="of the language model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where there is room for three times the checkpoint")
    take(parser.parse_args())


if __name__ == "__main__":
    main()
