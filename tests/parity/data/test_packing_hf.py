"""Packed and length-grouped rows of a map-style source: each document once, alike in cost, resumed."""

from collections import Counter

import numpy as np
import pytest
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.load.lengths import DROPPED, measure_dataset
from megatron_vlm.data.load.sampler import BalancedSampler

SEQ_LENGTH = 160
ROWS = 48  # for a whole number of buffers on 1 and on 3 ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return write_hf_folder(root / "rows", write_sharegpt(root / "source", ROWS))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lengths")


@pytest.fixture
def encoder(processor):
    return PackingVLMTaskEncoder(processor, DataConfig(seq_length=SEQ_LENGTH))


@pytest.fixture
def open_loader(folder, cache):
    """Opens training loaders and closes them after the test."""
    opened = []

    def open_one(encoder, packing="stream", num_workers=0, rank=0, world_size=1, batch=2, **options):
        settings = {"packing_buffer_size": 16, "lengths_cache": str(cache), "max_drop_share": 1.0} | options
        provider = HFProvider(
            DataConfig(train_data_path=str(folder), num_workers=num_workers, packing=packing, **settings)
        )
        place = {"rank": rank, "world_size": world_size}
        opened.append(provider.train_loader(encoder, micro_batch_size=batch, seed=3, **place))
        return opened[-1]

    yield open_one
    for loader in opened:
        loader.close()


def numbers(batch):
    return [int(key) for row in batch["__key__"] for key in row]


@pytest.mark.parametrize("packing", ["stream", "global"])
def test_rows_have_one_length_and_several_documents(open_loader, encoder, packing):
    loader = open_loader(encoder, packing)
    batches = [next(loader) for _ in range(8)]
    assert all(batch["input_ids"].shape == (2, SEQ_LENGTH) for batch in batches)
    for batch in batches:
        assert batch["attention_mask"].amax(-1).tolist() == [len(keys) for keys in batch["__key__"]]
    assert sum(len(numbers(batch)) for batch in batches) > 16 * 1.5


@pytest.mark.parametrize(
    "field, change",
    [
        ("packing: saved 'stream', now 'global'", {"packing": "global"}),
        ("packing_buffer_size: saved 16, now 20", {"packing_buffer_size": 20}),
    ],
)
def test_a_state_of_another_packing_is_refused_by_name(open_loader, encoder, field, change):
    state = open_loader(encoder).state_dict()
    with pytest.raises(ValueError, match=field):
        open_loader(encoder, **change).load_state_dict(state)


def test_a_sample_whose_pixels_are_broken_leaves_its_row_to_the_others(tmp_path, encoder):
    """Its header is whole, so it is packed; what cannot be decoded is dropped then, and counted."""
    source = write_sharegpt(tmp_path / "source", 12)
    image = tmp_path / "source/images/1-0.jpg"
    image.write_bytes(image.read_bytes()[:-40])
    rows = write_hf_folder(tmp_path / "rows", source)
    options = {"packing": "stream", "packing_buffer_size": 12, "max_drop_share": 0.5}
    provider = HFProvider(DataConfig(train_data_path=str(rows), num_workers=0, **options))
    loader = provider.train_loader(encoder, micro_batch_size=1, rank=0, world_size=1, seed=0)
    assert sum((Counter(numbers(next(loader))) for _ in range(3)), Counter()).keys() >= {0, 2, 3, 4}
    assert encoder.drops.summary()["reasons"].keys() <= {"image_truncated", "image_undecodable"}
    assert {example["key"] for example in encoder.drops.examples()} == {"000000001"}


def test_lengths_are_measured_once_and_go_on_where_they_stopped(tmp_path, folder, encoder, monkeypatch):
    monkeypatch.setattr("megatron_vlm.data.load.lengths.PART", 10)
    rows = HFProvider(DataConfig(train_data_path=str(folder))).train_rows(encoder, 0)
    first = measure_dataset(rows, tmp_path)
    parts = sorted(tmp_path.glob("*/*.lengths"))
    assert len(parts) == 5
    kept = {part: part.stat().st_mtime_ns for part in parts[:3]}
    for part in parts[3:]:
        part.unlink()
    again = measure_dataset(rows, tmp_path, num_workers=2, rank=1, world_size=2)
    assert np.array_equal(first, again)
    assert {part: part.stat().st_mtime_ns for part in parts[:3]} == kept
    assert encoder.drops.summary() == {"encoded": 0, "dropped": 0, "reasons": {}}


def test_measured_lengths_are_those_of_the_encoded_samples(tmp_path, folder, processor):
    whole = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=50))
    rows = HFProvider(DataConfig(train_data_path=str(folder), max_drop_share=1.0)).train_rows(whole, 0)
    tokens, _ = measure_dataset(rows, tmp_path)
    encoded = [rows[None, [index]][1] for index in range(ROWS)]
    assert tokens.tolist() == [DROPPED if sample is None else len(sample.input_ids) for sample in encoded]
    assert DROPPED in tokens


def test_a_document_that_grew_after_it_was_measured_is_an_error(open_loader, encoder):
    loader = open_loader(encoder, "global")
    loader._sampler.tokens[:] = 20
    with pytest.raises(RuntimeError, match="tokens, seq_length = 160: they changed after"):
        for _ in range(20):
            next(loader)
    with pytest.raises(RuntimeError, match="an earlier error ended it"):
        next(loader)


def test_samples_of_about_one_length_share_a_step(open_loader, processor):
    def padding(**options):
        encoder = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=SEQ_LENGTH))
        loader = open_loader(encoder, "none", batch=4, **options)
        batches = [next(loader) for _ in range(ROWS // 4)]
        assert len({key for batch in batches for key in numbers(batch)}) == ROWS
        return sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)

    assert padding(group_by_length=True) < padding() / 3


# -- the order of packed rows


def balanced(rank, world_size, **options):
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, 100, 970)
    tokens[::50] = DROPPED
    patches = np.where(rng.random(970) < 0.6, tokens * 2, 0)
    settings = {"micro_batch_size": 2, "seed": 1, "capacity": 200} | options
    return BalancedSampler(lambda epoch: np.arange(970), tokens, patches, rank, world_size, **settings)


def test_ranks_stay_in_step_over_epochs():
    """After equally many rows, all ranks together have a beginning of the endless sequence of rows."""
    orders = [iter(balanced(rank, 3)) for rank in range(3)]
    places = [next(order)[0] for order in orders for _ in range(800)]
    by_epoch = {}
    for epoch, done, _ in places:
        by_epoch.setdefault(epoch, []).append(done)
    assert len(by_epoch) > 4 and len(by_epoch[0]) % 6
    for rows in by_epoch.values():
        assert sorted(rows) == list(range(1, len(rows) + 1))
