"""Another number of ranks goes on where some stopped: every sample of the epoch once, or a refusal."""

import json
from collections import Counter

import numpy as np
import pytest
from loaders import encoder_of, open_loader
from pairs import pairwise
from prepared_shards import prepare
from programs import COMMAND, run_program
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.callbacks.samples import read_step
from megatron_vlm.data.encode.packing import pack_buffer
from megatron_vlm.data.load.sampler import BalancedSampler, PackingSampler, ShuffledSampler

COUNT, EPOCHS = 61, 40
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(10, 100, COUNT * EPOCHS)
TOKENS[RNG.random(len(TOKENS)) < 0.1] = -1  # dropped


def rows_of(epoch):
    """An index tells the epoch that it is of."""
    return np.arange(COUNT) + COUNT * epoch


def measure(order):
    for place, [index] in order:
        yield place, index, None if TOKENS[index] < 0 else (int(TOKENS[index]), 0)


def select_rows(tokens, patches):
    return pack_buffer(tokens, 200, patches, None)


def single(rank, world_size):
    return ShuffledSampler(rows_of, rank, world_size, seed=1)


def buffered(rank, world_size):
    return PackingSampler(single(rank, world_size), 16, measure, select_rows)


def balanced(rank, world_size, capacity=200):
    patches = np.zeros_like(TOKENS)
    return BalancedSampler(rows_of, TOKENS, patches, rank, world_size, 2, seed=1, capacity=capacity)


def grouped(rank, world_size):
    return balanced(rank, world_size, capacity=None)


@pytest.mark.parametrize("make", [single, buffered, balanced, grouped])
@pytest.mark.parametrize("trial", range(8))
def test_whatever_the_ranks_each_epoch_has_each_row_once(make, trial):
    """Of three worlds two stop, each rank at a place of its own; the last reads two more epochs."""
    rng = np.random.default_rng(trial)
    places, moves, seen = [(0, 0, 0)], (), Counter()
    for world, world_size in enumerate(rng.integers(1, 6, 3).tolist()):
        taken, until = int(rng.integers(0, 70)), max(place[0] for place in places) + 2
        reached = []
        for rank in range(world_size):
            order = make(rank, world_size)
            if world > 0:
                order.reshards = moves
                order.reshard(places)
            rows, count = iter(order), taken + int(rng.integers(0, 6))
            place = order.position
            while place[0] < until if world == 2 else count > 0:
                place, indices = next(rows)
                seen.update(index for index in indices if TOKENS[index] >= 0)
                count -= 1
            reached.append(place)
        places, moves = json.loads(json.dumps([reached, order.reshards]))
    whole = [index for index in range(COUNT * min(place[0] for place in places)) if TOKENS[index] >= 0]
    assert len(whole) > COUNT and set(seen.values()) == {1}
    assert seen.keys() >= set(whole)


def test_an_epoch_is_found_soon_after_many_changes_of_ranks():
    """In each of 12 epochs, and in those after it, another number of ranks stops."""
    asked = Counter()
    reshards = ()
    for epoch in range(12):
        world_size = 2 + epoch % 2
        sampler = single(0, world_size)
        sampler.reshards = reshards
        sampler.reshard([(epoch + rank, 3 + rank) for rank in range(world_size)])
        reshards = sampler.reshards
    counting = ShuffledSampler(
        lambda epoch: asked.update([epoch]) or rows_of(epoch), 0, 1, 1, (12, 0), reshards
    )
    next(iter(counting))
    assert asked.total() < 12**3


# -- with data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moves")
    source = write_sharegpt(folder / "source", 48)
    prepare(source, folder / "energon")
    write_hf_folder(folder / "rows", source)
    return folder


SETTINGS = [
    {},
    {"packing": "stream", "packing_buffer_size": 10},
    {"packing": "global"},
    {"group_by_length": True},
]


def opened(folder, processor, rank, world_size, num_workers=0, **settings):
    """A loader with its encoder. Of 50 tokens, samples with two images are too long."""
    encoder = encoder_of(processor, 50, settings.get("packing", "none"))
    settings |= {"max_drop_share": 1.0, "lengths_cache": str(folder / "lengths"), "num_workers": num_workers}
    place = {"rank": rank, "world_size": world_size}
    return open_loader("hf", folder / "rows", encoder, seed=3, **place, **settings), encoder


@pytest.mark.parametrize("settings, moved", pairwise(SETTINGS, [((3, 1), 0), ((1, 3), 2), ((2, 4, 3), 0)]))
def test_changed_ranks_train_or_drop_each_sample_of_the_epoch_once(folder, processor, settings, moved):
    worlds, num_workers = moved
    trained, dropped, states, of_next_epoch = Counter(), set(), None, 0
    for world_size in worlds:
        last, before = world_size == worlds[-1], states
        states = []
        for rank in range(world_size):
            loader, encoder = opened(folder, processor, rank, world_size, num_workers, **settings)
            if before:
                loader.load_states(json.loads(json.dumps(before)))
            keys = []
            while last or len(keys) < 3:
                epoch, position, *_ = loader.state_dict()["place"]
                if epoch > 0:
                    of_next_epoch += position  # in its last buffer, or a single one
                    break
                keys.append(next(loader)["__key__"])
            trained.update(key for [row] in keys for key in row)
            dropped |= {example["key"] for example in encoder.drops.examples()}
            states.append(loader.state_dict())
            loader.close()
    assert trained.total() - len(trained) <= of_next_epoch < 30 and len(dropped) > 3
    assert sorted([*trained, *dropped]) == [f"{n:09d}" for n in range(48)]


def test_a_moved_run_resumes_exactly(folder, processor):
    """Amid a buffer of its own, and of what the ranks before had left."""
    stopped = []
    for rank in range(3):
        loader, _ = opened(folder, processor, rank, 3, **SETTINGS[1])
        stopped.append([next(loader), loader.state_dict()][1])
    moved, _ = opened(folder, processor, 0, 2, **SETTINGS[1])
    moved.load_states(stopped)
    next(moved)
    state = json.loads(json.dumps(moved.state_dict()))
    expected = [next(moved)["__key__"] for _ in range(20)]
    resumed, _ = opened(folder, processor, 0, 2, **SETTINGS[1])
    resumed.load_states([state, None])
    assert [next(resumed)["__key__"] for _ in range(20)] == expected


def train(run_dir, checkpoint, folder, ranks, steps, *settings):
    command = ["train", "--recipe", "gemma3_tiny_digits", *(["--nproc", ranks] if ranks > 1 else [])]
    command += ["--run_dir", run_dir, "--hf_path", checkpoint, "tp=1"]
    command += ["--dataset_type", "hf", "--train_data_path", str(folder / "rows"), f"steps={steps}"]
    command += ["micro_batch_size=2", "global_batch_size=8", "num_workers=1", "eval_every=0", *settings]
    ended = run_program(COMMAND, *command)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.long
def test_a_run_goes_on_with_fewer_ranks_through_the_rest_of_its_epoch(folder, tiny_gemma3, tmp_path):
    """Two steps of two ranks and four of one; then one of data begun anew, as is asked for."""
    train(tmp_path, tiny_gemma3, folder, 2, 2)
    train(tmp_path, tiny_gemma3, folder, 1, 6)
    train(tmp_path, tiny_gemma3, folder, 1, 7, "data.restart=true")
    steps = [read_step(tmp_path, step) for step in range(1, 8)]
    assert [{row["rank"] for row in rows} for rows in steps] == [{0, 1}] * 2 + [{0}] * 5
    keys = [sorted(key for row in rows for [key] in row["keys"]) for rows in steps]
    assert sorted(sum(keys[:6], [])) == [f"{n:09d}" for n in range(48)]
    assert keys[6] == keys[0]
