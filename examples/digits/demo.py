"""The whole way on a laptop: images, dataset, checkpoint, training, evaluation, export, and back.

`make demo` runs this, `make demo FAMILY=qwen3_vl` with another family. Everything it makes lies in runs/demo
or runs/demo-FAMILY, the run in the folder `run` there; the numbers are in summary.json.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from evaluate import read_questions
from make_digits import make_digits
from megatron_vlm.config import ConfigError, RunConfig, fewest_processes
from megatron_vlm.recipes import RECIPES, compose
from megatron_vlm.recipes.published import DEMO

HERE = Path(__file__).resolve().parent
VERSIONS_OF = ("megatron-vlm", "megatron-core", "megatron-energon", "transformers", "torch")


def main() -> None:
    started = time.monotonic()
    family = os.environ.get("FAMILY") or "gemma3"
    config = configuration(family)
    folder, run_dir = Path(config.model.hf_path).parent, Path(config.run_dir)
    processes = fewest_processes(config.parallel)
    shutil.rmtree(folder, ignore_errors=True)
    held_out = prepare_data(folder)
    build_checkpoint(family, folder)
    say(f"training on {processes} processes")
    usage = timed(lambda: train(family, processes))
    say("answering the held-out questions with Megatron")
    answers = evaluate("megatron", run_dir, held_out, folder, processes)
    say("exporting to a Hugging Face folder")
    run(["-m", "megatron_vlm.cli", "export", str(run_dir), str(folder / "hf")])
    say("answering them again with Transformers, from the exported folder")
    hf_answers = evaluate("transformers", folder / "hf", held_out, folder)
    questions = read_questions(held_out)
    draw_contact_sheet(questions, answers, folder / "contact_sheet.png")
    summary = {
        **scores(questions, answers, hf_answers),
        **usage,
        "total_seconds": round(time.monotonic() - started, 1),
        "steps": config.train.steps,
        "family": family,
        "layout": f"{processes} processes, {layout(config)}, cpu",
        "versions": {"python": platform.python_version(), **versions()},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    close_with(summary, folder, run_dir, folder / "hf")


def configuration(family: str) -> RunConfig:
    """The family's recipe with the command line's settings; ends the demo if there is no such recipe."""
    known = [name.removesuffix(DEMO) for name in RECIPES if name.endswith(DEMO)]
    if family not in known:
        sys.exit(f"FAMILY={family}: the demo has no such family; take one of {', '.join(known)}.")
    try:
        return compose(family + DEMO, settings=sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))


def prepare_data(folder: Path) -> Path:
    from megatron_vlm.data.prepare import prepare_energon_dataset

    say("writing the digits as JPEG images and questions")
    raw = folder / "raw"
    make_digits(raw)
    sources = {"train": raw / "train.jsonl", "val": raw / "held_out.jsonl"}
    print(prepare_energon_dataset(sources, folder / "dataset"), flush=True)
    return raw / "held_out.jsonl"


def build_checkpoint(family: str, folder: Path) -> None:
    """Build it in another process, so that this one needs no torch."""
    say(f"building a tiny {family} checkpoint with random weights")
    run([str(HERE / "make_checkpoint.py"), family, str(folder / "start")])


def train(family: str, processes: int) -> None:
    arguments = [f"--recipe={family}{DEMO}", f"--nproc={processes}", *sys.argv[1:]]
    run([str(HERE.parent / "run_recipe.py"), *arguments])


def evaluate(source: str, model: Path, data: Path, folder: Path, processes: int = 1) -> list[str]:
    output = folder / f"answers_{source}.json"
    launcher = torchrun(processes) if processes > 1 else []
    run([*launcher, str(HERE / "evaluate.py"), source, str(model), str(data), str(output)])
    return json.loads(output.read_text(encoding="utf-8"))


def scores(questions: list[dict], answers: list[str], hf_answers: list[str]) -> dict[str, float | int]:
    """The scores. `held_out_accuracy` counts the questions about one digit; others read or add two digits."""
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


def draw_contact_sheet(questions: list[dict], answers: list[str], file: Path, count: int = 36) -> None:
    """Draw wrong answers first, those about one digit before the others, as they are the interesting ones."""
    from contact_sheet import contact_sheet

    is_right = [question["answer"] == answer for question, answer in zip(questions, answers, strict=True)]
    wrong = [index for index, right in enumerate(is_right) if not right]
    wrong = sorted(wrong, key=lambda index: questions[index]["id"])[: count // 2]
    right = [index for index, right in enumerate(is_right) if right][: count - len(wrong)]
    shown = wrong + right
    contact_sheet(
        [[Image.open(image) for image in questions[index]["images"]] for index in shown],
        [caption(questions[index], answers[index]) for index in shown],
        [is_right[index] for index in shown],
        file,
    )


def caption(question: dict, answer: str) -> str:
    parts = question["messages"][-1]["content"]
    text = "".join(part["text"] if part["type"] == "text" else "□" for part in parts).strip("□ ")
    verdict = "" if answer == question["answer"] else f"  (it is {question['answer']})"
    return f"{text}\n{answer}{verdict}"


def close_with(summary: dict, folder: Path, run_dir: Path, exported: Path) -> None:
    print(
        f"\nread {summary['held_out_accuracy']:.1%} of the held-out digits right"
        f" ({summary['held_out_read_two_accuracy']:.1%} of two at once,"
        f" {summary['held_out_sum_accuracy']:.1%} of the sums)"
        f"\nMegatron and the exported folder agree on {summary['hf_agreement']:.1%} of the answers"
        f"\ntraining {summary['train_seconds']} s, everything {summary['total_seconds']} s"
        f"\n\nlook at  {folder}/contact_sheet.png  {run_dir}/report.html  {folder}/summary.json"
        f"\nload     {exported}  with Transformers"
        f"\nwatch    tensorboard --logdir {run_dir}/tensorboard"
    )


def torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def run(arguments: list[str]) -> None:
    """Run a Python process. If it fails, its message is already printed, and the demo ends with its code."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    code = subprocess.run([sys.executable, *arguments], env=environment).returncode
    if code:
        sys.exit(code if code > 0 else 128 - code)


def layout(config: RunConfig) -> str:
    sizes = {name: getattr(config.parallel, name) for name in ("tp", "pp", "cp", "ep")}
    words = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return words + " with sequence parallelism" * config.parallel.sequence_parallel


def timed(work: Callable[[], None]) -> dict[str, float]:
    """Seconds of wall-clock time, and of CPU time over all processes that `work` started and waited for."""
    started, used = time.monotonic(), cpu_seconds()
    work()
    return {
        "train_seconds": round(time.monotonic() - started, 1),
        "train_cpu_seconds": round(cpu_seconds() - used, 1),
    }


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in VERSIONS_OF}


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
