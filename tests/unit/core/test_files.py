"""Whatever a path leads to: regular files are read and written, all else is refused at once and named."""

import ast
import os
import re
import socket
from pathlib import Path

import pytest

from megatron_vlm import files
from megatron_vlm.config import ConfigError
from megatron_vlm.files import NotAFile, read_file
from megatron_vlm.models.weights.exporting import copy_side_files


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


# ---- written ----------------------------------------------------------------------------------------------


def test_nothing_is_written_through_a_link_or_into_a_pipe(kinds, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "to_mine").symlink_to("mine.txt")
    (tmp_path / "to_nothing").symlink_to("nothing")
    for name in ("to_mine", "to_nothing"):
        for mode in ("wb", "ab", "r+b", "xb"):
            with pytest.raises(NotAFile, match=f"{name} is a link, not a file"):
                files.open_to_write(tmp_path / name, mode)
    with pytest.raises(NotAFile, match="a pipe or a device, not a file"):
        files.open_to_write(kinds("pipe"))
    files.atomic_write(tmp_path / "to_mine", "new")  # replaces the link
    assert (tmp_path / "mine.txt").read_text() == "mine" and (tmp_path / "to_mine").read_text() == "new"
    assert not (tmp_path / "nothing").exists()


def test_a_file_is_emptied_continued_or_written_over(tmp_path):
    for mode, content in [("wb", b"ab"), ("ab", b"abab"), ("r+b", b"cbab"), ("wb", b"d")]:
        with files.open_to_write(tmp_path / "file", mode) as file:
            file.write({b"cbab": b"c", b"d": b"d"}.get(content, b"ab"))
        assert (tmp_path / "file").read_bytes() == content
    with pytest.raises(FileExistsError):
        files.open_to_write(tmp_path / "file", "xb")


def test_what_fails_on_the_way_leaves_the_old_file_alone(tmp_path):
    def lines():
        yield b"first\n"
        raise ValueError("the source is bad")

    files.atomic_write(tmp_path / "file", "old")
    with pytest.raises(ValueError, match="the source is bad"):
        files.atomic_write(tmp_path / "file", lines())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("error", [OSError(28, "no"), RuntimeError("I/O error: full (os error 28)")])
def test_an_error_of_the_disk_has_the_path_the_free_bytes_and_the_remedy(tmp_path, error):
    """Of Python, and of a library in Rust."""
    with pytest.raises(OSError) as caught, files.atomic_directory(tmp_path / "new/out"):
        raise error
    said = r".*/new/out: No space left on device; \S+ [GM]B are free there; make room and start again\."
    assert re.fullmatch(said, str(caught.value))
    assert list(tmp_path.iterdir()) == [tmp_path / "new"] and not any((tmp_path / "new").iterdir())


def test_two_that_write_one_folder_leave_each_other_alone(tmp_path):
    """The first that ends has it; the other says so. Nobody else's folder is touched."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"out exists; give a new name or remove it\.$"):  # noqa: SIM117
        with files.atomic_directory(tmp_path / "out") as slow:
            (slow / "a").write_text("slow")
            with files.atomic_directory(tmp_path / "out") as fast:
                (fast / "a").write_text("fast")
    assert (tmp_path / "out/a").read_text() == "fast"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (tmp_path / "out.partial/thesis.txt").read_text() == "mine"


# ---- side files of a checkpoint ---------------------------------------------------------------------------


def as_folder(root):
    names = root / "ck"
    names.mkdir(parents=True)
    (names / "config.json").write_text("{}")
    (names / "notes.txt").write_text("notes")
    return names


def as_hub_cache(root):
    blobs, snapshot = root / "models--a--b/blobs", root / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for blob, name, content in (("b1", "config.json", "{}"), ("b2", "notes.txt", "notes")):
        (blobs / blob).write_text(content)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


@pytest.mark.parametrize("make", [as_folder, as_hub_cache])
def test_side_files_are_copied_and_links_out_of_a_checkpoint_are_refused(make, tmp_path):
    folder, (out, second) = make(tmp_path / "in"), [tmp_path / "out", tmp_path / "second"]
    out.mkdir()
    second.mkdir()
    copy_side_files(folder, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "config.json": "{}",
        "notes.txt": "notes",
    }
    assert not any(path.is_symlink() for path in out.iterdir())
    (tmp_path / "private").write_text("private")
    (folder / "more.txt").symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match=r"more.txt leads out of its folder, to .*/private; put a copy of"):
        copy_side_files(folder, second)
    assert "private" not in {path.read_text() for path in second.iterdir()}


# ---- the only way -----------------------------------------------------------------------------------------

PACKAGE = Path(files.__file__).parent
OPENING = {"open", "fdopen", "read_bytes", "read_text", "write_bytes", "write_text", "copy2", "copyfile"}
OPENING |= {"copyfileobj", "copytree", "rename", "replace", "shutil.move", "safe_open", "save_file"}
OPENING |= {
    f"{module}.{name}" for module in ("np", "json", "torch", "pickle") for name in ("load", "save", "dump")
}
OF_FILES = {"read_text"}  # so a function of `files` is called, too, without a dot
# what else opens: the call as it is written, and why it may
ALLOWED = {
    "path.open": "an object store's, which Energon opens",
    "Path(os.devnull).open": "in place of an output that the shell has closed",
    "Image.open": "bytes",
    "av.open": "bytes",
    "tarfile.open": "a file that `files` has opened",
    "lmdb.open": "a file that `files` has checked",
    "safe_open": "mapped; `weight_files` has checked it",
    "save_file": "into a folder aside",
    "archive.open": "a file that `files` has opened",
    "part.source.open": "a table",
    "source.open": "a table, which opens through `files`",
    "job.source.open": "a table",
    "StreamedRows.open": "a table",
    "os.rename": "the protocol of checkpoints, see `run_folder`",
    "os.replace": "the protocol of checkpoints",
    "folder.rename": "an export that is replaced",
    "(folder / file).rename": "within a folder aside",
    "(folder / next(iter(files))).rename": "within a folder aside",
}


def test_no_room_opens_files_but_through_files():
    met, wrong = set(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())) if path != PACKAGE / "files.py" else ():
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            if not {called, last} & OPENING or called in OF_FILES or is_no_file(called, node):
                continue
            met.add(called)
            wrong += [f"{path}:{node.lineno}: {called}"] if called not in ALLOWED else []
    assert wrong == []
    assert met == set(ALLOWED)


def is_no_file(called: str, node: ast.Call) -> bool:
    """`replace` of text and of dataclasses; a path's takes one argument."""
    of_paths = called == "os.replace" or (len(node.args) == 1 and not node.keywords)
    return called.endswith("replace") and not of_paths
