"""LoRA teaches a model that knows five digits the other five, and leaves its weights as they were.

`make demo ADAPTER=lora` runs this, with FAMILY as in `make demo`. The start is made here, too: a checkpoint
of random weights is trained whole on images of 0 to 4 alone, and exported. Everything lies in runs/demo-lora
or runs/demo-FAMILY-lora; the numbers are in summary.json there.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path

from demo import accuracy, build_checkpoint, configuration, evaluate, run, say, torchrun, versions
from evaluate import read_questions
from make_digits import make_digits
from megatron_vlm.recipes.published import DEMO

HERE = Path(__file__).resolve().parent
FIRST = tuple("01234")
STEPS = {"start": 200, "adapters": 250}
ADAPTERS = ("adapter.r=16", "adapter.lora_alpha=32", "adapter.target_modules=all-linear", "lr=4e-3")


def main() -> None:
    if os.environ["ADAPTER"] != "lora":
        sys.exit(f"ADAPTER={os.environ['ADAPTER']}: the demo knows lora alone.")
    started, family = time.monotonic(), os.environ.get("FAMILY") or "gemma3"
    folder = Path(f"runs/{configuration(family).name}-lora")
    shutil.rmtree(folder, ignore_errors=True)
    held_out = prepare_data(folder / "raw")
    build_checkpoint(family, folder)
    say(f"training all of it on the digits {', '.join(FIRST)}")
    train(family, folder / "five", folder / "start", folder / "raw/first.jsonl", STEPS["start"])
    run(["-m", "megatron_vlm.cli", "export", str(folder / "five"), str(folder / "five_hf")])
    before = evaluate("transformers", folder / "five_hf", held_out, folder)
    say("training adapters on all ten digits")
    data = folder / "raw/train.jsonl"
    train(family, folder / "lora", folder / "five_hf", data, STEPS["adapters"], ADAPTERS)
    base = base_weights(folder / "lora")
    say("exporting the adapters, and answering with peft and Transformers")
    run(["-m", "megatron_vlm.cli", "export", str(folder / "lora"), str(folder / "peft"), "--adapter"])
    after = evaluate("transformers", folder / "peft", held_out, folder)
    summary = {
        **scores(read_questions(held_out), before, after),
        **base,
        "total_seconds": round(time.monotonic() - started, 1),
        "steps": STEPS,
        "family": family,
        "versions": {"python": platform.python_version(), **versions()},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    close_with(summary, folder)


def prepare_data(raw: Path) -> Path:
    """Questions about one image: `train.jsonl`, of its first five digits `first.jsonl`, `held_out.jsonl`."""
    say("writing the digits as JPEG images and questions")
    print(make_digits(raw, train_pairs=0, held_out_pairs=0))
    lines = (raw / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    known = (line for line in lines if json.loads(line)["conversations"][1]["value"] in FIRST)
    (raw / "first.jsonl").write_text("".join(known), encoding="utf-8")
    return raw / "held_out.jsonl"


def train(
    family: str, folder: Path, start: Path, data: Path, steps: int, settings: tuple[str, ...] = ()
) -> None:
    places = (f"run_dir={folder}", f"hf_path={start}", "dataset_type=hf", f"train_data_path={data}")
    arguments = [f"--recipe={family}{DEMO}", *places, f"steps={steps}", "eval_every=0", *settings]
    run([*torchrun(2), str(HERE / "train_and_compare.py"), *arguments, *sys.argv[1:]])


def base_weights(run_dir: Path) -> dict[str, int]:
    """What `train_and_compare.py` found on each process; ends the demo if a weight has changed."""
    found = [json.loads(file.read_text()) for file in sorted(run_dir.glob("weights_*.json"))]
    if changed := sorted({name for rank in found for name in rank["changed"] if "adapters." not in name}):
        sys.exit(f"base weights have changed: {', '.join(changed)}")
    assert all(any("adapters." in name for name in rank["changed"]) for rank in found), "nothing was trained"
    return {"base_weights_equal": sum(len(rank["equal"]) for rank in found), "processes": len(found)}


def scores(questions: list[dict], before: list[str], after: list[str]) -> dict[str, float]:
    """Shares of right answers before and after the adapters, of the digits known before and of the others."""
    found = {}
    for name, is_first in (("first_five", True), ("other_five", False)):
        for when, answers in (("before", before), ("after", after)):
            pairs = list(zip(questions, answers, strict=True))
            pairs = [(asked, said) for asked, said in pairs if (asked["answer"] in FIRST) == is_first]
            found[f"{name}_{when}"] = accuracy(*map(list, zip(*pairs, strict=True)), "digit")
    return found


def close_with(summary: dict, folder: Path) -> None:
    shares = {name: f"{value:.1%}" for name, value in summary.items() if name.endswith(("before", "after"))}
    print(
        "\nread right of the held-out digits    before    with adapters"
        f"\n    0 to 4, known before     {shares['first_five_before']:>15}{shares['first_five_after']:>17}"
        f"\n    5 to 9                   {shares['other_five_before']:>15}{shares['other_five_after']:>17}"
        f"\nbase weights: {summary['base_weights_equal']} tensors on {summary['processes']} processes, all "
        "bit-equal before and after training"
        f"\neverything {summary['total_seconds']} s"
        f"\n\nload     {folder}/peft  with peft, over  {folder}/five_hf"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
