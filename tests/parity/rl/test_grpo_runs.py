"""Runs of GRPO: rewards as TRL calls them, the same answers in every layout, and after a resume."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import Answerer, serving
from places import ROOT
from safetensors.torch import load_file
from sources import image_bytes
from transformers import TrainerState

from megatron_vlm import run_folder
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.rl.grpo import draw_numbers
from megatron_vlm.rl.rewards import AnswerRewards, Rewards
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

REWARDS = '''
def few(completion_ids, **kwargs):
    return [-len(ids) / 10 for ids in completion_ids]

def with_letter(prompts, completions, letter, trainer_state, log_metric, log_extra, **kwargs):
    """As TRL documents such a function; None where it does not apply."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert trainer_state.max_steps == 4 and 0 <= trainer_state.global_step <= 4
    log_metric("with_a_letter", sum(one is not None for one in letter) / len(letter))
    log_extra("letter", letter)
    contents = [completion[0]["content"] for completion in completions]
    return [None if one is None else float(text.count(one)) for one, text in zip(letter, contents)]

async def length_of_reference(reference):
    return [0.0 if text is None else 0.01 * len(text) for text in reference]

def wrong(completions):
    return [1.0]

def needs_letter(completions, letter):
    return [1.0 for _ in completions]

def judges_none(completions):
    return [None for _ in completions]

def by_number(completions):
    return dict.fromkeys(range(len(completions)), 1.0)

def changes(level):
    level.clear()
    return [1.0, 1.0]

def as_texts(completions):
    return ["1.0" for _ in completions]

def infinite(completions):
    return [1.0, float("inf")]

def too_few_extras(completions, log_extra):
    log_extra("level", [1])

def lengths(reference, references):
    return [float(len(text) + len(all_right)) for text, all_right in zip(reference, references)]

def judged(solution):
    return [float(one is not None) for one in solution]

def judges_level(level):
    return [float(one) for one in level]

def of_the_run(completions, log_metric):
    log_metric("grad_norm", 1.0)
    return [1.0 for _ in completions]
'''


def settings_of(path: str, rows: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    own = rows.parent / "own_rewards.py"
    run = {"run_dir": str(folder), "model.hf_path": path, "model.dtype": "fp32", "data.num_workers": 1}
    run |= {"data.dataset_type": "hf", "data.train_data_path": str(rows), "data.seq_length": 256}
    run |= {"data.max_drop_share": 1.0, "optimizer.lr": 1e-3, "train.objective": "grpo", "train.steps": 4}
    run |= {"data.valid_data_path": str(rows), "logging.tensorboard": False}
    run |= {"train.global_batch_size": 4, "train.micro_batch_size": 2, "grpo.num_generations": 4}
    run |= {"grpo.max_completion_length": 12, "grpo.beta": 0.02, "grpo.steps_per_generation": 2}
    run |= {"train.save_every": 2, "train.eval_every": 2, "train.export_every": 4}
    run["train.rewards"] = [f"{own}:few", f"{own}:with_letter", f"{own}:length_of_reference"]
    return run | {name.replace("__", "."): value for name, value in changes.items()}


def train_runs(runs: list[dict[str, Any]]) -> None:
    from megatron_vlm.training.loop import train

    for run in runs:
        train(apply_overrides(RunConfig(), run))


def train_refused(run: dict[str, Any], unjudged: dict[str, Any]) -> str:
    """What a run prints whose answers nobody judges, and one that is refused."""
    with redirect_stdout(io.StringIO()) as printed:
        train_runs([unjudged])
        with pytest.raises(ConfigError, match=r"log_metric\('grad_norm'\) is a figure of the run"):
            train_runs([run])
    return printed.getvalue()


# ---- the tests


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Prompts alone, a question with its reply, text alone, and one that leaves no room for an answer."""
    folder = tmp_path_factory.mktemp("prompts")
    found = []
    for n in range(12):
        (folder / f"{n}.jpg").write_bytes(image_bytes(n))
        prompt = [{"role": "user", "content": f"<image>What is in image {n}?"}]
        found.append({"images": [f"{n}.jpg"], "prompt": prompt, "letter": "aeiou"[n % 5]})
    found[3] = {"images": ["3.jpg"], "question": "What is this?", "answer": "a sofa", "letter": "e"}
    found.append({"prompt": [{"role": "user", "content": "Say something."}], "letter": None})
    found.append(found[0] | {"prompt": "a very long one " * 100})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    (folder / "own_rewards.py").write_text(REWARDS)
    return folder / "rows.jsonl"


def metrics(folder: Path) -> list[dict]:
    timed = ("second", "tflops", "memory", "dropped", "padding", "expert_balance")  # also of rows that pad
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(word in k for word in timed)} for row in found]


def exported(folder: Path) -> dict:
    (file,) = (folder / "exports/step_00000004").glob("*.safetensors")
    return load_file(file)


@pytest.mark.long
def test_runs_in_layouts_and_after_a_resume_are_the_same(tmp_path, tiny_gemma3, rows):
    layouts = {"TP2": {"parallel__tp": 2}, "PP2": {"parallel__pp": 2}, "DP2": {}}
    runs = [settings_of(str(tiny_gemma3), rows, tmp_path / name, **sizes) for name, sizes in layouts.items()]
    run_distributed(2, train_runs, runs)
    whole, resumed = tmp_path / "TP2", tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "exports")
    (resumed / "checkpoints/latest").write_text("step_00000002")
    run_distributed(2, train_runs, [runs[0] | {"run_dir": str(resumed)}])

    assert metrics(resumed) == metrics(whole)
    assert (resumed / "completions.jsonl").read_text() == (whole / "completions.jsonl").read_text()
    one, other = exported(whole), exported(resumed)
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)

    steps = [row for row in metrics(whole) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for name in ("PP2", "DP2"):
        for mine, theirs in zip(metrics(tmp_path / name), metrics(whole), strict=True):
            assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-6), name
    # the sum of the rewards, each over the answers that it judges
    names = [f"rewards/{name}/mean" for name in ("few", "with_letter", "length_of_reference")]
    assert all(name in row and np.isfinite(row[name]) for row in steps for name in names)
    assert all(0.5 < row["with_a_letter"] <= 1 for row in steps)
    assert [row["step"] for row in metrics(whole) if "valid_reward" in row] == [2, 4]
    drops = [json.loads(line) for line in (whole / "drops/rank0.jsonl").read_text().splitlines()]
    assert {drop["reason"] for drop in drops} <= {"over_length"}
    answers = [json.loads(line) for line in (whole / "completions.jsonl").read_text().splitlines()]
    assert all(len(row["answers"]) == 4 and "letter" in row["answers"][0]["extra"] for row in answers)
    assert {path.name for path in whole.iterdir()} <= {*run_folder.FILES, *run_folder.FOLDERS}
    page = (whole / "report.html").read_text()
    assert "Answers of the last steps" in page and "with_letter" in page


class Reloading(Answerer):
    """SGLang's server, which loads weights from a folder when it is told to."""

    reloads = 0

    def __call__(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if path != "/update_weights_from_disk":
            return super().__call__(path, request)
        self.reloads += 1
        super().__init__(Path(request["model_path"]), self.style)
        return {"success": True, "message": ""}


@pytest.mark.long
def test_experts_and_interleaved_stages_answer_and_train(tmp_path, rows):
    """Ranks that share experts, or have several stages, call each other however their prompts differ."""
    checkpoint = str(build_tiny_checkpoint("qwen3_vl_moe", tmp_path / "checkpoint"))
    once = {"grpo__beta": 0.0, "grpo__steps_per_generation": 1, "train__eval_every": 2, "adapter__r": 4}
    layouts = {
        "EP2": {"parallel__ep": 2},
        "VPP2": {"parallel__pp": 2, "parallel__vpp": 2},
        "CP2": {"parallel__cp": 2},
    }
    runs = [
        settings_of(checkpoint, rows, tmp_path / name, **once, **sizes) for name, sizes in layouts.items()
    ]
    run_distributed(2, train_runs, runs)
    expected = metrics(tmp_path / "CP2")
    assert all(row["ratio"] == 1 for row in expected if "ratio" in row)
    for name in ("EP2", "VPP2"):
        for mine, theirs in zip(metrics(tmp_path / name), expected, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-6), name


@pytest.mark.long
def test_a_server_answers_with_the_weights_of_each_step(tmp_path, tiny_gemma3, rows, monkeypatch):
    server = Reloading(tiny_gemma3, "sglang")
    engine = f"{ROOT}/examples/rl/http_rollouts.py:engine"
    changes = {"grpo__engine": engine, "train__eval_every": 0, "train__steps": 4, "adapter__r": 4}
    with serving(server) as url:
        monkeypatch.setenv("ENGINE_URL", url)
        monkeypatch.setenv("ENGINE_WEIGHTS", str(tmp_path / "weights"))
        run_distributed(2, train_runs, [settings_of(str(tiny_gemma3), rows, tmp_path / "run", **changes)])
    steps = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(steps) == 4 == server.reloads and all(row["kl"] >= 0 for row in steps)
    assert steps[3]["kl"] > 0


@pytest.mark.long
def test_a_function_replaces_no_figure_and_judges_some_answers(tmp_path, tiny_gemma3, rows):
    reward = f"{rows.parent / 'own_rewards.py'}:of_the_run"
    run = settings_of(str(tiny_gemma3), rows, tmp_path / "run", grpo__beta=0.0, train__eval_every=0)
    judges_none = run | {"run_dir": str(tmp_path / "none"), "train.steps": 2, "train.export_every": 0}
    judges_none["train.rewards"] = [f"{rows.parent / 'own_rewards.py'}:judges_none"]
    [printed] = run_distributed(1, train_refused, run | {"train.rewards": [reward]}, judges_none)
    assert "step 2: no function of train.rewards judges any answer; nothing is trained" in printed
    assert printed.count("step 1: all rewards of each prompt are equal: nothing to learn from them") == 1


def test_a_sample_that_comes_twice_in_a_step_has_other_answers():
    once, twice = draw_numbers(["a", "b"]), draw_numbers(["a", "b", "a"])
    assert twice[:2] == once and len(set(twice)) == 3


def rewards_of(
    names: list[str], *columns: dict[str, Any], step: int = 0, reply: str | None = None
) -> AnswerRewards:
    """Of an answer for each record, whose step has the columns of the others, too."""
    right = {"reference": reply, "references": [reply, reply.upper()] if reply else None}
    asked = [{"prompt": [], "columns": own, **right} for own in columns]
    texts = ["<think>2 + 2</think>4", "4"][: len(columns)]
    everywhere = {name for own in columns for name in own}
    return Rewards(names)(asked, texts, [[1]] * len(texts), TrainerState(global_step=step), everywhere)


def test_functions_of_trl_work_unchanged():
    rewards = rewards_of(["trl.rewards:think_format_reward"], {"solution": "4"}, {"solution": "4"}).rewards
    assert rewards.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "wrong: returned 1 rewards for 2 answers"),
        ("needs_letter", "no record of the first step has letter; columns are level. Name one"),
        ("by_number", "by_number: returned a dict; return a list"),
        ("as_texts", "as_texts: a reward is the text '1.0'"),
        ("infinite", "the reward of answer 1 is infinite"),
        ("too_few_extras", r"log_extra\('level'\): 1 values for 2 answers.* in line \d+"),
    ],
)
def test_a_wrong_reward_is_named_with_its_remedy(rows, name, message):
    with pytest.raises(ConfigError, match=message):
        rewards_of([f"{rows.parent / 'own_rewards.py'}:{name}"], {"level": 1}, {})


def test_functions_are_given_once_and_have_lists_of_their_own(rows):
    own = f"{rows.parent / 'own_rewards.py'}:"
    with pytest.raises(ConfigError, match="judged is given twice; give it once"):
        Rewards([own + "judged", own + "judged"])
    records = {"level": 1, "solution": 1}, {"level": 2, "solution": None}
    names = [own + "changes", own + "judges_level"]
    assert rewards_of(names, *records).rewards.tolist() == [[1.0, 1.0], [1.0, 2.0]]


def test_a_column_of_some_records_is_none_for_the_others(rows):
    own = f"{rows.parent / 'own_rewards.py'}:"
    given = rewards_of([own + "lengths"], {"reference": "of the record"}, {}, reply="ok").rewards
    assert given.tolist() == [[13.0 + 2], [2.0 + 2]]  # and all right answers
    assert rewards_of([own + "judged"], {"solution": 1}, {}).rewards.tolist() == [[1.0], [0.0]]
    # which a restart does not change: a later step needs no record that has the column
    assert rewards_of([own + "judged"], {}, {}, step=1).rewards.tolist() == [[0.0], [0.0]]
