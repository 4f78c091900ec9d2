"""`lmms_eval --model megatron_vlm`, the command of lmms-eval itself, on a task of local files."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from noisy_media import film, picture
from places import ROOT
from programs import COMMAND, OUTSIDE_TORCHRUN, run_program

from megatron_vlm.config import ConfigError
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("lmms_eval") is None, reason="lmms-eval is not installed"),
]
ASK = "What is this?"
MEDIA = [[], ["a.png"], ["a.png", "b.png"], ["a.mp4"], ["b.png"]]  # of each question
TASK = """
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: generate_until
doc_to_visual: !function local_task.visuals
doc_to_text: question
doc_to_target: answer
generation_kwargs: {max_new_tokens: 6, until: []}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
CODE = """
from PIL import Image

def visuals(doc):
    return [Image.open(name) if name.endswith("png") else name for name in doc["media"]]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, a task of lmms-eval, the same questions for `evaluate`, and this package's entry points."""
    folder = tmp_path_factory.mktemp("lmms_eval")
    build_tiny_checkpoint("qwen3_vl", folder / "model", text={"initializer_range": 0.2})
    (folder / "a.png").write_bytes(picture((96, 64), "RGB", "PNG", {}, 1))
    (folder / "b.png").write_bytes(picture((60, 120), "RGB", "PNG", {}, 2))
    (folder / "a.mp4").write_bytes(film((64, 64), 8))
    ours, theirs = [], []
    for media in MEDIA:
        films = [name for name in media if name.endswith("mp4")]
        images = [name for name in media if name not in films]
        asked = {"role": "user", "content": "<image>" * len(images) + "<video>" * len(films) + ASK}
        reply = {"role": "assistant", "content": "red"}
        ours.append({"messages": [asked, reply], "images": images, "videos": films})
        theirs.append({"question": ASK, "answer": "red", "media": media})
    for name, rows in (("ours.jsonl", ours), ("data.jsonl", theirs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task").mkdir()
    (folder / "task/local.yaml").write_text(TASK)
    (folder / "task/local_task.py").write_text(CODE)
    installed = folder / "installed/megatron_vlm-0.1.0.dist-info"
    installed.mkdir(parents=True)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    [(name, place)] = declared["lmms_eval.models"].items()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-vlm\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text(f"[lmms_eval.models]\n{name} = {place}\n")
    return folder


def lmms_eval(folder: Path, output: str, settings: str, *starter: str) -> subprocess.CompletedProcess:
    words = ["-m", "lmms_eval", "--model", "megatron_vlm", "--model_args"]
    words += [f"pretrained=model,model.dtype=fp32{settings}", "--tasks", "local", "--include_path", "task"]
    words += ["--batch_size", "2", "--log_samples", "--output_path", output]
    path = f"{folder / 'installed'}:{ROOT / 'src'}:{OUTSIDE_TORCHRUN.get('PYTHONPATH', '')}"
    environment = OUTSIDE_TORCHRUN | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *starter, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)


def answers_of_lmms_eval(folder: Path, output: str) -> list[str]:
    [file] = (folder / output).rglob("*samples_local.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [record["filtered_resps"] for record in sorted(records, key=lambda record: record["doc_id"])]


@pytest.fixture(scope="module")
def own(folder) -> list[str]:
    """The answers of `evaluate`."""
    words = ["model", "ours.jsonl", "model.dtype=fp32", "data.num_workers=0", "--max-new-tokens", 6]
    done = run_program(COMMAND, "evaluate", *words, "--output", "own", cwd=folder, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    lines = (folder / "own/answers.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(set(answers)) == len(MEDIA)
    return answers


RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize(
    "output, settings, starter", [("one", "", ()), ("tp", ",tp=2", RANKS), ("dp", "", RANKS)]
)
def test_its_answers_are_those_of_evaluate(folder, own, output, settings, starter):
    """Two ranks have three and two of the documents."""
    done = lmms_eval(folder, output, settings, *starter)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|exact_match|" in done.stdout, done.stderr[-3000:]
    assert answers_of_lmms_eval(folder, output) == own


def test_a_document_that_cannot_be_asked_is_named(folder):
    good = (folder / "data.jsonl").read_text()
    (folder / "bad.mp4").write_bytes(b"no film")
    row = {"question": ASK, "answer": "red", "media": ["bad.mp4"]}
    (folder / "data.jsonl").write_text(good + json.dumps(row) + "\n")
    try:
        done = lmms_eval(folder, "bad", "", *RANKS)
    finally:
        (folder / "data.jsonl").write_text(good)
    assert done.stderr.count("ValueError: lmms-eval: local, document 5: ") == 2, done.stderr[-3000:]


def messages(*content) -> list[dict]:
    return [{"role": "user", "content": list(content)}]


def image(url: object) -> list[dict]:
    return messages({"type": "image", "url": url}, {"type": "text", "text": ASK})


def code_that_fails() -> list[dict]:
    raise KeyError("question")


def ways_to_give_an_image() -> list[object]:
    """The same picture."""
    from PIL import Image

    raw = Path("a.png").read_bytes()
    opened = Image.open("a.png")
    return ["a.png", raw, base64.b64encode(raw).decode(), Path("a.png"), opened, opened.convert("RGBA")]


# what a document's messages may be -> what is said of it
ODD = {
    "no list": (lambda: None, "its messages are None, not a list of some"),
    "nothing": (lambda: [], "its messages are [], not a list of some"),
    "no turn": (lambda: ["What?"], "bad_conversation: turn 0 is str, not an object"),
    "no role": (lambda: [{"content": ASK}], "bad_conversation: turn 0 has role NoneType"),
    "no image": (lambda: image(None), "an image is of type NoneType; give the bytes of its file"),
    "a number": (lambda: image(5), "an image is of type int; give the bytes of its file"),
    "no such file": (lambda: image("none.png"), "none.png"),
    "no picture": (lambda: image(b"x"), "image_undecodable: "),
    "no base64": (lambda: image("data:image/png;base64,###"), "missing_media: "),
    "no url": (lambda: messages({"type": "image"}), "an image is of type NoneType"),
    "no type": (lambda: messages({"url": "a.png"}), "turn 0 has a part that is no text, image, "),
    "a list for a type": (
        lambda: messages({"type": ["image"]}),
        "turn 0 has a part that is no text, image, ",
    ),
    "audio": (lambda: messages({"type": "audio", "url": "a.wav"}), "turn 0 has audio, which no model is "),
    "no text": (lambda: messages({"type": "text", "text": None}), "has a part that is no text, image, "),
    "code": (code_that_fails, "in the code of the task: KeyError: 'question'"),
}
HOW = {"max_new_tokens": 6, "until": ["\n\n"], "do_sample": False}


def asked_by_hand(model, given: dict, *messages_of) -> list[str]:
    """The answers to documents with these messages."""
    from lmms_eval.api.instance import Instance

    model.task_dict = {"local": {"test": list(messages_of)}}
    about = {"task": "local", "doc_id": 0, "repeats": 1}
    return model.generate_until(
        [
            Instance("generate_until", ("", lambda doc: doc(), given, number, "local", "test"), 0, about)
            for number in range(len(messages_of))
        ]
    )


def oddities_of_rank(folder: str) -> tuple[list[list[str]], dict[str, str]]:
    """The answers to one picture in many forms, and what is said of each odd document."""
    from megatron_vlm.extras.evaluate.lmms_eval import MegatronVLM

    os.chdir(folder)
    model = MegatronVLM("model", "auto:4", max_batch_size=3, **{"model.dtype": "fp32"})
    assert model._at_once == 3
    forms = [lambda url=url: image(url) for url in ways_to_give_an_image()]
    texts = [lambda: messages({"type": "text", "text": ASK}), lambda: [{"role": "user", "content": ASK}]]
    said = {}
    for name, (messages_of, _) in ODD.items():
        try:
            said[name] = f"it was answered with {asked_by_hand(model, HOW, messages_of)}"
        except ValueError as error:
            said[name] = str(error)
    return [asked_by_hand(model, HOW, *forms), asked_by_hand(model, HOW, *texts)], said


def test_odd_documents_are_named_and_images_have_many_forms(folder):
    [(answers, said)] = run_distributed(1, oddities_of_rank, str(folder))
    assert [len(set(some)) for some in answers] == [1, 1] and answers[0] != answers[1]
    for name, (_, wanted) in ODD.items():
        assert said[name].startswith("lmms-eval: local, document 0") and wanted in said[name], said[name]
        assert "\n" not in said[name] and len(said[name]) < 400


def test_an_answer_is_cut_before_white_space_around_it_goes(folder):
    from transformers import AutoProcessor

    from megatron_vlm.generation.generate import reply_text

    processor = AutoProcessor.from_pretrained(folder / "model")
    ids = processor.tokenizer("\n\nred.\n Q: blue", add_special_tokens=False)["input_ids"]
    assert reply_text(processor, ids) == "red.\n Q: blue"
    assert reply_text(processor, ids, until=["blue", "Q:"]) == "red."
    assert reply_text(processor, ids, until=["\n\n"]) == ""


def test_settings_of_a_task_are_heeded_or_refused():
    from megatron_vlm.extras.evaluate.lmms_eval import MOST_TOKENS, _documents_at_once, _way

    greedy = {"max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    assert _way("a", {"max_new_tokens": 8, "until": ["\n\n"], "num_beams": 1}) == (greedy, [], [])
    assert _way("a", {"max_gen_toks": 8, "temperature": 0.7, "top_p": 0}) == (greedy, [], [])
    assert _way("a", {"until": "Q:", "top_p": None}) == (greedy | {"max_new_tokens": MOST_TOKENS}, ["Q:"], [])
    assert _way("a", {"until": ["Q:", "", "\n\n"]}).until == ["Q:", "\n\n"]
    drawn = greedy | {"temperature": 0.5, "seed": 3}
    assert _way("a", {"max_new_tokens": 8, "temperature": 0.5, "seed": 3, "do_sample": True}) == (
        drawn,
        [],
        [],
    )
    beside = {"max_new_tokens": 8, "do_sample": False, "temperature": 0.2, "top_k": 1}
    assert _way("a", beside) == (greedy, [], ["top_k", "temperature"])
    assert _way("a", {"do_sample": True}).idle == ["do_sample"]
    for given, why in [
        ({"num_beams": 2}, "num_beams is 2; give 1"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'; give a whole number from 1"),
        ({"temperature": -1}, "temperature is -1; give a number"),
        ({"until": 5}, "until is 5; give a text or"),
        ({"seed": "x"}, "seed is 'x'; give a whole number"),
    ]:
        with pytest.raises(ValueError, match=f"^lmms-eval: a: .*{re.escape(why)}"):
            _way("a", given)
    assert [_documents_at_once(size, None) for size in ("auto", "auto:4", None, "7", 7)] == [32, 32, 32, 7, 7]
    for size in ("0", "four", "auto:", -1):
        with pytest.raises(
            ConfigError, match=r"--batch_size: .* is no number of documents; give 32, or auto"
        ):
            _documents_at_once(size, None)
