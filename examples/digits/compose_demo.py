"""A new model out of a vision tower and a language model, trained in two stages: `make demo FAMILY=compose`.

A SigLIP2 and a Llama of random weights are saved as two checkpoints and composed. The projector learns first
(`compose_projector.yaml`), then all of it (`compose_all.yaml`), on questions and on documents of texts and
images in turn. Everything lies in runs/demo-compose; the numbers are in summary.json there.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from pathlib import Path

from demo import (
    close_with,
    draw_contact_sheet,
    evaluate,
    layout,
    run,
    say,
    scores,
    timed,
    versions,
)
from evaluate import read_questions
from make_digits import make_digits, make_documents
from megatron_vlm.config import RunConfig, fewest_processes
from megatron_vlm.recipes import compose

HERE = Path(__file__).resolve().parent
FOLDER = Path("runs/demo-compose")  # as in the two recipes
STAGES = {"the projector alone": "compose_projector.yaml", "all of it": "compose_all.yaml"}


def main() -> None:
    started = time.monotonic()
    configs = [compose(file=HERE / name) for name in STAGES.values()]
    shutil.rmtree(FOLDER, ignore_errors=True)
    say("writing the digits as JPEG images, questions and documents")
    print({**make_digits(FOLDER / "raw"), "documents": make_documents(FOLDER / "raw")}, flush=True)
    say("building a tiny SigLIP2 and a tiny Llama with random weights")
    run([str(HERE / "make_checkpoint.py"), "parts", str(FOLDER)])
    say("composing them")
    run(["-m", "megatron_vlm.cli", "compose", *composed(FOLDER)])
    usage = timed(lambda: train(configs))
    model = FOLDER / "all" / "exports" / f"step_{configs[-1].train.steps:08d}"
    held_out, processes = FOLDER / "raw/held_out.jsonl", fewest_processes(configs[-1].parallel)
    say("answering the held-out questions with Megatron, and with Transformers from the exported folder")
    answers = evaluate("megatron", FOLDER / "all", held_out, FOLDER, processes)
    hf_answers = evaluate("transformers", model, held_out, FOLDER)
    questions = read_questions(held_out)
    draw_contact_sheet(questions, answers, FOLDER / "contact_sheet.png")
    summary = {
        **scores(questions, answers, hf_answers),
        **usage,
        "total_seconds": round(time.monotonic() - started, 1),
        "steps": sum(config.train.steps for config in configs),
        "family": "compose",
        "layout": f"{processes} processes, {layout(configs[-1])}, cpu",
        "versions": {"python": platform.python_version(), **versions()},
    }
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    close_with(summary, FOLDER, FOLDER / "all", model)


def composed(folder: Path) -> list[str]:
    """The words of `megatron-vlm compose`: an image of a digit gets four tokens, as in the other demos."""
    parts = [f"--tower={folder / 'siglip2'}", f"--language-model={folder / 'llama'}"]
    sizes = ["--min-image-tokens=2", "--max-image-tokens=4", "--projector-width=64"]
    return [*parts, *sizes, str(folder / "start")]


def train(configs: list[RunConfig]) -> None:
    for (what, name), config in zip(STAGES.items(), configs, strict=True):
        processes = fewest_processes(config.parallel)
        say(f"training {what}, {config.train.steps} steps on {processes} processes")
        run([str(HERE.parent / "run_recipe.py"), f"--config={HERE / name}", f"--nproc={processes}"])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
