"""A model that has seen few labelled digits learns to read the others from rewards alone: `make demo-rl`.

A checkpoint of random weights is trained on the questions about 60 scans. Then `train.objective=grpo` samples
answers to the questions about the others, which are right or wrong, and improves the model. FAMILY is as in
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
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from statistics import fmean

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
    versions,
)
from evaluate import MAX_NEW_TOKENS, read_questions
from make_digits import make_digits
from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.config import fewest_processes
from megatron_vlm.messages import printable
from megatron_vlm.recipes.published import DEMO

HERE = Path(__file__).resolve().parent
LABELLED = 60  # scans whose digit is told
STEPS = {"labelled": 40, "rewarded": int(os.environ.get("STEPS") or 60)}
LOOK_EVERY = 10  # steps between looks at the held-out questions, which are never learned from
# 48 questions a step, 8 answers to each, in two optimizer steps. Without warm-up, Adam's first steps are as
# long as any and mostly noise.
GRPO = [
    "objective=grpo",
    f"train.rewards=[{HERE / 'rewards.py'}:right]",
    "global_batch_size=48",
    "micro_batch_size=48",
    "seq_length=1024",
    "grpo.num_generations=8",
    f"grpo.max_completion_length={MAX_NEW_TOKENS}",
    "grpo.loss_type=grpo",
    "grpo.epsilon_high=0.28",
    "grpo.steps_per_generation=2",
    "lr=5e-4",
    "min_lr=5e-5",
    "warmup_steps=5",
]


def main() -> None:
    started, family = time.monotonic(), os.environ.get("FAMILY") or "gemma3"
    config = configuration(family)
    folder, processes = Path(f"runs/{config.name}-rl"), fewest_processes(config.parallel)
    shutil.rmtree(folder, ignore_errors=True)
    prepare_data(folder / "raw")
    build_checkpoint(family, folder)
    say(f"training on {LABELLED} labelled scans")
    train(family, processes, folder / "labelled", folder / "start", folder / "raw/labelled.jsonl", [])
    export(folder / "labelled", folder / "labelled/hf")
    say(f"sampling answers to the other questions, and learning from their rewards, on {processes} processes")
    held_out = folder / "raw/held_out.jsonl"
    settings = [
        *GRPO,
        f"valid_data_path={held_out}",
        f"eval_every={LOOK_EVERY}",
        f"steps={STEPS['rewarded']}",
    ]
    run_dir = folder / "rewarded"
    usage = timed(
        lambda: train(
            family, processes, run_dir, folder / "labelled/hf", folder / "raw/rewarded.jsonl", settings
        )
    )
    export(run_dir, folder / "hf")
    say("answering the held-out questions with Transformers, before and after")
    questions = read_questions(held_out)
    before, after = (
        accuracy(questions, evaluate("transformers", model, held_out, folder), "digit")
        for model in (folder / "labelled/hf", folder / "hf")
    )
    history = list(read_rows(run_dir / "metrics.jsonl"))
    draw_curve(history, folder / "curve.png")
    draw_samples(list(read_rows(run_dir / "completions.jsonl")), folder / "samples.png")
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        **figures(history),
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


def train(family: str, processes: int, run_dir: Path, model: Path, data: Path, settings: list[str]) -> None:
    places = (f"run_dir={run_dir}", f"hf_path={model}", "dataset_type=hf", f"train_data_path={data}")
    arguments = [f"--recipe={family}{DEMO}", f"--nproc={processes}", *places]
    defaults = ["eval_every=0", f"steps={STEPS['labelled']}"]
    run([str(HERE.parent / "run_recipe.py"), *arguments, *(settings or defaults), *sys.argv[1:]])


def export(run_dir: Path, folder: Path) -> None:
    run(["-m", "megatron_vlm.cli", "export", str(run_dir), str(folder)])


def figures(history: list[dict]) -> dict[str, float]:
    """What the run's metrics say of its answers."""
    steps = [row for row in history if "reward" in row]
    looks = [row["valid_reward"] for row in history if "valid_reward" in row]
    return {
        "samples": len(steps) * 48 * 8,
        "valid_reward": looks[-1],
        "reward_before": steps[0]["reward"],
        "reward_after": steps[-1]["reward"],
    }


def draw_curve(history: list[dict], file: Path) -> None:
    """Reward of each step's answers, and of greedy answers to held-out questions."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label, style in (
        ("reward", "sampled answers to training questions, right", "-"),
        ("valid_reward", "greedy answers to held-out questions, right", "o-"),
    ):
        points = [(row["step"], row[key]) for row in history if key in row]
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="share", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def draw_samples(rows: list[dict], file: Path) -> None:
    """Questions of the first steps, then of the last, each with all answers to it and their mean reward."""
    shown = rows[:18] + rows[-18:]
    rewards = [fmean(answer["rewards"]["right"] for answer in row["answers"]) for row in shown]
    texts = [printable(" ".join(answer["text"] or "–" for answer in row["answers"])) for row in shown]
    contact_sheet(
        [[Image.open(BytesIO(b64decode(picture))) for picture in row["pictures"]] for row in shown],
        [
            f"step {row['step']}: it is {row['reference']}\n{text}\nreward {reward:.2f}"
            for row, text, reward in zip(shown, texts, rewards, strict=True)
        ],
        [reward >= 0.5 for reward in rewards],
        file,
    )


def close_with(summary: dict, folder: Path) -> None:
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    print(
        "\n                                    before     after"
        f"\nheld-out digits read right        {before:>8.1%}{after:>10.1%}"
        f"\nreward of sampled answers         {summary['reward_before']:>8.2f}"
        f"{summary['reward_after']:>10.2f}"
        f"\n\nGRPO {summary['rl_seconds']} s, everything {summary['total_seconds']} s"
        f"\n\nlook at  {folder}/rewarded/report.html  {folder}/curve.png  {folder}/samples.png"
        f"\nload     {folder}/hf  with Transformers"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
