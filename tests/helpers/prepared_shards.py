"""Datasets that are prepared for Energon in one process, and what lies in their shards."""

import io
import tarfile

import yaml

from megatron_vlm.data.prepare import prepare_energon_dataset


def prepare(source, output, **kwargs):
    return prepare_energon_dataset(source, output, **({"workers": 1, "progress": False} | kwargs))


def stored(output):
    """split → key → {part: bytes}, read with tarfile alone."""
    splits = yaml.safe_load((output / ".nv-meta/split.yaml").read_text())["split_parts"]
    return {split: _samples([output / name for name in names]) for split, names in splits.items()}


def add_part(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    """A file of a shard that a test writes by itself."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    shard.addfile(info, io.BytesIO(content))


def _samples(shards):
    samples = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                samples.setdefault(key, {})[part] = tar.extractfile(member).read()
    return samples
