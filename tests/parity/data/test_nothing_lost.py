"""A row is trained on or counted as dropped, once, whatever happens to the processes, or the run ends.

docs/design/nothing-lost.md has the argument; here is what would fail, and data workers under stress.
"""

import contextlib
import fcntl
import functools
import json
import multiprocessing.connection
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import load_from_disk
from loaders import content, open_loader
from megatron.energon import SkipSample
from prepared_shards import prepare
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts import drops
from megatron_vlm.data.accounts.drops import LostSample, check_each_once
from megatron_vlm.data.encode.encoder import DocumentEncoder, HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load import workers as arena
from megatron_vlm.data.load.hf import EncodedEntry, RowLoader
from megatron_vlm.data.records import datasets

ROWS, TOKENS = 60, 50  # samples with two images have more tokens
TOO_LONG = {number for number in range(ROWS) if number % 3 == 0 and number % 5 != 4}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    jsonl = write_sharegpt(folder / "source", ROWS)
    prepare(jsonl, folder / "energon", splits={"train": ROWS}, samples_per_shard=10)
    rows = write_hf_folder(folder / "hf", jsonl)
    load_from_disk(rows).to_parquet(folder / "rows.parquet")
    return {"energon": folder / "energon", "hf": rows, "parquet": folder / "rows.parquet", "jsonl": jsonl}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("lengths"))


def opened(path: Path, encoder, cache: str, num_workers: int, packing: str, **options):
    settings = {"num_workers": num_workers, "packing": packing, "max_drop_share": 1.0} | options
    settings |= {"packing_buffer_size": 8}
    if path.name == "energon":
        settings |= {"shuffle_buffer_size": 8, "max_samples_per_sequence": 5}
        return open_loader("energon", path, encoder, batch=2, seed=5, **settings)
    return open_loader("hf", path, encoder, batch=2, seed=5, lengths_cache=cache, **settings)


def encoder_for(packing: str, processor, **options):
    kind = HFEncoderVLMTaskEncoder if packing == "none" else PackingVLMTaskEncoder
    return kind(processor, DataConfig(seq_length=TOKENS), **options)


# -- what comes back is what was asked for


class Row:
    def __init__(self, *keys: str) -> None:
        self.document_keys = list(keys)


ASKED = [(1, ["a", "b"]), (2, ["c"]), (3, ["d", "e"])]
FULL = [(1, Row("a", "b"), []), (2, None, [0]), (3, Row("e"), [0])]


def entries_from(given: list) -> list:
    """What a loader makes of the entries that workers gave for ASKED."""
    rows = SimpleNamespace(table=SimpleNamespace(key=str))
    rows.encoder = SimpleNamespace(documents=SimpleNamespace(per_sample=1))
    loader = RowLoader(rows, ASKED, 0)
    assert list(loader) == ASKED
    loader.workers = [EncodedEntry(*entry) for entry in given]
    return [tuple(entry) for entry in loader.entries()]


def test_rows_in_samples_or_dropped_are_delivered():
    assert entries_from(FULL) == FULL


@pytest.mark.parametrize(
    "number, instead, named",
    [
        (0, [(1, Row("a"), [])], "b"),  # left out of its sample
        (0, [(1, Row("a", "b", "b"), [])], "a, b"),  # doubled
        (0, [(1, Row("b", "a"), [])], "a, b"),
        (1, [(2, None, [])], "c"),  # neither
        (1, [(2, Row("c"), [0])], "c"),  # both
        (1, [(2, Row("d"), [])], "c, d"),  # another's
        (1, [], "c"),  # an entry left out
        (2, [], "d, e"),
        (2, [FULL[2], FULL[2]], "e"),  # more than was asked for
        (2, [(2, Row("e"), [0])], "d, e"),
    ],
)
def test_what_is_not_delivered_is_named(number, instead, named):
    with pytest.raises(LostSample, match=f"^data: {named}: .*start again from the last checkpoint.$"):
        entries_from([*FULL[:number], *instead, *FULL[number + 1 :]])


@pytest.mark.parametrize("documents", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2]])
def test_packing_that_is_no_partition_is_an_error(documents):
    check_each_once([2, 0, 1], 3, "documents")
    with pytest.raises(LostSample, match="not taken exactly once"):
        check_each_once(documents, 3, "documents")


def in_silence(work):
    """Loses sample 7: raises as for a dropped one, without counting it."""

    def working(sample, *measured):
        if sample.__key__ == "000000007":
            raise SkipSample
        return work(sample, *measured)

    return working


@pytest.mark.parametrize(
    "packing, work, num_workers", [("none", "encode", 2), ("stream", "encode", 2), ("global", "encode", 0)]
)
def test_a_sample_skipped_without_being_counted_ends_the_run(
    sources, cache, processor, packing, work, num_workers
):
    encoder = encoder_for(packing, processor)
    setattr(encoder.documents, work, in_silence(getattr(encoder.documents, work)))
    loader = opened(sources["hf"], encoder, cache, num_workers, packing)
    with pytest.raises(LostSample, match="data: 000000007: skipped without being counted as dropped"):
        for _ in range(ROWS):
            next(loader)
    loader.close()


# -- under stress


def some_time(call, most: float):
    """`call`, with a pause of up to so many seconds before and after one call in five."""

    @functools.wraps(call)
    def late(*args, **options):
        chance = random.SystemRandom()  # workers are forked with the same random numbers
        if chance.random() < 0.2:
            time.sleep(chance.random() * most)
        result = call(*args, **options)
        if chance.random() < 0.2:
            time.sleep(chance.random() * most)
        return result

    return late


def delay_hand_overs(monkeypatch) -> None:
    """Wherever two processes share something, and at every read; all tensors go through arenas."""
    monkeypatch.setattr(arena, "SMALL", 0)
    monkeypatch.setattr(drops, "DETAILS", 1)
    for owner, name, most in [
        (drops.DropReport, "_write", 0.02),
        (drops.DropReport, "keep", 0.02),
        (drops.fcntl, "lockf", 0.005),
        (arena.Arena, "_bytes", 0.005),
        (arena.Arena, "tensor", 0.01),
        (arena.Arena, "_let_go", 0.005),
        (datasets.HFDataset, "record", 0.02),
        (datasets.JsonDataset, "record", 0.02),
        (DocumentEncoder, "_prompt", 0.02),
        (multiprocessing.connection.Connection, "_send_bytes", 0.01),
        (multiprocessing.connection.Connection, "_recv_bytes", 0.01),
    ]:
        monkeypatch.setattr(owner, name, some_time(getattr(owner, name), most))


def stop_and_continue(ended: threading.Event, longest: float) -> None:
    """Stops a random worker of this process for a random time, again and again."""
    chance = random.SystemRandom()
    while not ended.wait(chance.random() * 0.1):
        workers = [process.pid for process in multiprocessing.active_children()]
        for pid in chance.sample(workers, min(len(workers), chance.randint(0, 2))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        ended.wait(chance.random() * longest)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def stress(longest: float):
    """Workers are stopped at random, and all cores are busy."""
    ended = threading.Event()
    spin = [sys.executable, "-c", "import os\np = os.getppid()\nwhile os.getppid() == p: sum(range(10**5))"]
    busy = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    stopping = threading.Thread(target=stop_and_continue, args=(ended, longest))
    stopping.start()
    try:
        yield
    finally:
        ended.set()
        stopping.join()
        for process in busy:
            process.kill()
            process.wait()


def narrow_pipes(loader) -> None:
    """A message of a worker then takes many writes."""
    workers = getattr(loader._loader, "_iterator", None)
    if workers is not None and hasattr(workers, "_worker_result_queue"):
        with contextlib.suppress(OSError):  # it holds more just now
            fcntl.fcntl(workers._worker_result_queue._writer.fileno(), fcntl.F_SETPIPE_SZ, 4096)


CELLS = [
    ("hf", "none", {}),
    ("hf", "stream", {}),
    ("hf", "global", {}),
    ("hf", "none", {"group_by_length": True}),
    ("parquet", "none", {"streaming": True, "shuffle_buffer_size": 10}),
    ("parquet", "stream", {"streaming": True, "shuffle_buffer_size": 10}),
    ("jsonl", "stream", {}),
    ("energon", "none", {}),
    ("energon", "stream", {}),
]
OFTEN = ("hf-stream-3", "hf-global-3", "energon-stream-3")  # the others run in `make test-soak`


def cells():
    for source, packing, options in CELLS:
        for workers in (1, 3, 4):
            name = "-".join([source, packing, *options, str(workers)])
            marks = pytest.mark.long if name in OFTEN else pytest.mark.soak
            yield pytest.param(source, packing, options, workers, id=name, marks=marks)


def number_of(key: str) -> int:
    return int(re.split("[/-]", key)[-1])


@pytest.mark.filterwarnings("ignore")  # of forking from a process with threads
@pytest.mark.parametrize("source, packing, options, num_workers", list(cells()))
def test_stopped_slow_and_crowded_workers_give_the_very_same_batches(
    sources, cache, processor, monkeypatch, source, packing, options, num_workers
):
    """Over two epochs, resumed in the middle of both; all that is dropped is named."""

    def opened_and_told():
        report = drops.DropReport()
        encoder = encoder_for(packing, processor, drops=report)
        return opened(sources[source], encoder, cache, num_workers, packing, **options), report

    def named(report) -> set[int]:
        return {number_of(example["key"]) for example in report.examples()}

    count = ROWS - len(TOO_LONG) + 8  # of 2 rows; not all rows hold two documents
    loader, _ = opened_and_told()
    calm = [content(next(loader)) for _ in range(count)]
    loader.close()
    trained = Counter(number_of(key) for keys, *_ in calm for row in keys for key in row)
    assert trained.keys() == set(range(ROWS)) - TOO_LONG
    assert source == "energon" or min(trained.values()) >= 2  # each of its workers has epochs of its own

    delay_hand_overs(monkeypatch)
    found, state, everything_named = [], None, set()
    with stress(longest=float(os.environ.get("STOPPED_SECONDS", 0.3))):
        for until in (count // 4, 3 * count // 4, count):
            loader, report = opened_and_told()
            if state is not None:
                loader.load_state_dict(json.loads(state))
            while len(found) < until:
                found.append(content(next(loader)))
                narrow_pipes(loader)
            state = json.dumps(loader.state_dict())
            loader.close()
            everything_named |= named(report)
            assert len(report.examples()) >= report.counted()[1]  # a worker may be ended in between
    assert found == calm
    assert everything_named == TOO_LONG
