"""What breaks during a run: an error that says what and where, and the last checkpoint stays loadable."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from loaders import open_loader
from pairs import first_soon, pairwise
from prepared_shards import prepare
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.batch import DataNeeds
from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.workers import workers_of

SAMPLES = 40


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    source = write_sharegpt(folder / "source", SAMPLES)
    prepare(source, folder / "energon", splits={"train": SAMPLES}, samples_per_shard=10)
    return {"energon": folder / "energon", "hf": write_hf_folder(folder / "rows", source)}


def train_loader(path, encoder, **options):
    kind = "energon" if (Path(path) / ".nv-meta").exists() else "hf"
    if isinstance(encoder, PackingVLMTaskEncoder):
        options |= {"packing": "stream", "packing_buffer_size": 8}
    return open_loader(kind, path, encoder, seed=1, **{"num_workers": 0} | options)


def read_until_error(loader, batches=200) -> str:
    try:
        with pytest.raises(Exception) as caught:
            for _ in range(batches):
                next(loader)
    finally:
        loader.close()
    notes = getattr(caught.value, "__notes__", [])
    return "\n".join([f"{type(caught.value).__name__}: {caught.value}", *notes])


# -- our own bugs


class Fails(Exception):
    """Nothing that any library knows."""


def fail_on_seventh(method):
    def failing(sample, *args):
        if sample.__key__.endswith("7"):
            raise Fails("a bug of ours")
        return method(sample, *args)

    return failing


def plain(processor):
    encoder = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))
    encoder.documents.encode = fail_on_seventh(encoder.documents.encode)
    return encoder


def measuring(processor):
    encoder = PackingVLMTaskEncoder(processor, DataConfig(seq_length=256))
    encoder.documents.measure = fail_on_seventh(encoder.documents.measure)
    return encoder


def encoding(processor):
    encoder = PackingVLMTaskEncoder(processor, DataConfig(seq_length=256))
    encoder.documents.encode = fail_on_seventh(encoder.documents.encode)
    return encoder


class Choosing(PackingVLMTaskEncoder):
    def select_rows(self, lengths, patches):
        raise Fails("a bug of ours")


def choosing(processor):
    return Choosing(processor, DataConfig(seq_length=256))


def placing(processor):
    """The family's own part of an encoder, which knows no key."""

    def no_positions(input_ids, visual_inputs):
        raise Fails("a bug of ours")

    return HFEncoderVLMTaskEncoder(
        processor, DataConfig(seq_length=256), DataNeeds(position_ids=no_positions)
    )


@pytest.mark.parametrize(
    "encoder, kind, num_workers",
    pairwise([plain, measuring, encoding, choosing, placing], ["energon", "hf"], [0, 2]),
)
def test_a_bug_of_ours_ends_the_run(datasets, processor, encoder, kind, num_workers):
    text = read_until_error(train_loader(datasets[kind], encoder(processor), num_workers=num_workers))
    assert "Fails: a bug of ours" in text
    if encoder is not choosing:
        assert re.search(r"data: sample (train-)?0+[0-9]+", text)
    if encoder not in (choosing, placing):
        assert re.search(r"data: sample .*7$", text, re.MULTILINE)


# -- workers


@pytest.mark.parametrize("number", first_soon([signal.SIGBUS, signal.SIGKILL]))
def test_a_worker_that_died_gives_no_state_and_its_signal_is_named(datasets, processor, number):
    encoder = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))
    loader = train_loader(datasets["energon"], encoder, num_workers=2)
    next(loader)
    worker = workers_of(loader._loader)[1]
    os.kill(worker.pid, number)
    worker.join()
    with pytest.raises(
        RuntimeError, match=rf"worker \(pid {worker.pid}\) was ended by signal {number:d} \({number.name}\): "
    ) as ended:
        loader.state_dict()
    loader.close()
    assert ("want of memory" in str(ended.value)) == (number == signal.SIGKILL)
