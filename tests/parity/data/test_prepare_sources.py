"""Preparation from every source, on Ray too; blends and object stores as Energon reads them."""

import json
from collections import Counter
from pathlib import Path

import datasets
import pytest
import written_sources
from prepared_shards import prepare, stored
from sources import write_sharegpt

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider


@pytest.fixture
def encoder(processor):
    return HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))


@pytest.mark.parametrize("write", [s for s in written_sources.SOURCES if "streamed" not in s.__name__])
def test_every_source_is_prepared_and_trains_the_same(tmp_path, write, processor, encoder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "source").mkdir()
    settings = write(tmp_path / "source")
    source = settings.pop("train_data_path")
    summary = prepare({"val": source} if source.is_file() else source, tmp_path / "out", **settings)
    assert sum(summary.samples.values()) == len(written_sources.GOOD)
    assert sum(summary.skipped.values()) == len(written_sources.BAD)
    if source.is_dir():
        return
    loader = EnergonProvider(
        DataConfig(train_data_path="", valid_data_path=str(tmp_path / "out"), num_workers=0)
    ).valid_loader(encoder, micro_batch_size=1, rank=0, world_size=1)
    assert written_sources.numbers_of(loader, processor) == written_sources.GOOD


def test_a_meta_file_is_prepared_in_its_shares(tmp_path):
    settings = written_sources.write_meta(tmp_path, a={"sample_ratio": 0.4}, b={"sample_ratio": 1.5})
    prepare({"train": settings["train_data_path"]}, tmp_path / "out")
    replies = [
        json.loads(parts["json"])["messages"][1] for parts in stored(tmp_path / "out")["train"].values()
    ]
    per_dataset = Counter(int(reply["content"][0]["text"].split()[1]) // 10 for reply in replies)
    assert per_dataset == {0: 4, 1: 15}


@pytest.mark.soak
def test_ray_writes_the_same_bytes(tmp_path):
    source = write_sharegpt(tmp_path / "source", 30)
    source.write_text(source.read_text() + "{broken\n")
    local = prepare(source, tmp_path / "local", samples_per_shard=5)
    ray = prepare(source, tmp_path / "ray", samples_per_shard=5, engine="ray", workers=2)
    assert files(tmp_path / "local") == files(tmp_path / "ray")
    assert len(files(tmp_path / "local")) > 6
    assert (local.samples, local.skipped) == (ray.samples, ray.skipped)


def files(folder: Path):
    """Energon numbers each index anew, and its database holds the order of writing."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("index.")
    }
