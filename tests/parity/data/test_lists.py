"""Lists of data paths: an epoch has the samples of each as often as is said, from either source."""

import json
import operator
from collections import Counter
from pathlib import Path

import pytest
from loaders import encoder_of, open_loader
from pairs import pairwise
from prepared_shards import prepare
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.callbacks.samples import read_step
from megatron_vlm.config import ConfigError, DataConfig, RunConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.on_disk.paths import DataSource, sources_of
from megatron_vlm.data.records.blends import path_names
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes import compose
from megatron_vlm.validate import validate
from tiny.distributed import run_distributed

SIZES = {"a": 12, "b": 8}  # rows; both count theirs from 0


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{dataset_type: paths}; of each the last is called as the first, in another folder."""
    found = {"hf": [], "energon": []}
    for name, size in SIZES.items():
        folder = tmp_path_factory.mktemp("lists") / name
        source = write_sharegpt(folder / "source", size)
        found["hf"].append(str(source if name == "a" else write_hf_folder(folder / "rows", source)))
        splits = {"train": size - 2, "val": 2}
        prepare(source, folder / "shards", splits=splits, samples_per_shard=3)
        found["energon"].append(str(folder / "shards"))
    return found


def opened(kind, paths, processor, rank=0, world_size=1, **settings):
    encoder = encoder_of(processor, 256, settings.get("packing", "none"))
    if kind == "energon":
        settings = {"shuffle_buffer_size": 1, "max_samples_per_sequence": 3} | settings
    return open_loader(kind, paths, encoder, seed=5, rank=rank, world_size=world_size, **settings)


def keys(batch):
    return [key for row in batch["__key__"] for key in row]


def epochs_of(kind, paths, processor, count, world_size=1, **settings):
    """How often each key comes in `count` samples over all ranks."""
    seen = Counter()
    for rank in range(world_size):
        loader = opened(kind, paths, processor, rank, world_size, **settings)
        of_rank = 0
        while of_rank < count // world_size:
            found = keys(next(loader))
            seen.update(found)
            of_rank += len(found)
        loader.close()
    return seen


def repeated(paths, *ends):
    return [f"{path}{end}" for path, end in zip(paths, ends, strict=True)]


def rows(kind, name):
    return SIZES[name] - (2 if kind == "energon" else 0)


@pytest.mark.parametrize("kind, num_workers, world_size", pairwise(["hf", "energon"], [0, 2], [1, 2]))
def test_an_epoch_has_each_sample_of_each_path_once(sources, processor, kind, num_workers, world_size):
    total = rows(kind, "a") + rows(kind, "b")
    settings = {"num_workers": num_workers}
    seen = epochs_of(kind, sources[kind], processor, total, world_size, **settings)
    assert set(seen.values()) == {1}
    assert len(seen) == total


@pytest.mark.parametrize("kind", ["hf", "energon"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_has_each_sample_as_often_as_its_path_is_repeated(sources, processor, kind, num_workers):
    a, b = rows(kind, "a"), rows(kind, "b")
    paths = repeated(sources[kind], "", "*3")
    seen = epochs_of(kind, paths, processor, 2 * (a + 3 * b), num_workers=num_workers)
    assert sorted(seen.values()) == [2] * a + [6] * b


@pytest.mark.parametrize(
    ("counts", "epochs", "expected"),
    [
        (("#5", ""), 1, {1: 5 + 8}),
        (("#5", ""), 12, {5: 12, 12: 8}),  # sixty of the twelve rows, each as often as any other
        (("#30", "*0.25"), 2, {5: 12, 1: 4}),
        (("*1.5", "*2"), 2, {3: 12, 4: 8}),
    ],
)
def test_an_epoch_has_as_many_rows_as_the_path_says(sources, processor, counts, epochs, expected):
    paths = repeated(sources["hf"], *counts)
    total = sum(one.rows_in_an_epoch(rows) for one, rows in zip(sources_of(paths), (12, 8), strict=True))
    seen = epochs_of("hf", paths, processor, epochs * total, num_workers=0)
    assert Counter(seen.values()) == expected


def test_a_name_stands_before_an_item(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert DataSource.of("charts=a.jsonl#5") == DataSource("a.jsonl", rows=5, name="charts")
    assert DataSource.of(" charts = ~/a.jsonl ") == DataSource("/home/me/a.jsonl", name="charts")
    assert DataSource.of("x=owner/name:part") == DataSource("owner/name", "part", name="x")
    assert DataSource.of("x=s3://bucket/a=1*2") == DataSource("s3://bucket/a=1*2", name="x")
    assert DataSource.of("s3://bucket/a=1") == DataSource("s3://bucket/a=1")
    Path("day=1").mkdir()
    Path("day=1/a.jsonl").write_text("{}")
    for path in ("day=1", "day=1/a.jsonl"):
        assert DataSource.of(path) == DataSource(path)
        assert DataSource.of(f"{path}*2") == DataSource(path, share=2.0)
        assert DataSource.of(f"x={path}") == DataSource(path, name="x")


@pytest.mark.parametrize(
    ("kind", "paths", "others", "message"),
    [
        ("hf", "a.jsonl#0", {}, "an epoch would have none of its rows"),
        ("hf", ["x=a.jsonl", "x=b.jsonl"], {}, "the names x, x begin alike; give each source one of its own"),
        ("hf", "my set=a.jsonl", {}, "'my set' before = is no name; take up to 40 letters"),
        ("energon", ["a#5", "b"], {}, "is read whole or, beside others, several times"),
        ("energon", ["a*2"], {}, "is read whole or, beside others, several times"),
    ],
)
def test_what_paths_say_is_checked(kind, paths, others, message):
    config = apply_overrides(
        RunConfig(), {"run_dir": "r", "model.hf_path": "m", "data.train_data_path": paths}
    )
    config.data.dataset_type = kind
    for name, value in others.items():
        setattr(config.data, name, value)
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.mark.parametrize(
    "how, num_workers",
    pairwise(
        [
            ("hf", {}),
            ("energon", {}),
            ("hf", {"packing": "stream", "packing_buffer_size": 6}),
            ("energon", {"packing": "stream", "packing_buffer_size": 3}),
            ("hf", {"packing": "global"}),
            ("hf", {"group_by_length": True}),
        ],
        [0, 2],
    ),
)
def test_a_list_resumes_exactly_and_its_samples_are_made_again(
    sources, processor, how, num_workers, tmp_path
):
    kind, settings = how
    paths, settings = repeated(sources[kind], "*2", ""), settings | {"num_workers": num_workers}
    settings |= {"lengths_cache": str(tmp_path)} if kind == "hf" else {}

    def content(batch):
        return keys(batch), batch["input_ids"].tolist(), batch["labels"].tolist()

    loader = opened(kind, paths, processor, **settings)
    for _ in range(3):
        last = next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [content(next(loader)) for _ in range(9)]
    loader.close()
    resumed = opened(kind, paths, processor, **settings)
    resumed.load_state_dict(state)
    assert [content(next(resumed)) for _ in range(9)] == expected
    resumed.close()
    key = json.loads(json.dumps(last["__restore_key__"]))
    again = opened(kind, paths, processor, **settings)
    assert content(again.replay(key)) == content(last)
    again.close()


@pytest.mark.parametrize("kind", ["hf", "energon"])
def test_the_keys_of_a_list_begin_with_its_sources(sources, processor, kind):
    loader = opened(kind, sources[kind], processor, num_workers=0)
    found = [key for _ in range(20) for key in keys(next(loader))]
    counts = [sum(key.startswith(f"{name}-") for key in found) for name in loader.sources]
    assert len(counts) == 2 and min(counts) > 5 and sum(counts) == len(found)
    loader.close()
    named = opened(kind, [f"charts={sources[kind][0]}", sources[kind][1]], processor, num_workers=0)
    names = ["charts", Path(sources[kind][1]).name]
    found = [key for _ in range(20) for key in keys(next(named))]
    assert named.sources == names and {key.partition("-")[0] for key in found} == set(names)
    named.close()
    alone = opened(kind, sources[kind][:1], processor, num_workers=0)
    assert not alone.sources
    alone.close()


def train_list(steps: int, root: str, checkpoint: str, paths: list[str]) -> None:
    from megatron_vlm.training.loop import train

    settings = [f"train.steps={steps}", "tp=1", "micro_batch_size=1", "global_batch_size=2", "num_workers=0"]
    settings += ["data.dataset_type=hf", "data.packing=stream", "data.packing_buffer_size=6"]
    settings += ["train.eval_every=2", "train.save_every=2", "data.seq_length=256"]
    settings += ["data.validation_share=0.3"]
    arguments = {"run_dir": f"{root}/run", "hf_path": checkpoint, "train_data_path": paths}
    train(compose("gemma3_tiny_digits", settings=settings, arguments=arguments))


@pytest.mark.long
def test_the_log_counts_the_samples_and_tokens_of_each_source_through_a_resume(
    sources, tiny_gemma3, tmp_path
):
    for steps in (2, 4):
        run_distributed(1, train_list, steps, str(tmp_path), str(tiny_gemma3), sources["hf"])
    names, trained = path_names(sources_of(sources["hf"])), Counter()
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    held = (tmp_path / "run" / "held_out.jsonl").read_text().splitlines()
    held = Counter(json.loads(line)["key"].rpartition("-")[0] for line in held)
    validations = [row for row in rows if "valid_loss" in row]
    assert [row["step"] for row in validations] == [2, 4] and set(held) == set(names)
    for row in validations:
        assert {name: row[f"valid_samples/{name}"] for name in names} == held
        tokens = [row[f"valid_trained_tokens/{name}"] for name in names]
        losses = [row[f"valid_loss/{name}"] for name in names]
        mean = sum(map(operator.mul, tokens, losses)) / sum(tokens)
        # a micro batch adds its losses in fp32, those of a source are added in fp64
        assert row["valid_loss"] == pytest.approx(mean, rel=1e-6)
    for row in (row for row in rows if "loss" in row):
        batches = read_step(tmp_path / "run", row["step"])
        step = Counter(key.rpartition("-")[0] for one in batches for keys in one["keys"] for key in keys)
        trained += step
        assert {name: row.get(f"samples/{name}", 0) for name in names} == {n: trained[n] for n in names}
        assert sum(row.get(f"trained_tokens/{name}", 0) for name in names) == row["trained_tokens"]
        losses = [row[f"loss/{name}"] for name in names if step[name]]
        assert min(losses) <= row["loss"] + 1e-9 and row["loss"] <= max(losses) + 1e-9
    assert row["step"] == 4 and min(trained.values()) > 1


@pytest.mark.parametrize("kind", ["hf", "energon"])
@pytest.mark.parametrize("given", [True, False])
def test_validation_has_each_sample_of_each_path_once(sources, processor, kind, given):
    """Not given, it is of the paths that have a split for it: none of hf's here."""
    provider = {"hf": HFProvider, "energon": EnergonProvider}[kind]
    valid = sources[kind] if given else None
    encoder = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))
    seen = Counter()
    for rank in range(2):
        data = DataConfig(train_data_path=sources[kind], valid_data_path=valid, num_workers=0)
        loader = provider(data).valid_loader(encoder, micro_batch_size=1, rank=rank, world_size=2)
        if kind == "hf" and not given:
            assert loader is None
            return
        seen.update(key for batch in loader for key in keys(batch))
    assert len(seen) == (20 if kind == "hf" else 4) and set(seen.values()) == {1}


# -- the setting


def config(*overrides, **settings):
    given = {"run_dir": "r", "model.hf_path": ".", **settings}
    return apply_overrides(apply_overrides(RunConfig(), given), overrides)
