import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import hf_generate
import pytest
from parity import OF_DATA
from PIL import Image
from places import ROOT
from programs import run_program
from sklearn.datasets import load_digits
from transformers import AutoConfig, AutoProcessor, GenerationConfig

import adapter_demo
import compose_demo
import rl_demo
import tables
from evaluate import without_thoughts
from make_checkpoint import OF_PARTS, make_checkpoint
from make_digits import make_digits, make_documents
from megatron_vlm.config import fewest_processes
from megatron_vlm.config_rules.settings import validate
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.encode.text import TextEncoder
from megatron_vlm.models.families import FAMILIES
from megatron_vlm.recipes import RECIPES, compose, load_recipe
from megatron_vlm.run_folder.folder import check_start

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


def test_every_family_has_a_demo():
    demos = [f"{name}_tiny_digits" for name in (*FAMILIES, *OF_PARTS)]
    assert demos == [name for name in RECIPES if "digits" in name]


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
    for picture in ("contact_sheet.png", "run/loss.png"):
        assert (tmp_path / "runs/demo" / picture).is_file()


def test_a_digit_has_as_few_visual_tokens_as_its_processor_makes(demo, encoded):
    hf_config = AutoConfig.from_pretrained(demo[1])
    counts = {
        kind: (text.input_ids == hf_config.image_token_id).sum().item() for kind, text in encoded.items()
    }
    others = {"llava_onevision": (10, 10), "gemma4": (64, 128), "gemma4_unified": (64, 128)}
    one, two = others.get(hf_config.model_type, (4, 8))
    assert counts == {"digit": one, "read": two, "sum": two}


def test_demo_prompts_fit_a_row(demo, encoded):
    assert max(len(text.input_ids) for text in encoded.values()) <= demo[0].data.seq_length


def test_a_trained_reply_ends_with_a_token_that_stops_generation(demo, encoded):
    stop = GenerationConfig.from_pretrained(demo[1]).eos_token_id
    for text in encoded.values():
        assert text.input_ids[text.weights > 0][-1].item() in (stop if isinstance(stop, list) else [stop])


@pytest.mark.long
def test_transformers_answers_with_the_model_of_a_demo(demo, tmp_path):
    """It cannot, for instance, where no layer is one of attention."""
    Image.radial_gradient("L").resize((64, 64)).convert("RGB").save(tmp_path / "picture.png")
    assert len(hf_generate.answer(str(demo[1]), str(tmp_path / "picture.png"))) == hf_generate.NEW_TOKENS


def test_demo_names_the_families_it_knows(tmp_path):
    ended = run_program(ROOT / "examples" / "digits" / "demo.py", cwd=tmp_path, FAMILY="gemma5")
    known = ", ".join((*FAMILIES, *OF_PARTS))
    assert ended.stderr == f"FAMILY=gemma5: the demo has no such family; take one of {known}.\n"
    assert (ended.returncode, list(tmp_path.iterdir())) == (1, [])


def test_an_answer_is_what_follows_the_thoughts():
    assert without_thoughts(" 7") == without_thoughts("<think></think>\n7") == "7"


def summary(family: str, accuracy: float) -> dict:
    return {
        "family": family,
        "layout": "2 processes",
        "held_out_accuracy": accuracy,
        "held_out_read_two_accuracy": 0.875,
        "hf_agreement": 1.0,
        "train_seconds": 93.4,
        "train_cpu_seconds": 150.6,
    }


def test_the_report_takes_new_runs_and_keeps_the_others(tmp_path):
    run = tmp_path / "demo-qwen3_vl"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps(summary("qwen3_vl", 0.97)))
    old = {"qwen3_vl": summary("qwen3_vl", 0.5), "mistral3": summary("mistral3", 0.96)}
    assert {
        family: entry["held_out_accuracy"] for family, entry in tables.gathered(old, tmp_path).items()
    } == {
        "mistral3": 0.96,
        "qwen3_vl": 0.97,
    }


def test_the_table_has_a_line_for_each_family():
    lines = tables.demo({"qwen3_vl": summary("qwen3_vl", 0.97)}).splitlines()
    assert lines[2:] == ["| `qwen3_vl` | 2 processes | 97.0% | 87.5% | 100.0% | 93 s | 151 s |"]
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


def test_a_report_takes_the_summaries_of_its_own_demo(tmp_path):
    of_rl = {"family": "gemma3", "first_ratio": 1.0}
    for name, found in (
        ("demo", summary("gemma3", 0.97)),
        ("demo-rl", of_rl),
        ("demo-lora", {"family": "gemma3"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(found))
    assert tables.gathered({}, tmp_path) == {"gemma3": summary("gemma3", 0.97)}
    assert tables.gathered({}, tmp_path, tables.DEMOS["demo_rl.json"]) == {"gemma3": of_rl}


# ---- make demo FAMILY=compose -----------------------------------------------------------------------------


def test_documents_show_training_scans_and_say_what_they_are(digits, tmp_path):
    folder, _ = digits
    (tmp_path / "train.jsonl").write_bytes((folder / "train.jsonl").read_bytes())
    assert make_documents(tmp_path, 50) == 50
    target, held_out = (
        load_digits().target,
        {scan_of(i) for r in records(folder, "held_out") for i in r["images"]},
    )
    for document in records(tmp_path, "documents"):
        assert len(document["texts"]) == len(document["images"]) and document["images"][0] is None
        for image, text in zip(document["images"][1::2], document["texts"][2::2], strict=True):
            assert text == f"This is a {target[scan_of(image)]}." and scan_of(image) not in held_out


def test_the_second_stage_starts_from_what_the_first_exports():
    first, second = (compose(file=compose_demo.HERE / name) for name in compose_demo.STAGES.values())
    assert (
        first.model.hf_path
        == str(compose_demo.FOLDER / "start")
        == compose_demo.composed(compose_demo.FOLDER)[-1]
    )
    exported = f"exports/step_{first.train.steps:08d}"
    assert (
        second.model.hf_path == f"{first.run_dir}/{exported}"
        and first.train.export_every == first.train.steps
    )
    assert (first.model.freeze, second.model.freeze) == (["tower", "language_model"], [])
    assert second.train.export_every == second.train.steps and first.run_dir != second.run_dir
    assert first.data.train_data_path == second.data.train_data_path and len(first.data.train_data_path) == 2
    for config in (first, second):
        validate(config, 2)


# ---- make demo ADAPTER=lora -------------------------------------------------------------------------------


def test_scores_of_digits_known_before_and_of_the_others():
    questions = [{"id": f"digit-{n}", "answer": str(n)} for n in range(10)]
    before = [str(n) if n < 4 else "0" for n in range(10)]
    after = [str(n) if n < 9 else "4" for n in range(10)]
    assert adapter_demo.scores(questions, before, after) == {
        "first_five_before": 0.8,
        "first_five_after": 1.0,
        "other_five_before": 0.0,
        "other_five_after": 0.8,
    }


def test_the_adapter_demo_ends_if_a_base_weight_has_changed(tmp_path):
    found = {"equal": ["0.language_model.a", "0.vision.b"], "changed": ["0.adapters.model.a.lora_B"]}
    for rank in range(2):
        (tmp_path / f"weights_{rank}.json").write_text(json.dumps(found))
    assert adapter_demo.base_weights(tmp_path) == {"base_weights_equal": 4, "processes": 2}
    (tmp_path / "weights_1.json").write_text(json.dumps(found | {"changed": ["0.vision.b"]}))
    with pytest.raises(SystemExit, match=r"base weights have changed: 0\.vision\.b"):
        adapter_demo.base_weights(tmp_path)


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


def test_no_labelled_scan_is_rewarded(tmp_path):
    rl_demo.prepare_data(tmp_path)
    scans = {
        side: [scan_of(row["images"][0]) for row in records(tmp_path, side)]
        for side in ("labelled", "rewarded", "held_out")
    }
    assert {side: len(found) for side, found in scans.items()} == {
        "labelled": rl_demo.LABELLED,
        "rewarded": 1500 - rl_demo.LABELLED,
        "held_out": 297,
    }
    for side, other in (("labelled", "rewarded"), ("labelled", "held_out"), ("rewarded", "held_out")):
        assert not set(scans[side]) & set(scans[other])


def test_the_rl_demo_ends_if_the_first_ratio_is_not_one():
    history = [{"step": 0, "accuracy": 0.5}]
    history += [{"step": 1, "reward": 0.4, "ratio": 1.0, "samples": 8}]
    history += [{"step": 2, "reward": 0.6, "ratio": 0.9, "samples": 8, "accuracy": 0.7}]
    assert rl_demo.figures(history) == {
        "accuracy_before": 0.5,
        "accuracy_after": 0.7,
        "reward_before": 0.4,
        "reward_after": 0.6,
        "first_ratio": 1.0,
        "samples": 16,
    }
    history[1]["ratio"] = 1.0000001
    with pytest.raises(SystemExit, match=r"the first ratio is 1\.0000001, not 1"):
        rl_demo.figures(history)


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
