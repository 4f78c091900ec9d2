"""`lmms_eval --model megatron_vlm`, the command of lmms-eval itself, on a task of local files."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from noisy_media import film, picture
from places import ROOT
from programs import COMMAND, OUTSIDE_TORCHRUN, run_program

from tiny.checkpoints import build_tiny_checkpoint

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


def messages(*content) -> list[dict]:
    return [{"role": "user", "content": list(content)}]


def test_settings_of_a_task_are_heeded_or_refused():
    from megatron_vlm.extras.evaluate.lmms_eval import MOST_TOKENS, generation_settings

    greedy = {"max_new_tokens": 8}
    plain = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    assert generation_settings({"max_new_tokens": 8, "until": ["\n\n"], "num_beams": 1}) == (
        greedy | plain,
        [],
    )
    assert generation_settings({"max_gen_toks": 8, "temperature": 0.7, "top_p": 0}) == (greedy, [])
    assert generation_settings({"max_new_tokens": 8, "do_sample": False, "temperature": 0.2}) == (greedy, [])
    settings, until = generation_settings({"until": "Q:", "top_p": None, "temperature": 0.5, "seed": 3})
    assert settings == {"max_new_tokens": MOST_TOKENS, "temperature": 0.5, "top_p": 1.0, "seed": 3}
    assert until == ["Q:"]
    assert generation_settings({"until": ["Q:", "", "\n\n"]})[1] == ["Q:", "\n\n"]
    with pytest.raises(ValueError, match="answers have no beams; give --gen_kwargs num_beams=1"):
        generation_settings({"num_beams": 2})
