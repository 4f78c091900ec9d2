"""`data.validation_share`: a part of the rows, chosen by their keys, is validated on and never trained."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from pairs import pairwise
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.config import ConfigError, DataConfig, RunConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.records.blends import is_held_out
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.validate import validate

ROWS, SHARE = 40, 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows as lines, as a saved folder, and in a meta file with a share of its own."""
    folder = tmp_path_factory.mktemp("held_out")
    source = write_sharegpt(folder / "source", ROWS)
    write_hf_folder(folder / "rows", source)
    meta = {"a": {"file_name": "data.jsonl"}, "b": {"file_name": "data.jsonl", "sample_ratio": 2}}
    (folder / "source/meta.json").write_text(json.dumps(meta))
    return folder


def loaders(paths, processor, world_size=1, share=SHARE, **settings):
    """(training loaders, validation loaders), one for each rank."""
    data = DataConfig(
        dataset_type="hf", train_data_path=paths, num_workers=0, validation_share=share, **settings
    )
    provider, packed = HFProvider(data), settings.get("packing", "none") != "none"
    encoder = (PackingVLMTaskEncoder if packed else HFEncoderVLMTaskEncoder)(
        processor, DataConfig(seq_length=150)
    )
    valid = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=150))
    place = {"micro_batch_size": 1, "world_size": world_size}
    ranks = range(world_size)
    train = [provider.train_loader(encoder, rank=rank, seed=3, **place) for rank in ranks]
    return train, [provider.valid_loader(valid, rank=rank, **place) for rank in ranks]


def keys(batches) -> Counter:
    return Counter(key for batch in batches for row in batch["__key__"] for key in row)


EXPECTED = {f"{number:09d}" for number in range(ROWS) if is_held_out(f"{number:09d}", SHARE)}


def test_a_hash_decides_and_a_larger_share_holds_out_more():
    assert len(EXPECTED) == 13 and EXPECTED != {f"{number:09d}" for number in range(13)}
    names = [f"{number:09d}" for number in range(20_000)]
    shares = [{name for name in names if is_held_out(name, share)} for share in (0.01, 0.1, 0.5)]
    assert shares[0] < shares[1] < shares[2]
    assert [len(held) / len(names) for held in shares] == pytest.approx([0.01, 0.1, 0.5], rel=0.25)


PACKINGS = [
    {},
    {"packing": "stream", "packing_buffer_size": 7},
    {"packing": "global"},
    {"group_by_length": True},
]


@pytest.mark.parametrize(
    "settings, world_size, kind", pairwise(PACKINGS, [1, 3], ["source/data.jsonl", "rows"])
)
def test_what_is_held_out_is_never_trained_and_all_else_is(
    folder, processor, settings, world_size, kind, tmp_path
):
    """Over more than two epochs, resumed in the middle, on any number of ranks."""
    settings = settings | {"lengths_cache": str(tmp_path)}
    train, valid = loaders(str(folder / kind), processor, world_size, **settings)
    trained = keys(next(loader) for _ in range(2 * ROWS // world_size) for loader in train)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in train]
    resumed, _ = loaders(str(folder / kind), processor, world_size, **settings)
    for loader in resumed:
        loader.load_states(states)
    trained += keys(next(loader) for _ in range(ROWS // world_size) for loader in resumed)
    assert len(trained) == ROWS - len(EXPECTED) and min(trained.values()) >= 2
    validated = keys(batch for loader in valid for batch in loader)
    assert validated == Counter(EXPECTED) and not validated.keys() & trained.keys()
    assert set(valid[0].keys()) == EXPECTED


def test_each_source_of_a_blend_holds_out_its_own_rows_and_keeps_its_share(folder, processor):
    [train], [valid] = loaders(str(folder / "source/meta.json"), processor)
    kept, held = ROWS - len(EXPECTED), len(EXPECTED)
    assert train.rows_in(1) == 3 * kept
    epoch = keys(next(train) for _ in range(3 * kept))
    assert Counter(key[0] for key in epoch.elements()) == {"a": kept, "b": 2 * kept}
    validated = keys(valid)
    assert (
        validated == Counter({f"{name}-{key}": 1 for name in "ab" for key in EXPECTED})
        and len(validated) == 2 * held
    )
    assert not validated.keys() & epoch.keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data.valid_data_path": "v", "data.dataset_type": "hf"},
            "data.valid_data_path is given, too; drop one",
        ),
        ({"data.dataset_type": "energon"}, "an energon dataset has it settled when prepared"),
        ({"data.streaming": True, "data.dataset_type": "hf"}, "needs data that lie here"),
    ],
)
def test_what_has_its_own_validation_data_or_no_rows_by_number_is_refused(settings, message):
    base = {"run_dir": "run", "model.hf_path": "m", "data.train_data_path": "d", "data.validation_share": 0.1}
    with pytest.raises(ConfigError, match=f"^data.validation_share: .*{message}"):
        validate(apply_overrides(RunConfig(), base | settings))
