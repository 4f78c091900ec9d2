"""The samples of a step are kept with the run, can be made again, and are named when the step fails."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import load_from_disk
from loaders import content
from logged_runs import begun_run
from pairs import first_soon
from prepared_shards import prepare
from sources import write_hf_folder, write_sharegpt
from typer.testing import CliRunner

from megatron_vlm.callbacks.samples import BatchLog, Samples, note_samples, read_step
from megatron_vlm.cli import app
from megatron_vlm.config import RunConfig
from megatron_vlm.data.run_data import RunData
from megatron_vlm.extras.preview.preview import replay_page, training_data
from megatron_vlm.models.families import describe
from megatron_vlm.overrides import apply_overrides, to_yaml
from megatron_vlm.recipes import load_recipe


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    source = write_sharegpt(folder / "source", 24)
    prepare(source, folder / "energon")
    rows = write_hf_folder(folder / "rows", source)
    (folder / "parquet").mkdir()
    for shard in range(3):
        load_from_disk(rows).shard(3, shard).to_parquet(folder / f"parquet/{shard}.parquet")
    return {"energon": folder / "energon", "hf": rows, "streamed": folder / "parquet"}


def config_of(kind, datasets, checkpoint, run_dir, **changes):
    run = load_recipe("gemma3_tiny_digits")(
        dataset_type="energon" if kind == "energon" else "hf",
        train_data_path=str(datasets[kind]),
        hf_path=str(checkpoint),
        run_dir=str(run_dir),
    )
    run.data.streaming, run.data.shuffle_buffer_size = kind == "streamed", 5
    small = {"train.micro_batch_size": 2, "data.num_workers": 2, "data.packing_buffer_size": 6}
    return apply_overrides(run, small | {"data.seq_length": 192} | changes)


def run_data(config, rank=0, world_size=1):
    from transformers import AutoConfig, AutoProcessor

    hf_config = AutoConfig.from_pretrained(config.model.hf_path)
    description, processor = describe(hf_config), AutoProcessor.from_pretrained(config.model.hf_path)
    return RunData(config, processor, description.data_needs, rank, world_size)


CASES = [("energon", "stream"), ("hf", "global"), ("streamed", "none"), ("energon", "none"), ("hf", "none")]
CASES += [("hf", "stream"), ("streamed", "stream")]


@pytest.mark.parametrize("kind, packing", first_soon(CASES, 3))
def test_a_step_is_made_again_from_what_the_run_folder_keeps(kind, packing, datasets, tiny_gemma3, tmp_path):
    """The second of two ranks with two workers each; made again by one process without workers."""
    config = config_of(kind, datasets, tiny_gemma3, tmp_path / "run", **{"data.packing": packing})
    data, log = run_data(config, 1, 2), BatchLog(tmp_path / "run", 1, 2, first_step=1)
    steps = {}
    for step in (1, 2, 3):
        steps[step] = [next(data.train_loader) for _ in range(2)]
        log.write(step, steps[step])
    data.close(), log.close()

    logged = read_step(tmp_path / "run", 3)
    changes = {"data.packing": "none" if packing == "none" else "stream"}
    with training_data(apply_overrides(config, changes)) as (again, _):
        made = [content(again.train_loader.replay(row["restore_key"])) for row in logged]
    assert made == [content(batch) for batch in steps[3]]
    shown = replay_page(config, 3, logged)
    keys = [key for row in logged for keys in row["keys"] for key in keys]
    assert len(keys) >= 4 and all(f"<header>{key}: " in shown for key in keys)
    images = sum(len(b["visual_inputs"].pixel_values) for b in steps[3] if b["visual_inputs"] is not None)
    assert shown.count("<img ") == images > 0


def batches(step):
    return [{"__key__": [[f"s{step}-{n}", "x"]], "__restore_key__": [step, n]} for n in range(2)]


def test_steps_that_are_run_again_replace_what_was_kept_of_them(tmp_path):
    """Two ranks wrote four steps; one goes on after the second."""
    for rank in range(2):
        log = BatchLog(tmp_path, rank, 2, first_step=1)
        for step in range(1, 5):
            log.write(step, batches(step))
        log.close()
    with open(tmp_path / "batches" / "rank0.jsonl", "a") as file:
        file.write('{"step": 5, "mic')  # killed there
    (tmp_path / "batches" / "rank0-copy.jsonl").write_text("somebody's own\n")
    log = BatchLog(tmp_path, 0, 1, first_step=3)
    log.write(3, batches(30))
    log.close()
    assert [row["rank"] for row in read_step(tmp_path, 2)] == [0, 0, 1, 1]
    assert [row["keys"] for row in read_step(tmp_path, 3)] == [[["s30-0", "x"]], [["s30-1", "x"]]]
    with pytest.raises(ValueError, match="no batch of step 4 .* it holds steps 1 to 3"):
        read_step(tmp_path, 4)


def test_the_command_prints_the_keys_and_writes_the_page(datasets, tiny_gemma3, tmp_path):
    config = config_of("hf", datasets, tiny_gemma3, tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(to_yaml(config))
    log = BatchLog(tmp_path / "run", 0, 1, first_step=1)
    row = {"__key__": [["000000003"], ["000000007"]], "__restore_key__": [[3], [7]]}
    log.write(1, [row])
    log.close()
    arguments = ["replay", str(tmp_path / "run"), "--step", "1", "--output", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, arguments)
    assert "rank 0 · micro batch 0 · row 1: 000000007" in result.output
    assert "number 3" in (tmp_path / "page.html").read_text()


def test_an_error_in_a_step_names_its_samples(tmp_path):
    error = torch.OutOfMemoryError("no memory")
    note_samples(error, tmp_path, 7, batches(7))
    (note,) = error.__notes__
    assert note.startswith("step 7, on this rank with samples s7-0, x, s7-1, x;")
    assert f"megatron-vlm replay {tmp_path} --step 7" in note
    assert json.dumps(note)


def test_a_step_that_failed_before_its_samples_were_kept_can_be_shown(tmp_path):
    """As when rewards fail, which come first; a step that was kept is not kept again."""
    samples, run = Samples(), begun_run(apply_overrides(RunConfig(), {"run_dir": str(tmp_path)}), 2)
    samples.log = BatchLog(tmp_path, 0, 1, first_step=1)
    for run.step in (1, 2):
        run.micro_batches = batches(run.step)
        if run.step == 2:
            samples.on_step_begin(run)
        samples.on_exception(run, ValueError("no reward"))
        assert [row["keys"] for row in read_step(tmp_path, run.step)] == [
            b["__key__"] for b in batches(run.step)
        ]
    samples.close()
    run.callbacks.close()
