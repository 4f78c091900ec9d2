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
    code = "import sys; from megatron_vlm.testing.tiny import build_tiny_checkpoint as b; b(*sys.argv[1:])"
    run(["-c", code, FAMILY, str(RUN / "start")])


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
    """`held_out_accuracy` counts the questions about one image, `held_out_sum_accuracy` those about two."""

    def accuracy(images: int) -> float:
        right = [
            answer == question["answer"]
            for question, answer in zip(questions, answers, strict=True)
            if len(question["images"]) == images
        ]
        return sum(right) / len(right)

    equal = [mine == theirs for mine, theirs in zip(answers, hf_answers, strict=True)]
    return {
        "held_out_accuracy": accuracy(1),
        "held_out_sum_accuracy": accuracy(2),
        "hf_agreement": sum(equal) / len(equal),
        "held_out_questions": len(questions),
    }


def draw_contact_sheet(questions: list[dict], answers: list[str], count: int = 36) -> None:
    """Wrong answers first: they are what one wants to look at."""
    from megatron_vlm.metrics import contact_sheet

    order = sorted(range(len(questions)), key=lambda index: questions[index]["answer"] == answers[index])
    shown = order[: count // 2] + order[-(count - count // 2) :]
    contact_sheet(
        [[Image.open(image) for image in questions[index]["images"]] for index in shown],
        [f"{text_of(questions[index])}\n{answers[index]}" for index in shown],
        [questions[index]["answer"] == answers[index] for index in shown],
        RUN / "contact_sheet.png",
    )


def text_of(question: dict) -> str:
    parts = [part["text"].strip() for part in question["messages"][-1]["content"] if part["type"] == "text"]
    return " ".join(filter(None, parts))


def close_with(summary: dict) -> None:
    print(
        f"\nread {summary['held_out_accuracy']:.1%} of the held-out digits right"
        f" ({summary['held_out_sum_accuracy']:.1%} of the sums)"
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
