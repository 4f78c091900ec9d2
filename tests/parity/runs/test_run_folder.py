"""A run folder without torch: the checkpoint to go on from, who may start, what a kill left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_vlm import run_folder
from megatron_vlm.config import ConfigError
from megatron_vlm.files import NotAFile, temporary_name
from megatron_vlm.job import watchdog
from megatron_vlm.run_folder import (
    checksum_problems,
    checksums,
    read_state,
    size_problems,
)
from megatron_vlm.training.checkpoint import check_config

MODEL = "models/tiny"


def save(run_dir: Path, step: int, keep: int = 10, content: bytes = b"", **best: float | None) -> Path:
    """A checkpoint as `training.checkpoint.save` makes it, of one small file of tensors."""
    partial = run_folder.begin(run_dir, step)
    (partial / "__0_0.distcp").write_bytes(content or b"tensors of %d" % step)
    (partial / ".metadata").write_bytes(b"names")
    (partial / "metadata.json").write_text("{}")
    state = {"step": step, "layout": {"world": 1}, "schedule": {"lr": 0.1}}
    callbacks = {"Best": {"by": "valid_loss", "last_step": step, "last": best["rated"]}} if best else {}
    state["extra"] = {"callbacks": callbacks}
    state["ranks"] = [{"dp_rank": 0, "rng": {}, "loader": None}]
    state["files"] = checksums(partial, ["__0_0.distcp", ".metadata", "metadata.json"])
    final = run_folder.complete(partial, state)
    run_folder.prune(run_dir, final.name, keep, keep_best=bool(best))
    return final


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """Complete checkpoints of steps 2, 4 and 6, in a path that a shell has to be told to leave alone."""
    folder = tmp_path / "my run"
    for step in (2, 4, 6):
        save(folder, step)
    return folder


def refusal(run_dir: Path, hf_path: str = MODEL) -> str:
    """What a start says; nothing may be changed by it."""
    before = snapshot(run_dir)
    with pytest.raises(ConfigError) as caught:
        run_folder.check_start(run_dir, hf_path)
    assert snapshot(run_dir) == before
    return str(caught.value)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# ---- which checkpoint -------------------------------------------------------------------------------------


def test_latest_names_the_checkpoint_to_go_on_from(run_dir, tmp_path):
    assert run_folder.latest_checkpoint(run_dir).name == "step_00000006"
    (run_dir / "checkpoints/latest").write_text("step_00000002\n")
    assert run_folder.latest_checkpoint(run_dir).name == "step_00000002"
    assert run_folder.latest_checkpoint(tmp_path / "new") is None


def make_folder(latest: Path) -> None:
    latest.unlink()
    latest.mkdir()


BROKEN_LATEST = {
    "deleted": Path.unlink,
    "whitespace": lambda latest: latest.write_text(" \n\t\n"),
    "a folder": make_folder,
    "outside": lambda latest: latest.write_text("../../other/checkpoints/step_00000006"),
}
NO_LATEST = "latest is missing or names no complete checkpoint"


@pytest.mark.parametrize("kind", BROKEN_LATEST)
def test_complete_checkpoints_without_a_valid_latest_are_refused_with_the_command_that_mends_it(
    run_dir, kind
):
    BROKEN_LATEST[kind](run_dir / "checkpoints/latest")
    message = refusal(run_dir)
    assert NO_LATEST in message and "step_00000002, step_00000004, step_00000006" in message
    assert len(message.splitlines()) == 1
    subprocess.run(message.rpartition("go on from one: ")[2], shell=True, check=True)
    assert run_folder.latest_checkpoint(run_dir).name == "step_00000006"
    run_folder.check_start(run_dir, MODEL)


def test_a_step_that_is_a_link_is_no_checkpoint(run_dir, tmp_path):
    elsewhere = save(tmp_path / "other", 8)
    (run_dir / "checkpoints/step_00000008").symlink_to(elsewhere)
    assert run_folder.latest_checkpoint(run_dir).name == "step_00000006"
    (run_dir / "checkpoints/latest").write_text("step_00000008\n")
    assert NO_LATEST in refusal(run_dir)
    (run_dir / "checkpoints/latest").write_text("step_00000006\n")
    save(run_dir, 8)
    assert (elsewhere / "__0_0.distcp").exists()  # the link went, not what it led to
    assert not (run_dir / "checkpoints/step_00000008").is_symlink()


# ---- whose folder -----------------------------------------------------------------------------------------


def test_the_run_of_another_model_is_refused(run_dir):
    (run_dir / "config.yaml").write_text("model:\n  hf_path: models/other\n")
    message = refusal(run_dir)
    assert "holds a run of models/other, and model.hf_path is models/tiny" in message
    run_folder.check_start(run_dir, "models/other")
    run_folder.check_start(run_dir, os.path.abspath("models/other"))


# ---- damage -----------------------------------------------------------------------------------------------


def problems(path: Path) -> list[str]:
    try:
        files = read_state(path)["files"]
    except ValueError as error:
        return [str(error)]
    return size_problems(path, files) or checksum_problems(path, files)


def flip(name: str):
    def change(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(content)

    return change


DAMAGE = {
    "a file truncated": (
        lambda path: os.truncate(path / "__0_0.distcp", 3),
        "__0_0.distcp has 3 bytes and had 12",
    ),
    "a bit of the names": (flip(".metadata"), ".metadata is not what was saved: its checksum differs"),
    "state.json truncated": (
        lambda path: os.truncate(path / "state.json", 40),
        "state.json is not what was saved:",
    ),
    "another step": (
        lambda path: shutil.copy(path.parent / "step_00000004/state.json", path),
        "state.json is not what was saved: it is of step 4",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_with_its_file_and_the_one_before(run_dir, kind):
    path = run_folder.latest_checkpoint(run_dir)
    assert problems(path) == []
    damage, fact = DAMAGE[kind]
    damage(path)
    message = run_folder.damaged(path, problems(path))
    assert fact in message and str(path) in message and len(message.splitlines()) == 1
    subprocess.run(message.rpartition("complete one: ")[2], shell=True, check=True)
    assert run_folder.latest_checkpoint(run_dir).name == "step_00000004"


def test_another_config_than_the_checkpoint_had_is_named_key_by_key():
    def check(now: dict) -> None:
        check_config(Path("step_00000006"), saved, now)

    saved = {"transformers_version": "5.1", "text_config.eps": 1e-6, "text_config.window": None}
    check(saved | {"text_config.read_now": 4})
    other = saved | {"text_config.eps": 1e-5, "text_config.window": 8}
    with pytest.raises(ConfigError) as caught:
        check(other)
    changed = "text_config.eps was 1e-06 and is 1e-05; text_config.window was None and is 8."
    assert changed in str(caught.value)
    check(other | {"transformers_version": "5.2"})  # which may fill in other defaults


# ---- one run at a time ------------------------------------------------------------------------------------

HOLDER = """
import multiprocessing, os, sys, time
from megatron_vlm import run_folder
held = run_folder.take_lock(sys.argv[1])
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
worker.start()  # as a DataLoader worker: forked, with every descriptor of its parent
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock, and the process id of the worker that it forked."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    worker = int(process.stdout.readline())
    yield process, worker
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_second_run_is_refused_while_the_first_lives_and_not_after_it_was_killed(tmp_path, holder):
    process, worker = holder
    began = time.monotonic()
    message = refusal(tmp_path)
    assert time.monotonic() - began < 4  # to take the lock, a start would wait for 5 s
    assert f"rank 0 is process {process.pid} on {os.uname().nodename}" in message and "kill" in message
    with pytest.raises(ConfigError, match="belongs to a run that lives"):
        run_folder.take_lock(tmp_path, patience=0)
    process.kill()
    process.wait()
    os.kill(worker, 0)  # the worker lives and has the descriptor
    run_folder.take_lock(tmp_path, patience=0).close()


def test_a_run_lives_as_long_as_one_of_its_ranks(tmp_path):
    """Rank 0 goes, rank 1 (which may still write) is there."""
    first, second = (run_lock_process(tmp_path, rank) for rank in (0, 1))
    first.kill()
    first.wait()
    message = refusal(tmp_path)
    assert f"process {second.pid} holds its lock" in message
    second.kill()
    second.wait()
    run_folder.check_start(tmp_path, MODEL)


def run_lock_process(run_dir: Path, rank: int) -> subprocess.Popen:
    call = "take_lock(sys.argv[1])" if rank == 0 else "join_lock(sys.argv[1])"
    code = (
        f"import sys, time; from megatron_vlm import run_folder; held = run_folder.{call}; "
        "print(1, flush=True); "
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(60)", str(run_dir)], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    return process


# ---- leftovers --------------------------------------------------------------------------------------------


def test_leftovers_of_a_kill_are_removed_and_never_taken_for_a_checkpoint(run_dir):
    folder = run_dir / "checkpoints"
    (folder / "step_00000008.tmp").mkdir()
    (folder / "step_00000008.tmp/state.json").write_text("{}")
    os.rename(folder / "step_00000002", temporary_name(folder / "step_00000002"))
    (folder / "latest.tmp").write_text("step_0000")
    (folder / "step_00000009.tmp.mine").mkdir()
    assert run_folder.complete_checkpoints(run_dir) == ["step_00000004", "step_00000006"]
    run_folder.tidy(run_dir)
    assert sorted(os.listdir(folder)) == [
        "latest",
        "step_00000004",
        "step_00000006",
        "step_00000009.tmp.mine",
    ]


def test_a_first_checkpoint_whose_save_was_killed_before_latest_is_gone_on_from(tmp_path):
    save(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    os.rename(folder / "latest", folder / "latest.tmp")
    run_folder.check_start(tmp_path, MODEL)
    assert run_folder.latest_checkpoint(tmp_path).name == "step_00000002"
    run_folder.tidy(tmp_path)
    assert sorted(os.listdir(folder)) == ["latest", "step_00000002"]


# ---- a run folder is a run folder, and nothing outside of it is written ------------------------------------

WRITTEN = ["lock", "config.yaml", "metrics.jsonl", "errors/rank0.txt"]
WRITTEN += ["drops/rank0.jsonl", "batches/rank0.jsonl", "profile/step_1.txt"]
FOLDERS = ["checkpoints", "errors", "drops", "batches", "tensorboard", "exports", "profile"]


@pytest.mark.parametrize("name", WRITTEN + FOLDERS)
def test_a_link_in_a_run_folder_is_refused_by_name(run_dir, tmp_path, name):
    """By a start, and by what reads a run and writes `errors` there, as an export."""
    theirs = tmp_path / "theirs"
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    if name in FOLDERS:
        shutil.rmtree(run_dir / name, ignore_errors=True)
        theirs.mkdir()
    else:
        theirs.write_text("theirs")
    (run_dir / name).symlink_to(theirs)
    for refuse in (run_folder.check_folder, run_folder.refuse_links):
        with pytest.raises(NotAFile, match=rf"{name} is a link, not a file"):
            refuse(run_dir)
    assert (os.listdir(theirs) if name in FOLDERS else theirs.read_text()) in ([], "theirs")


@pytest.mark.parametrize(
    "files, what",
    [
        (["config.json", "model.safetensors"], r"a checkpoint \(config.json\)"),
        ([".nv-meta/.info.json", "train-00000.tar"], r"a dataset \(.nv-meta\)"),
        (["rows.jsonl"], "other things, such as rows.jsonl"),
        (["a/config.yaml", "b/config.yaml"], "other things, such as a"),  # the folder of runs
        (["config.yaml", "checkpoints/model.pt"], "other things, such as checkpoints/model.pt"),
        (["errors/rank0.txt", "lock"], "other things, such as lock"),  # another program's lock
        # of another program: a run writes config.yaml before these
        (["metrics.jsonl"], "other things, such as metrics.jsonl"),
    ],
)
def test_a_folder_of_other_things_is_no_run_folder(tmp_path, files, what):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert re.search(f"holds {what} and no run; give a folder that is new or empty", refusal(tmp_path))


def test_a_run_that_failed_at_its_start_may_begin_again_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_watch", None)
    with pytest.raises(RuntimeError), watchdog.watching(tmp_path / "errors", 60):
        watchdog.watch().file.write("Traceback")
        raise RuntimeError
    watchdog.watch().finish()
    assert os.listdir(tmp_path) == ["errors"]
    run_folder.check_start(tmp_path, MODEL)
