"""Every source, with every packing and with and without workers, goes through `train`, kills and resumes.

The run that was killed ends with the same rows of metrics.jsonl, the same batches and the same last line as
one that nobody disturbed.
"""

import shutil
from itertools import product
from pathlib import Path

import datasets
import pytest
import written_sources as written
from prepared_shards import prepare
from programs import COMMAND, run_program
from run_results import figures

from megatron_vlm.overrides import apply_overrides, to_yaml
from megatron_vlm.recipes import load_recipe

SETTINGS = {
    "train.steps": 8,
    "train.save_every": 2,
    "train.eval_every": 3,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 2,
    "optimizer.warmup_steps": 0,
    "parallel.tp": 1,
    "logging.tensorboard": False,
    "data.seq_length": 50,  # samples of two images are dropped
    "data.max_drop_share": 1.0,
    "data.packing_buffer_size": 8,
}
KILLED_AFTER = (3, 5)  # while it evaluates, and while it trains


def energon(folder):
    prepare(written.json_lines(folder)["train_data_path"], folder / "energon", splits={"train": 2, "val": 1})
    return {"train_data_path": folder / "energon"}


def energon_blend(folder):
    paths = [energon(folder / name)["train_data_path"] for name in "ab"]
    parts = "".join(f"      - {{path: {path}, weight: {n + 1}}}\n" for n, path in enumerate(paths))
    splits = "".join(f"  {split}:\n    blend:\n{parts}" for split in ("train", "val"))
    (folder / "blend.yaml").write_text(
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n{splits}"
    )
    return {"train_data_path": folder / "blend.yaml"}


def arrow(folder):
    settings = written.saved(folder)
    return settings | {"train_data_path": next(settings["train_data_path"].glob("*.arrow"))}


def several(folder):
    sources = [written.json_lines(folder / "a"), written.json_array(folder / "b")]
    return {"train_data_path": [str(source["train_data_path"]) for source in sources]}


SOURCES = [*written.SOURCES, arrow, several, energon, energon_blend]
PACKINGS = {
    "none": {},
    "stream": {"packing": "stream"},
    "global": {"packing": "global"},
    "by_length": {"group_by_length": True},
}
OFTEN = (written.json_lines, written.parquet, written.streamed_shards, several, energon, energon_blend)
WITHOUT_LENGTHS = (written.streamed, written.streamed_shards, energon, energon_blend)


def cells():
    for number, source in enumerate(SOURCES):
        packings = list(PACKINGS)[:2] if source in WITHOUT_LENGTHS else PACKINGS
        ways = list(product(packings, (2, 0)))
        for way in ways:
            name = f"{source.__name__}-{way[0]}-{way[1]}"
            if source in OFTEN and way == ways[number % len(ways)]:
                once = KILLED_AFTER[number % 2 :][:1]
                yield pytest.param(source, *way, once, marks=pytest.mark.long, id=name)
            yield pytest.param(source, *way, KILLED_AFTER, marks=pytest.mark.soak, id=f"{name} twice")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The settings of a source, written once."""
    known = {}

    def settings(source) -> dict:
        if source not in known:
            known[source] = source(tmp_path_factory.mktemp(source.__name__))
        return known[source]

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    return settings


def train(config: Path, run_dir: Path, killed_after: int | None = None) -> list[str]:
    """The lines of a run, or of one that is killed when it has logged this step."""
    metrics = run_dir / "metrics.jsonl"
    before = metrics.stat().st_ino if metrics.exists() else None  # a start writes it anew

    def is_logged() -> bool:
        begun = metrics.exists() and metrics.stat().st_ino != before
        saved = (run_dir / "checkpoints/latest").exists()  # it is written while training goes on
        return begun and saved and f'"step": {killed_after},' in metrics.read_text()

    words = ("train", "--config", config, "--run_dir", run_dir)
    done = run_program(COMMAND, *words, until=is_logged if killed_after else None)
    if killed_after and done.returncode == 0:  # on a busy machine, it had ended before the kill
        shutil.rmtree(run_dir)
        return train(config, run_dir, killed_after)
    assert done.returncode == (-9 if killed_after else 0), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("source, packing, workers, kills", list(cells()))
def test_a_killed_run_ends_as_if_nothing_had_happened(
    data, tiny_gemma3, tmp_path, source, packing, workers, kills
):
    settings = data(source)
    kind = {"hf_path": str(tiny_gemma3), "train_data_path": "x", "run_dir": "x"}
    kind["dataset_type"] = "energon" if source.__name__.startswith("energon") else "hf"
    more = settings | PACKINGS[packing] | {"num_workers": workers, "lengths_cache": str(tmp_path / "lengths")}
    if kind["dataset_type"] == "hf":
        more["valid_data_path"] = settings["train_data_path"]
    changes = {f"data.{name}": str(one) if isinstance(one, Path) else one for name, one in more.items()}
    changes["train.eval_steps"] = workers  # with workers, some rows are read that no evaluation takes
    config = apply_overrides(load_recipe("gemma3_tiny_digits")(**kind), SETTINGS | changes)
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    lines = train(tmp_path / "config.yaml", tmp_path / "whole")
    for step in kills:
        train(tmp_path / "config.yaml", tmp_path / "killed", step)
    again = train(tmp_path / "config.yaml", tmp_path / "killed")
    assert any(line.startswith("resumed after step ") for line in again)

    whole = figures(tmp_path / "whole")
    assert [row["step"] for row in whole if "loss" in row] == list(range(1, 9)) and "valid_loss" in whole[3]
    assert figures(tmp_path / "killed") == whole
    batches, killed = (tmp_path / name / "batches/rank0.jsonl" for name in ("whole", "killed"))
    assert batches.read_text() == killed.read_text()
    assert max(map(len, batches.read_text().splitlines())) < 600
    assert whole[-1].get("dropped_samples", 1) > 0
    assert again[-1].replace("/killed/", "/whole/") == lines[-1]
    assert lines[-1].startswith("dropped samples: {'") and "over_length" in lines[-1]
