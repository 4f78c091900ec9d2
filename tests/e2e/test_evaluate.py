"""`megatron-vlm evaluate` as it is typed: answers of held-out conversations, their scores, and their page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import av
import pytest
import torch
from noisy_media import film, picture
from prepared_shards import prepare, stored
from programs import COMMAND, run_program
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron_vlm.extras.evaluate.answering import answers as answers_of
from megatron_vlm.extras.evaluate.answering import open_questions
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

TOKENS = 6
PLAIN = ("model.dtype=fp32", "data.num_workers=0")


def turn(role: str, text: str, **others) -> dict:
    return {"role": role, "content": text, **others}


def rows() -> list[dict]:
    """Questions about none to two images, and a film; the fourth has no reply, the fifth a missing image."""
    ask = "What is this?"
    return [
        {"messages": [turn("user", ask), turn("assistant", "red")]},
        {
            "id": "second",
            "images": ["a.png"],
            "messages": [turn("user", f"<image>{ask}"), turn("assistant", "green")],
        },
        {
            "images": ["a.png", "b.png"],
            "messages": [
                turn("system", "Be brief."),
                turn("user", f"<image>{ask}"),
                turn("assistant", "a cat"),
                turn("user", "And <image>?"),
                turn("assistant", "two cats", references=["two cats", "2 cats"]),
                turn("user", "Thanks."),
            ],
        },
        {"messages": [turn("user", ask)]},
        {
            "id": 5,
            "images": ["none.png"],
            "messages": [turn("user", f"<image>{ask}"), turn("assistant", "red")],
        },
        {"videos": ["a.mp4"], "messages": [turn("user", f"<video>{ask}"), turn("assistant", "blue")]},
        {"images": ["b.png"], "messages": [turn("user", f"{ask}<image>"), turn("assistant", "a dog")]},
    ]


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Path:
    """A folder with a `model` and with `data.jsonl` and its media."""
    folder = tmp_path_factory.mktemp("evaluate")
    build_tiny_checkpoint("qwen3_vl", folder / "model", text={"initializer_range": 0.2})
    (folder / "a.png").write_bytes(picture((96, 64), "RGB", "PNG", {}, 1))
    (folder / "b.png").write_bytes(picture((60, 120), "RGB", "PNG", {}, 2))
    (folder / "a.mp4").write_bytes(film((64, 64), 8))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return folder


def evaluate(asked: Path, output: Path, *flags: object, **how):
    words = [asked / "model", asked / "data.jsonl", *PLAIN, "--output", output, "--max-new-tokens", TOKENS]
    return run_program(COMMAND, "evaluate", *words, *flags, HF_HUB_OFFLINE="1", **how)


def answers(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluated(asked) -> tuple[Path, str]:
    """The folder of an evaluation of all rows, and what was printed."""
    output = asked / "all"
    metric = asked / "length.py"
    metric.write_text("def length(answer, references, question):\n    return len(answer)\n")
    flags = ["--metric", "anls", "--metric", f"{metric}:length", "--metric", "boxes"]
    done = evaluate(asked, output, *flags)
    assert done.returncode == 0, done.stderr
    return output, done.stdout


def transformers_answer(folder: Path, messages: list[dict], images: list, videos: list) -> list[int]:
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    given = {"images": images} if images else {}
    if videos:
        # two frames a second of 8 at 4 a second, as data.video_fps says
        given = {"videos": [films[::2] for films in videos], "do_sample_frames": False}
        metadata = {"fps": 4.0, "frames_indices": [0, 2, 4, 6], "total_num_frames": 8}
        given["video_metadata"] = [metadata]
    inputs = processor(text=[text], return_tensors="pt", **given)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.long
def test_greedy_answers_are_those_of_transformers(asked, evaluated):
    from PIL import Image

    def user(*parts: str) -> dict:
        kinds = {"<image>": {"type": "image"}, "<video>": {"type": "video"}}
        return {
            "role": "user",
            "content": [kinds.get(part, {"type": "text", "text": part}) for part in parts],
        }

    def said(role: str, text: str) -> dict:
        return {"role": role, "content": [{"type": "text", "text": text}]}

    a, b = (Image.open(asked / name).convert("RGB") for name in ("a.png", "b.png"))
    with av.open(asked / "a.mp4") as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    ask = "What is this?"
    second = [
        *(said("system", "Be brief."), user("<image>", ask), said("assistant", "a cat")),
        user("And ", "<image>", "?"),
    ]
    expected = [
        ([user(ask)], [], []),
        ([user("<image>", ask)], [a], []),
        (second, [a, b], []),
        ([user("<video>", ask)], [], [frames]),
        ([user(ask, "<image>")], [b], []),
    ]
    theirs = [transformers_answer(asked / "model", *one) for one in expected]
    records = [record for record in answers(evaluated[0]) if "problem" not in record]
    assert [record["tokens"] for record in records] == theirs
    assert len({tuple(tokens) for tokens in theirs}) == len(theirs)


def test_scores_are_those_of_the_answers(evaluated):
    output, printed = evaluated
    scores = json.loads((output / "scores.json").read_text())
    records = [record for record in answers(output) if "problem" not in record]
    lengths = [len(record["answer"]) for record in records]
    assert scores["scores"]["length"]["score"] == pytest.approx(sum(lengths) / len(lengths))
    assert scores["scores"]["length"]["samples"] == len(records) == 5
    assert [one.get("length") for one in scores["samples"] if "length" in one] == lengths
    assert [record.get("id") for record in answers(output)] == [None, "second", None, None, "5", None, None]
    assert [one.get("id") for one in scores["samples"]] == [record.get("id") for record in answers(output)]
    page = (output / "answers.html").read_text()
    assert "000000001 · id second" in page and page.count('<article class="wrong">') == 5
    assert scores["unscored"]["no_trained_tokens"] == [1, "000000003"]
    assert scores["unscored"]["boxes: its reference has no box"] == [5, "000000000"]
    assert set(scores["scores"]) == {"anls", "length"}
    lines = printed.splitlines()
    assert re.fullmatch(r"anls 0\.\d{4} \(5 samples\)", lines[1])
    assert "without a score: 1, no_trained_tokens; such as 000000003" in lines


def test_a_killed_evaluation_goes_on_and_another_is_refused(asked, evaluated, tmp_path):
    """Two answers are there, and a third line has begun; one of them is not the model's, so it was kept."""
    output = tmp_path / "out"
    output.mkdir()
    shutil.copy(evaluated[0] / "settings.json", output)
    first, *others = (evaluated[0] / "answers.jsonl").read_text().splitlines(keepends=True)
    kept = first.replace('"references": ["red"]', '"references": ["kept"]')
    (output / "answers.jsonl").write_text(kept + others[0] + first[:20])
    refused = evaluate(asked, output, "--samples", 3)
    assert refused.returncode == 2
    assert "answers of another model, to other questions or with other settings" in refused.stderr
    resumed = evaluate(asked, output, "--metric", "contained")
    assert resumed.returncode == 0, resumed.stderr
    assert (output / "answers.jsonl").read_text() == kept + "".join(others)
    assert "contained" in json.loads((output / "scores.json").read_text())["scores"]


@pytest.fixture(scope="module")
def prepared(asked) -> Path:
    """The good rows as two datasets of Energon: four in `one`, in two shards, and the last in `two`."""
    good = [row for n, row in enumerate(rows()) if n not in (3, 4)]
    for name, some in (("one", good[:4]), ("two", good[4:])):
        (asked / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        prepare({"val": asked / f"{name}.jsonl"}, asked / name, samples_per_shard=2)
    return asked


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_samples_of_energon_are_answered_once_in_order_by_their_keys(prepared, evaluated, workers):
    output = prepared / f"energon{workers}"
    words = [prepared / "model", prepared / "one", "model.dtype=fp32", f"data.num_workers={workers}"]
    words += ["--output", output, "--max-new-tokens", TOKENS]
    done = run_program(COMMAND, "evaluate", *words, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    expected = [record for record in answers(evaluated[0]) if "problem" not in record][:4]
    assert [record["key"] for record in answers(output)] == list(stored(prepared / "one")["val"])
    assert [record | {"key": ""} for record in answers(output)] == [one | {"key": ""} for one in expected]
    assert (output / "answers.html").read_text().count('src="data:image') == 1 + 2 + 4


def answers_of_rank(folder: str, tp: int) -> list[dict]:
    from megatron_vlm.commands.runs import open_run
    from megatron_vlm.config import RunConfig
    from megatron_vlm.overrides import apply_overrides

    settings = {"model.hf_path": f"{folder}/model", "model.dtype": "fp32", "data.seq_length": 1}
    settings |= {"data.train_data_path": "none://", "data.valid_data_path": f"{folder}/data.jsonl"}
    config = apply_overrides(RunConfig(), settings | {"parallel.tp": tp, "data.dataset_type": "hf"})
    chunks, source = open_run(config, raw_pixels=True)
    questions = open_questions(config.data, source, TOKENS)
    return [record for some in answers_of(chunks, source, questions, TOKENS) for record in some]


def test_json_is_all_that_stdout_has(asked, evaluated):
    words = ["--model", asked / "model", *PLAIN, "--max-new-tokens", TOKENS, "--data", asked / "data.jsonl"]
    done = run_program(COMMAND, "evaluate", *words, "--json", "--metric=anls", "--output", evaluated[0])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    scores = json.loads((evaluated[0] / "scores.json").read_text())
    assert result["scores"] == scores["scores"] and result["unscored"] == scores["unscored"]
    assert "wrote " in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_share_the_questions(asked, evaluated, tp):
    for records in run_distributed(2, answers_of_rank, str(asked), tp):
        assert records == answers(evaluated[0])
