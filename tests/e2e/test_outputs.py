"""No command writes over a file that the package did not write."""

from itertools import chain
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from programs import TYPED, ask

from megatron_vlm.cli import app
from megatron_vlm.config import ConfigError
from megatron_vlm.files import PAGE_START, write_output

# parameters that take a path: a new one has to be put into one of these
READ = {"file", "run_dir", "run_dirs", "folder", "image", "model", "tower", "language_model"}
READ |= {"source", "sources", "image_root", "chat_template"}
WRITTEN = {  # (command, parameter) -> words in which FILE is what the command is to write
    ("preview", "output"): "--recipe gemma3_tiny_digits --output FILE",
    ("replay", "output"): "run --output FILE",
    ("report", "output"): "run --output FILE",
    ("generate", "draw"): "run question --image FILE --draw FILE",
    ("evaluate", "output"): "run FILE --output FILE",
    ("prepare", "output"): "FILE FILE",
    ("compose", "output"): "--tower=siglip2 --language-model=llama FILE",
    ("export", "output"): "run FILE",
}
MINE = b'{"image": "a.png", "question": "what?", "answer": "megatron_vlm"}\n'


def test_every_parameter_that_is_a_path_is_read_or_written():
    paths = {
        (command.name or command.callback.__name__, name)
        for command in app.registered_commands
        for name, hint in get_type_hints(command.callback).items()
        if name == "output" or Path in (hint, *get_args(hint), *chain(*map(get_args, get_args(hint))))
    }
    assert {(command, name) for command, name in paths if name not in READ} == WRITTEN.keys()


@pytest.mark.parametrize("command, name", WRITTEN)
def test_no_command_writes_over_a_file_of_the_user(tmp_path, command, name):
    file = tmp_path / "mine.jsonl"
    file.write_bytes(MINE)
    words = [str(file) if word == "FILE" else word for word in WRITTEN[command, name].split()]
    answer = ask(*TYPED, command, *words)
    assert answer.returncode == 2 and file.read_bytes() == MINE
    if command in ("preview", "replay", "report", "generate"):
        assert f"{file} exists, and is no page or picture of megatron-vlm; give a new name" in answer.stderr


@pytest.mark.parametrize(
    "content",
    [MINE, b"", b"<!doctype html>\n<html>my own", PAGE_START[:-1], b"\x89PNG\r\n\x1a\n" + b"\0" * 100],
)
def test_a_file_that_does_not_begin_as_ours_is_kept(tmp_path, content):
    file = tmp_path / "page.html"
    file.write_bytes(content)
    link = tmp_path / "link.html"
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(ConfigError, match="page.html exists|link.html exists"):
            write_output(path, "new")
    assert file.read_bytes() == content and link.is_symlink()
