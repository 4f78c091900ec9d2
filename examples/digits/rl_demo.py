"""A model that has seen few labelled digits learns to read the others from rewards alone: `make demo-rl`.

A checkpoint of random weights is trained on the questions about 60 scans. Then `rl_loop.py` samples answers
to the questions about the others, which are right or wrong, and improves the model by GRPO. FAMILY is as in
`make demo`, STEPS the number of GRPO steps. Everything lies in runs/demo-rl or runs/demo-FAMILY-rl; the
numbers are in summary.json there.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from contact_sheet import contact_sheet
from demo import (
    accuracy,
    build_checkpoint,
    configuration,
    evaluate,
    layout,
    run,
    say,
    timed,
    torchrun,
    versions,
)
from evaluate import read_questions
from make_digits import make_digits
from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.config import fewest_processes
from megatron_vlm.messages import printable
from megatron_vlm.recipes.published import DEMO

HERE = Path(__file__).resolve().parent
LABELLED = 60  # scans whose digit is told
STEPS = {"labelled": 40, "rewarded": int(os.environ.get("STEPS") or 60)}


def main() -> None:
    started, family = time.monotonic(), os.environ.get("FAMILY") or "gemma3"
    config = configuration(family)
    folder, processes = Path(f"runs/{config.name}-rl"), fewest_processes(config.parallel)
    shutil.rmtree(folder, ignore_errors=True)
    prepare_data(folder / "raw")
    build_checkpoint(family, folder)
    say(f"training on {LABELLED} labelled scans")
    train(family, folder, processes)
    say(f"sampling answers to the other questions, and learning from their rewards, on {processes} processes")
    loop = [str(HERE / "rl_loop.py"), str(folder / "labelled"), str(folder / "raw"), str(folder)]
    usage = timed(lambda: run([*torchrun(processes), *loop, str(STEPS["rewarded"])]))
    say("answering the held-out questions with Transformers, from the exported folder")
    held_out = folder / "raw/held_out.jsonl"
    answers = evaluate("transformers", folder / "hf", held_out, folder)
    history = list(read_rows(folder / "metrics.jsonl"))
    draw_curve(history, folder / "curve.png")
    draw_samples(json.loads((folder / "samples.json").read_text()), folder / "samples.png")
    summary = {
        **figures(history),
        "accuracy_of_export": accuracy(read_questions(held_out), answers, "digit"),
        "rl_seconds": usage["train_seconds"],
        "rl_cpu_seconds": usage["train_cpu_seconds"],
        "total_seconds": round(time.monotonic() - started, 1),
        "steps": STEPS,
        "family": family,
        "layout": f"{processes} processes, {layout(config)}, cpu",
        "versions": {"python": platform.python_version(), **versions()},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    close_with(summary, folder)


def prepare_data(raw: Path) -> None:
    """Questions about one image: `labelled.jsonl`, `rewarded.jsonl` on other scans, and `held_out.jsonl`."""
    say("writing the digits as JPEG images and questions")
    print(make_digits(raw, variants=0, train_pairs=0, held_out_pairs=0), flush=True)
    lines = (raw / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, rows in (("labelled", lines[:LABELLED]), ("rewarded", lines[LABELLED:])):
        (raw / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


def train(family: str, folder: Path, processes: int) -> None:
    data = f"train_data_path={folder / 'raw/labelled.jsonl'}"
    places = (f"run_dir={folder / 'labelled'}", f"hf_path={folder / 'start'}", "dataset_type=hf", data)
    arguments = [f"--recipe={family}{DEMO}", f"--nproc={processes}", *places, "eval_every=0"]
    run([str(HERE.parent / "run_recipe.py"), *arguments, f"steps={STEPS['labelled']}", *sys.argv[1:]])


def figures(history: list[dict]) -> dict[str, float]:
    """What the loop's rows say in the end. Ends the demo if the first ratio is not exactly 1."""
    looks = [row["accuracy"] for row in history if "accuracy" in row]
    steps = [row for row in history if "reward" in row]
    if steps[0]["ratio"] != 1:
        sys.exit(f"the first ratio is {steps[0]['ratio']!r}, not 1: scores and gradients disagree")
    return {
        "accuracy_before": looks[0],
        "accuracy_after": looks[-1],
        "reward_before": steps[0]["reward"],
        "reward_after": steps[-1]["reward"],
        "first_ratio": steps[0]["ratio"],
        "samples": sum(row["samples"] for row in steps),
    }


def draw_curve(history: list[dict], file: Path) -> None:
    """Reward of each step's samples, and accuracy on held-out questions."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label, style in (
        ("reward", "sampled answers to training questions, right", "-"),
        ("accuracy", "greedy answers to held-out questions, right", "o-"),
    ):
        points = [(row["step"], row[key]) for row in history if key in row]
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="share", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def draw_samples(shown: dict[str, list[dict]], file: Path) -> None:
    """Questions of the first step, then of the last, each with all answers to it and their mean reward."""
    rows = [(step, one) for step, those in shown.items() for one in those]
    contact_sheet(
        [[Image.open(image) for image in one["images"]] for _, one in rows],
        [
            f"{step} step: it is {one['right']}\n{printable(' '.join(said or '–' for said in one['said']))}"
            f"\nreward {one['reward']:.2f}"
            for step, one in rows
        ],
        [one["reward"] >= 0.5 for _, one in rows],
        file,
    )


def close_with(summary: dict, folder: Path) -> None:
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    print(
        "\n                                    before     after"
        f"\nheld-out digits read right        {before:>8.1%}{after:>10.1%}"
        f"\nreward of sampled answers         {summary['reward_before']:>8.2f}"
        f"{summary['reward_after']:>10.2f}"
        f"\n\nTransformers reads {summary['accuracy_of_export']:.1%} right from the exported folder"
        f"\nthe first ratio is {summary['first_ratio']!r}; {summary['samples']:,} samples"
        f"\nthe loop {summary['rl_seconds']} s, everything {summary['total_seconds']} s"
        f"\n\nlook at  {folder}/curve.png  {folder}/samples.png  {folder}/summary.json"
        f"\nload     {folder}/hf  with Transformers"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
