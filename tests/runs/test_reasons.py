"""What went wrong with something that a user gave is said of that, and not called a bug."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import GenerationConfig

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.generation_prompt import processor_outputs, stop_tokens
from megatron_vlm.data.load.workers import worker_death
from megatron_vlm.imports import load_object
from megatron_vlm.job.errors import explain
from megatron_vlm.messages import reading

TRACEBACK = Path("errors/rank0.txt")


class Reader:
    """Reads in each of the ways in which a mark can name what is read."""

    def __init__(self, path: Path):
        self.path = path

    @reading("path")
    def named(self, path: Path) -> None:
        np.load(path)

    @reading("self.path")
    def held(self) -> None:
        np.load(self.path)

    @reading("the numbers")
    def said(self, path: Path) -> None:
        np.load(path)

    @reading("self.path")
    def outer(self) -> None:
        self.said(self.path)


@pytest.mark.parametrize("way, named", [("named", None), ("held", None), ("said", "the numbers")])
def test_what_was_read_is_named(way, named, tmp_path):
    file = tmp_path / "numbers.npy"
    file.write_bytes(b"")
    arguments = [] if way == "held" else [file]
    code, said = explained(getattr(Reader(file), way), *arguments)
    assert code == 2 and said.startswith(
        f"{named or file} cannot be read: EOFError: No data left in file; in "
    )
    assert said.endswith("replace it; the traceback is in errors/rank0.txt.")


def test_the_innermost_reader_knows_best(tmp_path):
    (tmp_path / "numbers.npy").write_bytes(b"")
    assert explained(Reader(tmp_path / "numbers.npy").outer)[1].startswith("the numbers cannot be read: ")


def test_only_what_nobody_gave_is_a_bug():
    code, said = explained(int, "x")
    assert code == 1 and "This is a bug of megatron_vlm or of a library" in said


def bad_sample() -> None:
    raise BadSample("image_undecodable", "524 bytes of no known image format")


def test_a_bad_sample_is_the_users_and_our_text(monkeypatch):
    monkeypatch.setitem(bad_sample.__globals__, "__package__", "megatron_vlm.data")  # as our code raises it
    assert explained(bad_sample) == (2, "image_undecodable: 524 bytes of no known image format")


def test_an_error_in_a_file_of_the_user_is_no_bug(tmp_path):
    (tmp_path / "own.py").write_text("def fail():\n    raise KeyError('mine')\n")
    fail = load_object("train.callbacks", f"{tmp_path}/own.py:fail")
    with pytest.raises(KeyError) as caught:
        fail()
    code, text = explain(caught.value, tmp_path / "rank0.txt")
    assert code == 2
    assert text.startswith("KeyError: 'mine'; in fail (own.py:2)\nCorrect that file; the traceback is in ")


def test_an_error_of_a_file_system_is_no_bug(tmp_path):
    os.mkfifo(tmp_path / "zz.json")
    code, said = explained(shutil.copyfile, tmp_path / "zz.json", tmp_path / "copy")
    assert code == 2 and "SpecialFileError: `" in said and "named pipe" in said


def test_a_damaged_generation_config_is_named(tmp_path):
    GenerationConfig(eos_token_id=1).save_pretrained(tmp_path)
    assert stop_tokens(tmp_path, Config()) == [1]
    file = tmp_path / "generation_config.json"
    wrong = {
        "{": " is no JSON object",
        '{"eos_token_id": "</s>"}': ": eos_token_id is ['</s>'], expected",
    }
    for text, problem in wrong.items():
        file.write_text(text)
        code, said = explained(stop_tokens, tmp_path, Config())
        assert code == 2 and said.splitlines()[-1].startswith(f"{file}{problem}")
    file.write_text('{"eos_token_id": [1, 2], "cache_implementation": 3, "max_new_tokens": {}}')
    assert stop_tokens(tmp_path, Config()) == [1, 2]  # what is not read is not refused


def test_a_value_that_only_a_call_of_the_processor_reads_is_the_checkpoints(processor, monkeypatch):
    monkeypatch.setattr(processor.tokenizer, "model_max_length", [1])  # as tokenizer_config.json may say
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
    code, said = explained(processor_outputs, processor, messages, [])
    assert code == 2 and said.startswith(f"{processor.tokenizer.name_or_path} cannot be read: TypeError: ")


class Config:
    """As much of a model's config as is asked for."""

    eos_token_id = None

    def get_text_config(self):
        return self


def test_what_takes_all_memory_is_named():
    @reading("the numbers")
    def read() -> bytearray:
        return bytearray(1 << 60)

    code, said = explained(read)
    assert code == 2 and said.startswith("out of memory while reading the numbers: ; lower train.micro_batch")


def test_a_full_disk_has_no_checkpoint_where_there_is_no_run():
    assert explained(full)[1] == (
        "No space left on device: page.html; make room (`df -h`), then start the same command again: it goes "
        "on from what is saved."
    )


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "page.html")


def test_a_file_that_ends_too_early_aborts_nothing():
    program = (
        "import typer; from megatron_vlm.commands.program import PLAIN, Commands, run\n"
        "app = typer.Typer(cls=Commands, **PLAIN)\n"
        "@app.callback()\ndef all(): pass\n"
        "@app.command()\ndef read(): import numpy, io; numpy.load(io.BytesIO())\n"
        "run(app, 'read', ['read'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2
    assert done.stderr.startswith("read: a file cannot be read: OSError: EOFError: No data left in file; in ")
    Path(done.stderr.rpartition(" in ")[2].strip(".\n")).unlink()


def explained(function, *arguments) -> tuple[int, str]:
    """What is said of the error that this call raises."""
    with pytest.raises(Exception) as raised:
        function(*arguments)
    return explain(raised.value, TRACEBACK)


def dies_slowly() -> None:
    """As a process whose memory takes long to be freed: its pipes are closed, and it has not ended."""
    os.closerange(3, 1000)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_not_gone_yet_is_waited_for():
    worker = multiprocessing.get_context("fork").Process(target=dies_slowly)
    worker.start()
    said = worker_death([worker])
    assert f"worker (pid {worker.pid}) was ended by signal 9" in said
