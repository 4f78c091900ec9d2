import hashlib
import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "digits"))

from make_digits import make_digits  # noqa: E402

SMALL = {"held_out_images": 297, "variants": 1, "train_pairs": 200, "held_out_pairs": 20}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    counts = make_digits(folder, **SMALL)
    return folder, counts


def records(folder: Path, side: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{side}.jsonl").read_text().splitlines()]


def scan_of(image: str) -> int:
    return int(Path(image).stem.split("v")[0])


def joined(numbers: list[int]) -> str:
    return "".join(map(str, numbers))


def test_counts_are_those_asked_for(digits):
    folder, counts = digits
    assert counts == {"train": 1500 * 2 + 200, "held_out": 297 + 20}
    assert {side: len(records(folder, side)) for side in counts} == counts


def test_no_held_out_scan_appears_in_training(digits):
    """Not under its own name, as a variant, or stored twice under two names."""
    folder, _ = digits
    files = {side: {i for r in records(folder, side) for i in r["images"]} for side in ("train", "held_out")}
    scans = {side: set(map(scan_of, names)) for side, names in files.items()}
    content = {
        side: {hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
        for side, names in files.items()
    }
    assert {side: len(found) for side, found in scans.items()} == {"train": 1500, "held_out": 297}
    assert {side: len(found) for side, found in content.items()} == {"train": 3000, "held_out": 297}
    assert not scans["held_out"] & scans["train"]
    assert not content["held_out"] & content["train"]


def test_answers_are_the_digit_both_digits_or_the_sum(digits):
    folder, _ = digits
    target = load_digits().target
    right = {
        "digit": lambda ab: str(ab[0]),
        "read": lambda ab: f"{ab[0]}{ab[1]}",
        "sum": lambda ab: str(sum(ab)),
    }
    asked = {kind: set() for kind in right}
    for record in records(folder, "train") + records(folder, "held_out"):
        question, answer = (turn["value"] for turn in record["conversations"])
        kind, numbers = record["id"].split("-")[0], [int(target[scan_of(i)]) for i in record["images"]]
        assert answer == right[kind](numbers)
        assert question.count("<image>") == len(numbers) == (1 if kind == "digit" else 2)
        asked[kind].add(question)
    assert {kind: len(questions) for kind, questions in asked.items()} == {"digit": 3, "read": 2, "sum": 2}
    assert not set.intersection(*asked.values())


def test_images_are_upscaled_jpegs_that_show_the_scan(digits):
    folder, _ = digits
    scan = load_digits().images[0]
    image = Image.open(folder / "images" / "0000.jpg")
    assert (image.format, image.size) == ("JPEG", (56, 56))
    shrunk = image.convert("L").resize((8, 8), Image.Resampling.BOX)
    error = [abs(shrunk.getpixel((x, y)) - scan[y, x] * 255 / 16) for x in range(8) for y in range(8)]
    assert sum(error) / 64 < 20  # 13 measured; a transposed or inverted scan gives 60 and more


def test_equal_arguments_give_equal_files(digits, tmp_path):
    folder, _ = digits
    make_digits(tmp_path, **SMALL)
    for name in ("train.jsonl", "held_out.jsonl", "images/0000.jpg"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
