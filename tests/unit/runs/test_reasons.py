"""What went wrong with something that a user gave is said of that, and not called a bug."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_vlm.data.accounts.drops import BadSample, DropReport, TooManyDrops
from megatron_vlm.data.load.base import loader_of, next_or_too_many_drops
from megatron_vlm.data.load.workers import close_loader, raise_naming_samples
from megatron_vlm.imports import load_object
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.job.errors import explain
from megatron_vlm.stores import StoreError

TRACEBACK = Path("errors/rank0.txt")


class Reader:
    """Reads in each of the ways in which a mark can name what is read."""

    def __init__(self, path: Path):
        self.path = path

    @attribute_errors_to("path")
    def named(self, path: Path) -> None:
        np.load(path)

    @attribute_errors_to("self.path")
    def held(self) -> None:
        np.load(self.path)

    @attribute_errors_to("the numbers")
    def said(self, path: Path) -> None:
        np.load(path)

    @attribute_errors_to("self.path")
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


def test_what_takes_all_memory_is_named():
    @attribute_errors_to("the numbers")
    def read() -> bytearray:
        return bytearray(1 << 60)

    code, said = explained(read)
    assert code == 2 and said.startswith("out of memory while reading the numbers: ; lower train.micro_batch")


def explained(function, *arguments) -> tuple[int, str]:
    """What is said of the error that this call raises."""
    with pytest.raises(Exception) as raised:
        function(*arguments)
    return explain(raised.value, TRACEBACK)


class BuggyDataset(torch.utils.data.Dataset):
    """A dataset of one sample that ends the run."""

    def __init__(self, error: Exception):
        self.error = error

    def __getitem__(self, index):
        try:
            raise self.error
        except (ArithmeticError, OSError) as error:
            raise_naming_samples(error, ["a-7"])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error, code", [(ZeroDivisionError("1 / 0"), 1), (StoreError("s3://b is away"), 2)])
def test_a_bug_in_a_data_worker_is_a_bug(num_workers, error, code):
    loader = loader_of(BuggyDataset(error), [0], num_workers)
    with pytest.raises(Exception) as caught:
        next(iter(loader))
    close_loader(loader)
    number, text = explain(caught.value, TRACEBACK)
    assert number == code
    assert str(error) in text and "data: sample a-7" in text


class DroppingDataset(torch.utils.data.Dataset):
    """A dataset of which everything is dropped; once that ends the run, other workers encode many samples."""

    def __init__(self, drops: DropReport):
        self.drops = drops

    def __getitem__(self, index):
        try:
            self.drops.drop("a\n7", "bad_json", "no JSON")
        except TooManyDrops:
            for _ in range(100):
                self.drops.keep()
            raise


def read_two(num_workers: int) -> None:
    drops = DropReport().with_max_share(0.5)
    drops.epoch = 2
    loader = loader_of(DroppingDataset(drops), [0, 1], num_workers)
    batches = iter(loader)
    try:
        for _ in range(2):
            next_or_too_many_drops(batches, drops, loader)
    finally:
        close_loader(loader)


def test_too_many_drops_read_alike_with_and_without_data_workers():
    text = explained(read_two, 0)
    assert explained(read_two, 1) == text
    assert len(text[1].splitlines()) == 2
