"""The memory of a run's data stays what it was after the first quarter of an epoch."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import datasets
import numpy as np
import psutil
import pytest
from megatron.energon import stateless
from noisy_media import film, picture
from prepared_shards import prepare

from megatron_vlm.batch import DataNeeds
from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.models.families import load
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus

SAMPLES = 320  # images of 2.4 MB, decoded, and as much cut into patches; every eighth a video of 9.4 MB
PROVIDERS = {"energon": EnergonProvider, "hf": HFProvider}
MAX_GROWTH = 80e6  # seen: up to 30e6; the last three quarters decode 500e6 of images and 280e6 of videos


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A JSONL of conversations about one of 4 images or of 2 videos."""
    folder = tmp_path_factory.mktemp("source")
    for seed in range(4):
        (folder / f"{seed}.jpg").write_bytes(picture((1024, 768), "RGB", "JPEG", {"quality": 90}, seed))
    for seed in range(2):
        (folder / f"{seed}.mp4").write_bytes(film((512, 384), 16))
    records = []
    for number in range(SAMPLES):
        is_video = number % 8 == 7
        kind, name = ("video", f"{number % 2}.mp4") if is_video else ("image", f"{number % 4}.jpg")
        question = {"role": "user", "content": f"<{kind}> What is this?"}
        turns = [question, {"role": "assistant", "content": "A dog."}]
        records.append({f"{kind}s": [name], "messages": turns})
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "data.jsonl"


@pytest.fixture(scope="module")
def paths(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("energon") / "dataset"
    prepare(source, folder, splits={"train": SAMPLES}, samples_per_shard=20)
    return {"energon": folder, "hf": source}


def memory() -> int:
    """Bytes of memory of this process and its children that no file holds, shared pages counted once."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except ProcessLookupError:  # one that has ended and is not waited for yet
            continue
        total += sum(int(found) for found in re.findall(r"Pss_(?:Anon|Shmem): +(\d+) kB", rollup))
    return total * 1024


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["energon", "hf"])
def test_memory_stays_flat_over_an_epoch(kind, paths):
    parts = TINY_FAMILIES["qwen2_5_vl"]
    processor = parts.processor(default_corpus(100), parts.template, image_size=1024)
    encoder = PackingVLMTaskEncoder(
        processor, DataConfig(seq_length=4096, video_fps=4), DataNeeds(load("qwen2_5_vl").visual_keys)
    )
    options = {"packing": "stream", "packing_buffer_size": 16, "num_workers": 2}
    loader = PROVIDERS[kind](DataConfig(train_data_path=str(paths[kind]), **options)).train_loader(
        encoder, micro_batch_size=1, rank=0, world_size=1, seed=0
    )
    seen, quarters = 0, [0, 0, 0, 0]  # the most memory in each
    try:
        for step in itertools.count():
            seen += len(next(loader)["__key__"][0])
            if seen > SAMPLES:
                break
            if step % 4 == 0:
                quarter = 4 * (seen - 1) // SAMPLES
                quarters[quarter] = max(quarters[quarter], memory())
    finally:
        loader.close()
    assert min(quarters) > 0
    assert quarters[-1] - quarters[0] < MAX_GROWTH


# -- many small samples

MAX_SLOPE = 300  # bytes a sample; seen: 113, and 523 with the tars' members kept
MAX_SLOPE_OF_MANY = 60
READERS = [  # path, samples
    pytest.param("energon", 100_000, id="energon-100000", marks=pytest.mark.soak),
    pytest.param("data.jsonl", 100_000, id="jsonl-100000", marks=pytest.mark.soak),
    pytest.param("saved", 100_000, id="saved-100000", marks=pytest.mark.soak),
]


class OneEncoding(HFEncoderVLMTaskEncoder):
    """Encodes one sample and gives its tensors for every other, so that mostly the readers work."""

    encoded = None

    @stateless
    def encode_sample(self, sample):
        self.encoded = self.encoded or super().encode_sample(sample)
        names = {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__}
        return dataclasses.replace(self.encoded, **names, document_keys=[sample.__key__])


@pytest.fixture(scope="module")
def small_samples(tmp_path_factory):
    """4,000 conversations of a few words: as JSONL, in 8 shards, and saved by `datasets`."""
    folder = tmp_path_factory.mktemp("small")
    question = {"role": "user", "content": "Which number?"}
    rows = [
        {"messages": [question, {"role": "assistant", "content": f"number {number}"}]}
        for number in range(4000)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(folder / "data.jsonl", folder / "energon", splits={"train": 4000}, samples_per_shard=500)
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return folder


def slope(loader, count: int) -> float:
    """Bytes by which memory grows with a sample, over the last three quarters of `count` samples: the median
    over all pairs of points (Theil-Sen), which one step of the allocator does not move as a leak does."""
    seen, points = 0, []
    while seen < count:
        seen += sum(map(len, next(loader)["__key__"]))
        if seen * 40 >= count * (len(points) + 1):
            points.append((seen, memory()))
    samples, held = np.array(points[10:]).T
    first, second = np.triu_indices(len(samples), 1)
    return float(np.median((held[second] - held[first]) / (samples[second] - samples[first])))


@pytest.mark.parametrize("name, count", READERS)
def test_memory_stays_flat_over_many_small_samples(name, count, small_samples, record_property):
    parts = TINY_FAMILIES["gemma3"]
    processor = parts.processor(default_corpus(100), parts.template)
    encoder = OneEncoding(processor, DataConfig(seq_length=256), DataNeeds(load("gemma3").visual_keys))
    provider = PROVIDERS["energon" if name == "energon" else "hf"](
        DataConfig(train_data_path=str(small_samples / name))
    )
    loader = provider.train_loader(encoder, micro_batch_size=10, rank=0, world_size=1, seed=0)
    try:
        found = slope(loader, count)
    finally:
        loader.close()
    record_property("bytes a sample", found)
    print(f"{name}: {found:.1f} bytes a sample over {count:,}")
    assert found < (MAX_SLOPE if count < 20_000 else MAX_SLOPE_OF_MANY)
