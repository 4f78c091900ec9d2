import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parity import OF_DATA
from PIL import Image
from places import ROOT
from sklearn.datasets import load_digits
from transformers import AutoConfig, AutoProcessor, GenerationConfig

from make_checkpoint import make_checkpoint
from make_digits import make_digits
from megatron_vlm.config import fewest_processes
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.encode.processing import TextEncoder
from megatron_vlm.recipes import load_recipe
from megatron_vlm.run_folder import check_start
from megatron_vlm.validate import validate

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


@pytest.fixture(scope="module", params=OF_DATA)
def demo(request, tmp_path_factory):
    """A family's recipe and the checkpoint it starts from."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, str(folder))
    return load_recipe(f"{request.param}_tiny_digits")(), folder


@pytest.fixture(scope="module")
def encoded(demo, digits):
    """One record of each kind of question as the demo's model is trained on it."""
    folder, _ = digits
    process = TextEncoder(AutoProcessor.from_pretrained(demo[1]))
    one_of_each = {record["id"].split("-")[0]: record for record in records(folder, "held_out")}
    assert set(one_of_each) == {"digit", "read", "sum"}
    found = {}
    for kind, record in one_of_each.items():
        prompt = process.chat(parse_record(record).messages, None, len(record["images"]))
        found[kind], _ = process(prompt, [Image.open(folder / image) for image in record["images"]])
    return found


def test_demo_recipe_is_valid_on_two_processes_and_may_start_beside_its_data(demo, tmp_path, monkeypatch):
    config, _ = demo
    assert fewest_processes(config.parallel) == 2
    validate(config, 2)
    monkeypatch.chdir(tmp_path)
    for folder in (config.model.hf_path, config.data.train_data_path, config.run_dir):
        Path(folder).mkdir(parents=True)
    check_start(config.run_dir, config.model.hf_path)


@pytest.mark.long
def test_the_demo_goes_all_its_way(tmp_path):
    """With four steps, so that it learns nothing."""
    command = [sys.executable, str(ROOT / "examples" / "digits" / "demo.py"), "steps=4"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "runs/demo/summary.json").read_text())["steps"] == 4
    for picture in ("contact_sheet.png", "run/report.html"):
        assert (tmp_path / "runs/demo" / picture).is_file()


def test_a_digit_has_as_few_visual_tokens_as_its_processor_makes(demo, encoded):
    hf_config = AutoConfig.from_pretrained(demo[1])
    counts = {
        kind: (text.input_ids == hf_config.image_token_id).sum().item() for kind, text in encoded.items()
    }
    others = {"llava_onevision": (10, 10), "gemma4": (64, 128), "gemma4_unified": (64, 128)}
    one, two = others.get(hf_config.model_type, (4, 8))
    assert counts == {"digit": one, "read": two, "sum": two}


def test_a_trained_reply_ends_with_a_token_that_stops_generation(demo, encoded):
    stop = GenerationConfig.from_pretrained(demo[1]).eos_token_id
    for text in encoded.values():
        assert text.input_ids[text.weights > 0][-1].item() in (stop if isinstance(stop, list) else [stop])


# ---- make demo ADAPTER=lora -------------------------------------------------------------------------------


@pytest.mark.soak
def test_the_adapter_demo_keeps_the_base_and_peft_reads_what_it_made(tmp_path):
    """With four steps of each training: it learns nothing, but all of its way is gone."""
    command = [sys.executable, str(ROOT / "examples" / "digits" / "adapter_demo.py"), "steps=4"]
    environment = {**os.environ, "FAMILY": "gemma3", "ADAPTER": "lora"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "all bit-equal before and after training" in ended.stdout
    found = json.loads((tmp_path / "runs/demo-lora/summary.json").read_text())
    assert found["processes"] == 2
    named = [json.loads((tmp_path / f"runs/demo-lora/lora/weights_{r}.json").read_text()) for r in range(2)]
    assert found["base_weights_equal"] == sum(len(rank["equal"]) for rank in named) > 100


# ---- make demo-rl -----------------------------------------------------------------------------------------


@pytest.mark.soak
def test_the_rl_demo_runs_and_transformers_reads_what_it_made(tmp_path):
    """With two steps of each training: it learns nothing, but all of its way is gone."""
    command = [sys.executable, str(ROOT / "examples" / "digits" / "rl_demo.py"), "steps=2"]
    environment = {**os.environ, "FAMILY": "gemma3", "STEPS": "2"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "the first ratio is 1.0; 768 samples" in ended.stdout
    folder = tmp_path / "runs/demo-rl"
    found = json.loads((folder / "summary.json").read_text())
    assert (
        found["accuracy_of_export"] == pytest.approx(found["accuracy_after"], abs=0.01)
        and found["total_seconds"] > 0
    )
    for name in ("curve.png", "samples.png"):
        assert Image.open(folder / name).size[0] > 700
