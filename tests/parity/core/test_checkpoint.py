"""Folders of checkpoints: complete or not there, pruned, and refused by name when they are damaged."""

import json
import os
import pickle
import shutil
from pathlib import Path

import launches
import pytest

from megatron_vlm.config import ConfigError, ParallelConfig
from megatron_vlm.run_folder import checksums, state_text
from tiny.distributed import run_distributed

# ---- folders, in one process ------------------------------------------------------------------------------


def _runs_in_folders(root: str) -> dict:
    """Everything below that needs a process of its own, in one."""
    import tiny_gpt

    from megatron_vlm.models.layers import kernel_checks
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint
    from megatron_vlm.training.optimizer import build_optimizer

    setup.init_distributed(ParallelConfig(), 1)
    config = launches.run_config("dp")
    chunks = tiny_gpt.build(config.parallel)
    run = (chunks, *build_optimizer(chunks, config))

    def listing(name: str) -> list[str]:
        return sorted(os.listdir(os.path.join(root, name, "checkpoints")))

    def error(name: str, run=run) -> str:
        with pytest.raises(ConfigError) as caught:
            checkpoint.load_latest(os.path.join(root, name), *run)
        return str(caught.value)

    def saved(name: str, *steps: int) -> str:
        for step in steps:
            checkpoint.save(os.path.join(root, name), step, *run, keep=2)
        return os.path.join(root, name, "checkpoints")

    def sign_again(folder: str) -> None:
        """As a stranger would, who changed the files: their checksums are right."""
        state = json.loads(Path(folder, "state.json").read_text())
        names = sorted(set(os.listdir(folder)) - {"state.json"})
        state = {key: state[key] for key in state if key != "checksum"} | {
            "files": checksums(Path(folder), names)
        }
        Path(folder, "state.json").write_text(state_text(state))

    out = {"none": checkpoint.load_latest(os.path.join(root, "empty"), *run) is None}

    kernel_checks.chosen["attention, heads of 16"] = "flash"
    saved("pruned", 1, 2, 3, 3)
    out["kernels"] = checkpoint.saved(os.path.join(root, "pruned")).kernels
    out["pruned"] = listing("pruned")
    state = Path(root, "pruned/checkpoints/step_00000003/state.json")
    before = state.stat().st_ino
    saved("pruned", 3)
    out["same"] = state.stat().st_ino == before

    os.makedirs(os.path.join(root, "half", "checkpoints", "step_00000007.tmp"))
    out["half_loaded"] = checkpoint.load_latest(os.path.join(root, "half"), *run) is not None
    saved("half", 8)
    out["half"] = listing("half")

    shutil.rmtree(os.path.join(saved("gone", 4), "step_00000004"))
    out["gone"] = error("gone")

    unsafe = os.path.join(saved("unsafe", 4), "step_00000004")
    with open(os.path.join(unsafe, ".metadata"), "wb") as file:
        pickle.dump(_Payload(os.path.join(root, "executed")), file)
    sign_again(unsafe)
    out["unsafe"] = error("unsafe")

    for damage in (pickle_of_else, cut_metadata):
        former = os.path.join(saved(damage.__name__, 2, 4), "step_00000004")
        assert checkpoint.load_latest(os.path.join(root, damage.__name__), *run).step == 4
        damage(former)
        sign_again(former)
        out[damage.__name__] = error(damage.__name__)

    others = tiny_gpt.build(config.parallel, moe=True)
    saved("dense", 4)
    out["other_model"] = error("dense", (others, *build_optimizer(others, config)))

    saved("rate", 4)
    config.optimizer.lr = 5e-3
    run = (chunks, *build_optimizer(chunks, config))
    checkpoint.load_latest(os.path.join(root, "rate"), *run)
    out["rate"] = sorted({group["max_lr"] for group in run[1].param_groups})
    return out


def pickle_of_else(folder: str) -> None:
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        pickle.dump({"a": 1}, file)


def cut_metadata(folder: str) -> None:
    os.truncate(os.path.join(folder, ".metadata"), 1000)


class _Payload:
    """Makes a folder when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return root, run_distributed(1, _runs_in_folders, str(root))[0]


def test_a_folder_without_checkpoints_loads_nothing(folders):
    assert folders[1]["none"]


def test_the_kernels_of_a_run_are_saved(folders):
    assert folders[1]["kernels"] == {"attention, heads of 16": "flash"}


def test_old_checkpoints_are_pruned(folders):
    assert folders[1]["pruned"] == ["latest", "step_00000002", "step_00000003"]


def test_a_latest_that_names_nothing_is_an_error_that_says_what_to_do(folders):
    assert "latest is missing or names no complete checkpoint" in folders[1]["gone"]


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        ("pickle_of_else", ".metadata is not the metadata of a checkpoint of ours (a dict)"),
        ("cut_metadata", ".metadata is not the metadata of a checkpoint of ours (pickle data was truncated)"),
    ],
)
def test_damage_under_right_checksums_is_named_too(folders, damage, fact):
    assert fact in folders[1][damage]
    assert "go on from another complete one: echo step_00000002 > " in folders[1][damage]


def test_a_checkpoint_of_other_parameters_is_refused(folders):
    assert "step_00000004 does not fit this model and configuration" in folders[1]["other_model"]


def test_a_pickle_that_runs_code_is_refused_before_it_runs(folders):
    root, out = folders
    assert "posix.mkdir" in out["unsafe"]
    assert not (root / "executed").exists()


def test_a_new_learning_rate_holds_after_resume(folders):
    assert folders[1]["rate"] == [5e-3]
