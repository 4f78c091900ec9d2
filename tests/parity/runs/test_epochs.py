"""Epochs: every sample as often as was asked for, whatever the ranks, and through a resume."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from pairs import first_soon
from prepared_shards import prepare
from programs import COMMAND, run_program
from safetensors.torch import load_file
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.callbacks.samples import read_step
from megatron_vlm.config import DataConfig, RunConfig, TrainConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.records.blends import is_held_out
from megatron_vlm.job.step_schedule import Epochs, milestones
from megatron_vlm.overrides import apply_overrides, from_yaml, to_yaml
from megatron_vlm.recipes import compose
from tiny.distributed import run_distributed

ROWS = 25
EVEN = Epochs(lambda number: 10 * number)  # ten rows in each epoch


# -- arithmetic


@pytest.mark.parametrize(
    ("epochs", "batch", "steps", "ends"),
    [
        (1, 4, 3, {3}),  # two rows of the second epoch fill the third step
        (2, 4, 5, {3, 5}),
        (2, 5, 4, {2, 4}),
        (0.5, 4, 2, set()),
        (0.1, 4, 1, set()),
        (2, 40, 1, {1}),  # a step longer than the run
    ],
)
def test_the_last_step_is_the_one_that_has_the_last_row(epochs, batch, steps, ends):
    train = TrainConfig(steps=None, epochs=epochs, global_batch_size=batch, save_every="epoch")
    found = milestones(train, EVEN)
    assert (found.steps, found.epoch_ends) == (steps, ends)
    assert [step for step in range(1, steps + 1) if found.saves_after(step)] == sorted({*ends, steps})


def test_epochs_of_other_lengths_count_each_by_its_own():
    rows = [0, 7, 16, 24, 31]
    found = milestones(
        TrainConfig(None, 3, global_batch_size=4, eval_every="epoch"), Epochs(rows.__getitem__)
    )
    assert (found.steps, found.epoch_ends) == (6, {2, 4, 6})
    assert [found.evaluates_after(step) for step in range(1, 7)] == [False, True] * 3
    counted = Epochs(rows.__getitem__)
    assert [counted.at(n) for n in (0, 7, 16, 20)] == [0, 1, 2, 2.5] and counted.rows(1.5) == 12


def test_a_resumed_run_counts_the_rows_that_it_had_and_not_its_steps():
    """Two steps of four rows; then of six, and for an epoch more."""
    train = TrainConfig(steps=None, epochs=3, global_batch_size=6, save_every="epoch")
    found = milestones(train, EVEN, done=2, rows=8)
    assert (found.steps, found.epoch_ends) == (2 + 4, {3, 4, 6})
    assert milestones(train, EVEN, done=8, rows=32).steps == 8  # nothing is left
    even = TrainConfig(steps=None, epochs=3, global_batch_size=4, export_every="epoch")
    ended = [milestones(even, EVEN, done, rows=4 * done).exports_after(done) for done in range(1, 6)]
    assert ended == [False, False, True, False, True]


# -- settings


def set_up(*settings: str) -> RunConfig:
    return compose("gemma3_tiny_digits", settings=[*settings])


def test_epochs_and_steps_replace_each_other_and_are_written_down_as_given():
    config = set_up("epochs=2.5")
    assert (config.train.steps, config.train.epochs, config.optimizer.warmup_steps) == (None, 2.5, None)
    assert from_yaml(to_yaml(config)).train == config.train
    again = apply_overrides(config, {"train.steps": 7})
    assert (again.train.steps, again.train.epochs) == (7, None)
    assert apply_overrides(again, {"train.epochs": None}).train.steps == 7


# -- data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("epochs")
    write_hf_folder(folder / "rows", write_sharegpt(folder / "source", ROWS))
    return folder


def open_ranks(folder, processor, world_size, **settings):
    """A loader for each rank."""
    encoder = PackingVLMTaskEncoder if settings.get("packing") else HFEncoderVLMTaskEncoder
    data = DataConfig(
        dataset_type="hf",
        train_data_path=str(folder / "rows"),
        num_workers=0,
        lengths_cache=str(folder / "lengths"),
        **settings,
    )
    place = {"micro_batch_size": 1, "world_size": world_size, "seed": 3}
    return [
        HFProvider(data).train_loader(encoder(processor, DataConfig(seq_length=150)), rank=rank, **place)
        for rank in range(world_size)
    ]


def samples(loaders, steps: int, batch: int) -> Counter:
    """How often each sample came in so many steps."""
    batches = [next(loader) for _ in range(steps * batch // len(loaders)) for loader in loaders]
    assert sum(len(found["__key__"]) for found in batches) == steps * batch
    return Counter(key for found in batches for row in found["__key__"] for key in row)


@pytest.mark.parametrize("settings", [{}, {"packing": "global"}, {"group_by_length": True}])
@pytest.mark.parametrize("worlds", first_soon([[3, 2, 1], [1], [3], [3, 1], [1, 3]]))
def test_every_sample_comes_in_every_epoch_whatever_the_ranks(folder, processor, settings, worlds):
    """With several worlds the first ones stop in the middle. What came once more fills the last step."""
    batch, states, seen, done = 6, None, Counter(), 0
    for world_size in worlds:
        loaders = open_ranks(folder, processor, world_size, **settings)
        rows_in = loaders[0].rows_in
        steps = milestones(
            TrainConfig(None, 3, global_batch_size=batch), Epochs(rows_in), done, done * batch
        ).steps
        assert steps == -(-rows_in(3) // batch)
        for loader in loaders if states else ():
            loader.load_states(json.loads(json.dumps(states)))
        until = steps if world_size == worlds[-1] else done + steps // 3
        seen += samples(loaders, until - done, batch)
        done, states = until, [loader.state_dict() for loader in loaders]
    more = done * batch - rows_in(3)
    assert set(seen.values()) <= {3, 4} and len(seen) == ROWS and 0 <= more < batch
    if settings.get("packing") != "global":
        assert (rows_in(3), seen.total()) == (3 * ROWS, 3 * ROWS + more)
    else:
        assert rows_in(3) < 3 * ROWS


@pytest.mark.parametrize("num_workers", [0, 2])
def test_energon_counts_the_samples_that_its_workers_share(folder, processor, num_workers, tmp_path):
    source = folder / "source/data.jsonl"
    prepare({"train": source}, tmp_path / "shards", samples_per_shard=5)
    data = DataConfig(
        train_data_path=str(tmp_path / "shards"), num_workers=num_workers, shuffle_buffer_size=1
    )
    encoder = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=150))
    loaders = [
        EnergonProvider(data).train_loader(encoder, micro_batch_size=1, rank=rank, world_size=2, seed=1)
        for rank in range(2)
    ]
    assert [loader.rows_in(2) for loader in loaders] == [2 * ROWS] * 2
    seen = samples(loaders, 2 * ROWS // 10, 10) if num_workers == 0 else None
    assert seen is None or (len(seen), seen.total()) == (ROWS, 2 * ROWS)
    for loader in loaders:
        loader.close()


# -- whole runs


HELD_OUT = {f"{number:09d}" for number in range(ROWS) if is_held_out(f"{number:09d}", 0.2)}
TRAINED = ROWS - len(HELD_OUT)


def train_epochs(epochs: int, root: str, checkpoint: str) -> None:
    from megatron_vlm.training.loop import train

    settings = [f"epochs={epochs}", "tp=1", "micro_batch_size=1", "global_batch_size=6", "num_workers=0"]
    settings += ["data.dataset_type=hf", "data.validation_share=0.2", "train.eval_every=0"]
    settings += ["train.save_every=epoch", "train.keep_checkpoints=1", "train.keep_best=true"]
    settings += ["train.export_every=epoch"]
    settings += [f"optimizer.lr={1e-3 if epochs == 2 else 1.0}"]  # so high that no later loss is better
    paths = {"run_dir": f"{root}/run", "hf_path": checkpoint, "train_data_path": f"{root}/rows"}
    train(compose("gemma3_tiny_digits", settings=settings, arguments=paths))


@pytest.fixture(scope="module")
def run_dir(folder, tiny_gemma3) -> Path:
    """Three ranks trained two epochs and then a third; between them, the last export was lost."""
    run_distributed(3, train_epochs, 2, str(folder), str(tiny_gemma3))
    shutil.move(folder / f"run/exports/step_{steps_of(2):08d}", folder / "lost")
    run_distributed(3, train_epochs, 3, str(folder), str(tiny_gemma3))
    return folder / "run"


def steps_of(epochs: int) -> int:
    return -(-epochs * TRAINED // 6)


@pytest.mark.long
def test_a_run_of_three_ranks_ends_with_its_epochs_and_goes_on_for_another(run_dir):
    steps = range(1, steps_of(3) + 1)
    seen = [Counter(k for row in read_step(run_dir, step) for [k] in row["keys"]) for step in steps]
    for epochs in (2, 3):
        counts = sum(seen[: steps_of(epochs)], Counter())
        assert set(counts.values()) <= {epochs, epochs + 1} and len(counts) == TRAINED
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    assert [row["epoch"] for row in rows if "loss" in row] == pytest.approx([6 * s / TRAINED for s in steps])
    config = from_yaml((run_dir / "config.yaml").read_text())
    assert (config.train.steps, config.train.epochs) == (None, 3)


@pytest.mark.long
def test_a_run_writes_down_what_it_held_out_and_never_trains_it(run_dir):
    held = {json.loads(line)["key"] for line in (run_dir / "held_out.jsonl").read_text().splitlines()}
    steps = range(1, steps_of(3) + 1)
    trained = {key for step in steps for row in read_step(run_dir, step) for [key] in row["keys"]}
    assert held == HELD_OUT and not held & trained and held | trained == {f"{n:09d}" for n in range(ROWS)}


@pytest.mark.long
def test_the_best_checkpoint_is_kept_besides_the_last(run_dir):
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    losses = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
    assert list(losses) == [steps_of(1), steps_of(2), steps_of(3)]
    best = f"step_{min(losses, key=losses.get):08d}"
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    assert kept == sorted({best, f"step_{steps_of(3):08d}"}) and len(kept) == 2
    assert (run_dir / "checkpoints/best").read_text().strip() == best


@pytest.mark.long
def test_every_epoch_is_exported_and_a_lost_export_is_made_again(run_dir, tmp_path):
    exports = sorted(path.name for path in (run_dir / "exports").iterdir())
    assert exports == [f"step_{steps_of(epochs):08d}" for epochs in (1, 2, 3)]
    tensors = [load_file(run_dir / "exports" / name / "model.safetensors") for name in exports]
    lost = load_file(run_dir.parent / "lost/model.safetensors")
    assert lost.keys() == tensors[1].keys() and all(torch.equal(lost[k], v) for k, v in tensors[1].items())
    ended = run_program(COMMAND, "export", run_dir, tmp_path / "last")
    assert ended.returncode == 0, ended.stderr[-3000:]
    last = load_file(tmp_path / "last/model.safetensors")
    assert last.keys() == tensors[2].keys() and all(torch.equal(last[k], v) for k, v in tensors[2].items())
    assert any(not torch.equal(tensors[0][key], tensors[2][key]) for key in last)
