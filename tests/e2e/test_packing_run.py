"""Packing as a setting of a run: what is refused, and that a packed run trains and resumes."""

import json
import shutil

import pytest
from prepared_shards import prepare
from programs import COMMAND, ROOT, run_program
from sources import write_hf_folder, write_sharegpt
from transformers import AutoProcessor

from megatron_vlm.batch import DataNeeds
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.run_data import train_encoder
from megatron_vlm.recipes import compose


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The same records as an Energon dataset and as a `datasets` folder."""
    folder = tmp_path_factory.mktemp("data")
    source = write_sharegpt(folder / "source", 40)
    prepare(source, folder / "energon")
    return {"energon": folder / "energon", "hf": write_hf_folder(folder / "hf", source)}


def train(run_dir, checkpoint, paths, source, *settings):
    """Through the command line; the loss and the trained tokens of each step."""
    command = ["train", "--recipe", "gemma3_tiny_digits"]
    command += ["--run_dir", str(run_dir), "--hf_path", str(checkpoint), "--dataset_type", source]
    command += [
        "--train_data_path",
        str(paths[source]),
        "micro_batch_size=1",
        "global_batch_size=2",
        "tp=1",
        "steps=4",
    ]
    command += [
        "num_workers=1",
        "warmup_steps=0",
        "eval_every=0",
        "save_every=2",
        "data.packing_buffer_size=16",
    ]
    command += [f"data.lengths_cache={run_dir.parent / 'lengths'}", *settings]
    done = run_program(COMMAND, *command)
    (run_dir / "log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (run_dir / "log").read_text()[-4000:]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["trained_tokens"]) for row in rows if "loss" in row}


@pytest.mark.parametrize(
    "source, packing", [("hf", "global"), pytest.param("energon", "stream", marks=pytest.mark.long)]
)
def test_a_packed_run_resumes_as_if_it_had_not_stopped(tmp_path, tiny_gemma3, paths, source, packing):
    """It is made to go on from the checkpoint before its last."""
    run = (tiny_gemma3, paths, source, f"data.packing={packing}")
    whole = train(tmp_path / "whole", *run)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    (tmp_path / "resumed/checkpoints/latest").write_text("step_00000002")
    resumed = train(tmp_path / "resumed", *run)
    assert "resumed after step 2" in (tmp_path / "resumed/log").read_text()
    assert sorted(whole) == [1, 2, 3, 4] and len(set(whole.values())) == 4
    assert resumed == whole


def test_lengths_measured_by_the_tool_are_those_that_a_run_looks_for(tmp_path, tiny_gemma3, paths):
    settings = [
        f"hf_path={tiny_gemma3}",
        f"train_data_path={paths['hf']}",
        "dataset_type=hf",
        "data.packing=global",
        f"data.lengths_cache={tmp_path}",
    ]
    done = run_program(ROOT / "tools/precompute_tokens.py", "--recipe", "gemma3_tiny_digits", *settings)
    assert "40 of 40 samples fit; 0 will be dropped" in done.stdout, done.stderr
    (measured,) = tmp_path.rglob("*.lengths")
    written = measured.stat().st_mtime_ns
    data = compose("gemma3_tiny_digits", settings=settings).data
    encoder = train_encoder(data, AutoProcessor.from_pretrained(tiny_gemma3), DataNeeds())
    HFProvider(data).train_loader(encoder, micro_batch_size=1, rank=0, world_size=1, seed=0)
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("*.lengths")] == [written]
