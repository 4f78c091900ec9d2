"""Packed rows out of Energon: whole documents at a fixed length, each once, resumed exactly."""

import json
import re
from collections import Counter

import pytest
import written_sources
from loaders import content, take
from megatron.energon import WorkerConfig, get_loader, get_train_dataset
from pairs import pairs
from prepared_shards import prepare
from sources import write_sharegpt

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.workers import close_loader

SEQ_LENGTH = 160
SAMPLES = 60


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("energon")
    prepare(
        write_sharegpt(folder / "source", SAMPLES),
        folder / "dataset",
        splits={"train": SAMPLES},
        samples_per_shard=10,
    )
    return folder / "dataset"


@pytest.fixture
def encoder(processor):
    return PackingVLMTaskEncoder(processor, DataConfig(seq_length=SEQ_LENGTH))


def train_loader(dataset, encoder, num_workers=0, **options):
    settings = {"packing": "stream", "packing_buffer_size": 16, "shuffle_buffer_size": 8} | options
    provider = EnergonProvider(
        DataConfig(
            train_data_path=str(dataset), num_workers=num_workers, max_samples_per_sequence=5, **settings
        )
    )
    return provider.train_loader(encoder, micro_batch_size=2, rank=0, world_size=1, seed=7)


def test_rows_have_one_length_and_hold_whole_documents(dataset, encoder, processor):
    alone = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=SEQ_LENGTH))
    rows_of = EnergonProvider(
        DataConfig(
            train_data_path=str(dataset), valid_data_path=str(dataset), num_workers=0, shuffle_buffer_size=1
        )
    )
    singles = rows_of.train_loader(alone, micro_batch_size=1, rank=0, world_size=1, seed=7)
    lengths = {}
    while len(lengths) < SAMPLES:
        batch = next(singles)
        lengths[batch["__key__"][0][0]] = batch["input_ids"].shape[1]
    loader = train_loader(dataset, encoder)
    documents = 0
    for _ in range(10):
        batch = next(loader)
        assert batch["input_ids"].shape == (2, SEQ_LENGTH)
        for keys, numbers in zip(batch["__key__"], batch["attention_mask"], strict=True):
            assert [int((numbers == n + 1).sum()) for n in range(len(keys))] == [lengths[key] for key in keys]
            documents += len(keys)
    assert documents > 2 * 10 * 1.5


@pytest.fixture(scope="module")
def kinds(dataset, tmp_path_factory):
    """Datasets by kind, with the numbers of their samples."""
    folder, out = tmp_path_factory.mktemp("kinds"), {"records": (dataset, Counter(range(SAMPLES)))}
    for write in (written_sources.documents, written_sources.in_lmdb):
        (folder / write.__name__).mkdir()
        source = write(folder / write.__name__)["train_data_path"]
        target = folder / f"{write.__name__}_prepared"
        prepare({"train": source}, target, samples_per_shard=5)
        out[write.__name__] = target, written_sources.GOOD
    blend = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    for name, weight in (("records", 3), ("documents", 1)):
        blend += f"      - {{weight: {weight}, path: {out[name][0]}}}\n"
    (folder / "blend.yaml").write_text(blend)
    once = re.sub(r"weight: \d", "repetitions: 1", blend.replace("blend:", "blend_epochized:"))
    (folder / "once.yaml").write_text(once)
    out["blend"] = folder / "blend.yaml", out["records"][1] + out["documents"][1]
    return out


KINDS, PACKED = ["records", "blend", "documents", "in_lmdb"], ["none", "stream"]


@pytest.mark.parametrize("kind, packing, num_workers", list(pairs(KINDS, PACKED, [(0,), (2,)])))
def test_every_kind_resumes_exactly(kinds, processor, kind, packing, num_workers):
    """Amid a buffer, and around an epoch's end; saved again right after the restore, and a batch later."""

    def open_loader():
        cls = HFEncoderVLMTaskEncoder if packing == "none" else PackingVLMTaskEncoder
        return train_loader(
            kinds[kind][0], cls(processor, DataConfig(seq_length=SEQ_LENGTH)), num_workers, packing=packing
        )

    reference, states, expected = open_loader(), [], []
    for _ in range(kinds[kind][1].total() // 2 + 6):
        states.append(json.dumps(reference.state_dict()))
        expected += take(reference, 1)
    reference.close()
    for at in (4, len(states) - 6):
        state, resumed = states[at], []
        for steps in (0, 1, 4):
            loader = open_loader()
            loader.load_state_dict(json.loads(state))
            resumed += take(loader, steps)
            state = json.dumps(loader.state_dict())
            loader.close()
        assert resumed == expected[at : at + 5]


def test_a_packed_batch_can_be_replayed_by_its_key(dataset, encoder):
    batch = [next(loader) for loader in [train_loader(dataset, encoder)] for _ in range(4)][-1]
    key = json.loads(json.dumps(batch["__restore_key__"]))
    assert content(train_loader(dataset, encoder).replay(key)) == content(batch)


def test_the_patch_budget_holds_in_every_row(dataset, processor):
    """A tiny Gemma3 image has 64 patches; without the budget, rows have more than four images."""

    def most_images(**options):
        loader = train_loader(
            dataset, PackingVLMTaskEncoder(processor, DataConfig(seq_length=SEQ_LENGTH, **options))
        )
        rows = (row for _ in range(8) for row in next(loader)["input_ids"])
        return max(int((row == processor.tokenizer.image_token_id).sum()) // 16 for row in rows)

    assert most_images() > 3
    assert most_images(max_patches=3 * 64) == 3


@pytest.mark.parametrize(
    "kind, packing, world_size, num_workers",
    list(pairs(KINDS, PACKED, [(1, 0), (1, 3), (3, 0), (1, 1), (3, 3), (3, 1)])),
)
def test_an_epoch_trains_or_drops_each_sample_once(kinds, processor, kind, packing, world_size, num_workers):
    path, expected = kinds[kind]
    path = path.with_name("once.yaml") if kind == "blend" else path
    seen, dropped = Counter(), Counter()
    for rank in range(world_size):
        cls = HFEncoderVLMTaskEncoder if packing == "none" else PackingVLMTaskEncoder
        encoder = cls(processor, DataConfig(seq_length=50))  # two images are too long
        workers = WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers)
        epoch = get_train_dataset(
            str(path),
            worker_config=workers,
            batch_size=2,
            packing_buffer_size=None if packing == "none" else 8,
            shuffle_buffer_size=8,
            max_samples_per_sequence=5,
            task_encoder=encoder,
            repeat=False,
        )
        loader = get_loader(epoch)
        loader.pin_memory = False
        for batch in loader:
            seen += written_sources.numbers_of([batch], processor)
        close_loader(loader)
        encoder.drops.check()
        dropped.update(int(example["key"].split("-")[-1]) for example in encoder.drops.examples())
    assert len(seen) > len(expected) / 2 and len(dropped) > 3
    assert seen.total() + dropped.total() == expected.total()
    if kind == "records":
        assert seen + dropped == expected
    assert seen <= expected
