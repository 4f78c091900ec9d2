"""Whatever a path leads to: regular files are read, all else is refused at once and named."""

import os
import socket

import pytest
from programs import COMMAND, run_program
from sources import image_bytes, write_sharegpt

from megatron_vlm import files
from megatron_vlm.config import RunConfig
from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.media.files import read_media
from megatron_vlm.data.records.tables import open_table
from megatron_vlm.files import NotAFile, read_file
from megatron_vlm.overrides import apply_overrides, to_yaml


@pytest.fixture
def kinds(tmp_path):
    """By name of the kind, a path that ends as it is given: what a read might wait for without end."""

    def make(kind, ending=".jpg"):
        path = tmp_path / f"{kind}{ending}"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            os.mkfifo(tmp_path / "target")
            path.symlink_to("target")
        elif kind == "socket":
            here = os.getcwd()
            os.chdir(tmp_path)  # a socket's path is short
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
            os.chdir(here)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        return path

    return make


KINDS = ["pipe", "link", "socket", "device", "folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(kinds, kind):
    with pytest.raises(NotAFile, match=r"\.jpg is a .*, not a file"):
        read_file(kinds(kind))


def test_a_file_that_becomes_a_pipe_after_it_was_looked_at(kinds, monkeypatch):
    monkeypatch.setattr(files, "check_file", lambda path: None)
    with pytest.raises(NotAFile, match="a pipe, not a file"):
        read_file(kinds("pipe"))


def test_a_file_of_any_size_on_paper_is_not_read_into_memory(tmp_path):
    (tmp_path / "a.jpg").write_bytes(image_bytes(1))
    assert read_file(tmp_path / "a.jpg") == image_bytes(1)
    with (tmp_path / "sparse.mp4").open("wb") as sparse:
        sparse.truncate(1 << 42)
    with pytest.raises(ValueError, match="4398046511104 bytes, more than"):
        read_file(tmp_path / "sparse.mp4")
    with pytest.raises(BadSample, match="missing_media.*4398046511104 bytes"):
        read_media("sparse.mp4", tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "link", "socket", "folder"])
def test_a_medium_that_is_no_file_is_missing(kinds, kind, tmp_path):
    name = kinds(kind).name
    with pytest.raises(BadSample, match=f"missing_media: {name} under {tmp_path}.*not a file"):
        read_media(name, tmp_path)


@pytest.mark.parametrize("inside", [True, False])
def test_a_database_that_is_no_file_is_missing(kinds, inside, tmp_path):
    pytest.importorskip("lmdb")
    if inside:
        (tmp_path / "db.lmdb").mkdir()
        os.mkfifo(tmp_path / "db.lmdb/data.mdb")
    else:
        os.mkfifo(tmp_path / "db.lmdb")
    with pytest.raises(BadSample, match="missing_media.*a pipe, not a file"):
        read_media("db.lmdb::a", tmp_path)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".arrow", ""])
@pytest.mark.parametrize("kind", ["pipe", "link", "socket", "device"])
def test_a_dataset_that_is_no_file_is_refused(kinds, kind, ending):
    with pytest.raises(ValueError, match=r"is a .*, expected a file"):
        open_table(kinds(kind, ending))


def test_a_pipe_within_a_dataset_folder_is_refused(tmp_path):
    (tmp_path / "data/inner").mkdir(parents=True)
    os.mkfifo(tmp_path / "data/inner/part.parquet")
    with pytest.raises(ValueError, match=r"inner/part.parquet: is a pipe, expected a file"):
        open_table(tmp_path / "data")


def test_a_pipe_that_a_record_names_costs_that_record(tmp_path):
    """`prepare` of a whole source, which ends."""
    source = write_sharegpt(tmp_path / "source", 6)
    pipe = tmp_path / "source/images/1-0.jpg"
    pipe.unlink()
    os.mkfifo(pipe)
    ended = run_program(COMMAND, "prepare", source, tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    assert "1 records skipped\n    missing_media: 1" in ended.stdout and "data.media_dir" in ended.stdout


def test_commands_that_take_an_image_refuse_a_pipe(kinds, tmp_path):
    from megatron_vlm import cli

    pipe = kinds("pipe")
    with pytest.raises(NotAFile):
        cli.verify(str(tmp_path), "source", pipe, "What?", 0.0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = {"run_dir": str(run_dir), "model.hf_path": "somewhere"}
    (run_dir / "config.yaml").write_text(to_yaml(apply_overrides(RunConfig(), settings)))
    (run_dir / "checkpoints/step_00000001").mkdir(parents=True)
    (run_dir / "checkpoints/step_00000001/state.json").touch()
    (run_dir / "checkpoints/latest").write_text("step_00000001")
    with pytest.raises(NotAFile):
        cli.generate(run_dir, "What?", [pipe], 1)
