"""The whole way on a laptop: images, dataset, checkpoint, training, evaluation, export, and back.

`make demo` runs this. Everything it makes lies in runs/demo, its numbers in runs/demo/summary.json.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from evaluate import read_questions
from make_digits import make_digits

HERE = Path(__file__).resolve().parent
FAMILY = os.environ.get("FAMILY", "gemma3")
RUN = Path("runs/demo")
PROCESSES = 2
VERSIONS_OF = ("megatron-vlm", "megatron-core", "megatron-energon", "transformers", "torch")


def main() -> None:
    started = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    held_out = prepare_data()
    build_checkpoint()
    train_seconds = timed(train)
    say("answering the held-out questions with Megatron")
    answers = evaluate("megatron", RUN, held_out, PROCESSES)
    export()
    say("answering them again with Transformers, from the exported folder")
    hf_answers = evaluate("transformers", RUN / "hf", held_out)
    questions = read_questions(held_out)
    draw_contact_sheet(questions, answers)
    summary = {
        **scores(questions, answers, hf_answers),
        "train_seconds": round(train_seconds, 1),
        "total_seconds": round(time.monotonic() - started, 1),
        "family": FAMILY,
        "layout": f"{PROCESSES} processes, tp 2 with sequence parallelism, cpu",
        "versions": {"python": platform.python_version(), **versions()},
    }
    (RUN / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    close_with(summary)


def prepare_data() -> Path:
    from megatron_vlm.data.prepare import prepare_energon_dataset

    say("writing the digits as JPEG images and questions")
    raw = RUN / "raw"
    make_digits(raw)
    sources = {"train": raw / "train.jsonl", "val": raw / "held_out.jsonl"}
    print(prepare_energon_dataset(sources, RUN / "dataset"), flush=True)
    return raw / "held_out.jsonl"


def build_checkpoint() -> None:
    """In a process of its own, so that this one needs no torch."""
    say(f"building a tiny {FAMILY} checkpoint with random weights")
    run([str(HERE / "make_checkpoint.py"), FAMILY, str(RUN / "start")])


def train() -> None:
    say(f"training on {PROCESSES} processes")
    recipe = [f"--recipe={FAMILY}_tiny_digits", f"--nproc={PROCESSES}"]
    run([str(HERE.parent / "run_recipe.py"), *recipe, *sys.argv[1:]])


def export() -> None:
    say("exporting to a Hugging Face folder")
    run(["-m", "megatron_vlm.cli", "export", str(RUN), str(RUN / "hf")])


def evaluate(source: str, model: Path, data: Path, processes: int = 1) -> list[str]:
    output = RUN / f"answers_{source}.json"
    launcher = torchrun(processes) if processes > 1 else []
    run([*launcher, str(HERE / "evaluate.py"), source, str(model), str(data), str(output)])
    return json.loads(output.read_text(encoding="utf-8"))


def scores(questions: list[dict], answers: list[str], hf_answers: list[str]) -> dict[str, float | int]:
    """`held_out_accuracy` counts the questions about one digit; two are to be read or added up."""
    equal = [mine == theirs for mine, theirs in zip(answers, hf_answers, strict=True)]
    return {
        "held_out_accuracy": accuracy(questions, answers, "digit"),
        "held_out_read_two_accuracy": accuracy(questions, answers, "read"),
        "held_out_sum_accuracy": accuracy(questions, answers, "sum"),
        "hf_agreement": sum(equal) / len(equal),
        "held_out_questions": len(questions),
    }


def accuracy(questions: list[dict], answers: list[str], kind: str) -> float:
    right = [
        answer == question["answer"]
        for question, answer in zip(questions, answers, strict=True)
        if question["id"].startswith(kind)
    ]
    return sum(right) / len(right)


def draw_contact_sheet(questions: list[dict], answers: list[str], count: int = 36) -> None:
    """Wrong answers first, those about one digit before the others: they are what one wants to look at."""
    from megatron_vlm.metrics import contact_sheet

    is_right = [question["answer"] == answer for question, answer in zip(questions, answers, strict=True)]
    wrong = [index for index, right in enumerate(is_right) if not right]
    wrong = sorted(wrong, key=lambda index: questions[index]["id"])[: count // 2]
    right = [index for index, right in enumerate(is_right) if right][: count - len(wrong)]
    shown = wrong + right
    contact_sheet(
        [[Image.open(image) for image in questions[index]["images"]] for index in shown],
        [caption(questions[index], answers[index]) for index in shown],
        [is_right[index] for index in shown],
        RUN / "contact_sheet.png",
    )


def caption(question: dict, answer: str) -> str:
    parts = question["messages"][-1]["content"]
    text = "".join(part["text"] if part["type"] == "text" else "□" for part in parts).strip("□ ")
    verdict = "" if answer == question["answer"] else f"  (it is {question['answer']})"
    return f"{text}\n{answer}{verdict}"


def close_with(summary: dict) -> None:
    print(
        f"\nread {summary['held_out_accuracy']:.1%} of the held-out digits right"
        f" ({summary['held_out_read_two_accuracy']:.1%} of two at once,"
        f" {summary['held_out_sum_accuracy']:.1%} of the sums)"
        f"\nMegatron and the exported folder agree on {summary['hf_agreement']:.1%} of the answers"
        f"\ntraining {summary['train_seconds']} s, everything {summary['total_seconds']} s"
        f"\n\nlook at  {RUN}/contact_sheet.png  {RUN}/loss.png  {RUN}/summary.json"
        f"\nload     {RUN}/hf  with Transformers"
        f"\nwatch    tensorboard --logdir {RUN}/tensorboard"
    )


def torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def run(arguments: list[str]) -> None:
    """A Python process; its failure ends the demo with the same code, its message already printed."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    code = subprocess.run([sys.executable, *arguments], env=environment).returncode
    if code:
        sys.exit(code if code > 0 else 128 - code)


def timed(work) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in VERSIONS_OF}


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
