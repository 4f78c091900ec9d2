"""A model learns to say where a digit lies; Transformers asks the exported folder, too.

`make demo TASK=boxes` runs this, with FAMILY as in `make demo`. Records have boxes in pixels of their images.
The package writes them as the family does, of the image as resized, and reads them back in the answers.
Everything lies in runs/demo-boxes or runs/demo-FAMILY-boxes; the numbers are in summary.json there.
"""

import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path

from PIL import Image

from demo import configuration, evaluate, run, say, timed, versions
from evaluate import read_questions
from make_boxes import Box, make_boxes, shared_area
from make_checkpoint import BOX_MODELS
from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.published import DEMO

HERE = Path(__file__).resolve().parent
ENOUGH = 0.5  # of what two boxes cover together, that both cover
PROCESSES = 2  # each has half of the samples
SETTINGS = ("tp=1", "micro_batch_size=16", "steps=1000", "eval_every=250", "dataset_type=hf")


def main() -> None:
    family = os.environ.get("FAMILY") or next(iter(BOX_MODELS))
    if os.environ["TASK"] != "boxes" or family not in BOX_MODELS:
        sys.exit(f"TASK=boxes is all there is, with FAMILY={' or '.join(BOX_MODELS)}.")
    started, config = time.monotonic(), configuration(family)
    folder = Path(f"{config.run_dir}-boxes")
    shutil.rmtree(folder, ignore_errors=True)
    say("writing canvases with digits, and questions about where these are")
    print(make_boxes(folder / "raw"), flush=True)
    say(f"building a tiny {family} checkpoint with random weights")
    run([str(HERE / "make_checkpoint.py"), "boxes", family, str(folder / "start")])
    say(f"training on {PROCESSES} processes")
    usage = timed(lambda: train(family, folder))
    say("answering the held-out questions with Megatron")
    held_out = folder / "raw/held_out.jsonl"
    answers = evaluate("megatron", folder, held_out, folder)
    say("exporting to a Hugging Face folder, and answering with Transformers")
    run(["-m", "megatron_vlm.cli", "export", str(folder), str(folder / "hf")])
    hf_answers = evaluate("transformers", folder / "hf", held_out, folder)
    questions = read_questions(held_out)
    found = [boxes_of(folder, questions, each) for each in (answers, hf_answers)]
    overlaps = [[*map(overlap, each, map(true_box, questions))] for each in found]
    draw_answers(questions, found[0], overlaps[0], folder / "contact_sheet.png")
    summary = {
        "boxes_right": share_right(overlaps[0]),
        "boxes_right_of_export": share_right(overlaps[1]),
        "mean_overlap": sum(overlaps[0]) / len(overlaps[0]),
        "same_answers": sum(a == b for a, b in zip(answers, hf_answers, strict=True)) / len(answers),
        "held_out_questions": len(questions),
        "example": answers[0],
        **usage,
        "total_seconds": round(time.monotonic() - started, 1),
        "steps": run_config(folder).train.steps,
        "family": family,
        "layout": f"{PROCESSES} processes, dp {PROCESSES}, cpu",
        "versions": {"python": platform.python_version(), **versions()},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    close_with(summary, folder)


def train(family: str, folder: Path) -> None:
    data = (f"train_data_path={folder}/raw/train.jsonl", f"valid_data_path={folder}/raw/held_out.jsonl")
    places = (f"run_dir={folder}", f"hf_path={folder}/start", *data)
    arguments = [f"--recipe={family}{DEMO}", f"--nproc={PROCESSES}", *places, *SETTINGS, *sys.argv[1:]]
    run([str(HERE.parent / "run_recipe.py"), *arguments])


def run_config(folder: Path) -> RunConfig:
    from megatron_vlm.overrides import from_yaml

    return from_yaml((folder / "config.yaml").read_text(encoding="utf-8"))


def boxes_of(folder: Path, questions: list[dict], answers: list[str]) -> list[Box | None]:
    """The box that each answer names, in pixels of its image; None if it names none."""
    from megatron_vlm.data.grounding.boxes import Boxes
    from megatron_vlm.models.hf import open_source

    source = open_source(str(folder / "hf"))
    reader = Boxes(source.processor, run_config(folder).data, source.needs.box_format)
    found = []
    for question, answer in zip(questions, answers, strict=True):
        shapes = reader.parse(answer, Image.open(question["images"][0]).size)
        boxes = [tuple(shape.numbers) for shape in shapes if len(shape.numbers) == 4]
        found.append(boxes[0] if boxes else None)
    return found


def true_box(question: dict) -> Box:
    return tuple(question["objects"]["bbox"][0])


def overlap(box: Box | None, other: Box) -> float:
    """What both boxes cover, as a share of what they cover together."""
    if box is None or not area(box):
        return 0.0
    both = shared_area(box, other)
    return both / (area(box) + area(other) - both)


def area(box: Box) -> float:
    return shared_area(box, box)


def share_right(overlaps: list[float]) -> float:
    return sum(each > ENOUGH for each in overlaps) / len(overlaps)


def draw_answers(
    questions: list[dict], boxes: list, overlaps: list[float], file: Path, count: int = 36
) -> None:
    """Draw the boxes that were said, in red, and the true ones, in green; the least overlap first."""
    from PIL import ImageDraw

    from contact_sheet import contact_sheet

    shown = sorted(range(len(questions)), key=overlaps.__getitem__)
    shown = shown[: count // 2] + shown[-count // 2 :]
    pictures = []
    for index in shown:
        picture = Image.open(questions[index]["images"][0]).convert("RGB")
        pen = ImageDraw.Draw(picture)
        for box, colour in ((true_box(questions[index]), "lime"), (boxes[index], "red")):
            if box and area(box):
                pen.rectangle(box, outline=colour, width=2)
        pictures.append([picture])
    digits = [questions[index]["objects"]["ref"][0] for index in shown]
    captions = [
        f"where is the {digit}?  {overlaps[index]:.0%}" for digit, index in zip(digits, shown, strict=True)
    ]
    contact_sheet(pictures, captions, [overlaps[index] > ENOUGH for index in shown], file)


def close_with(summary: dict, folder: Path) -> None:
    print(
        f"\nfound {summary['boxes_right']:.1%} of the held-out digits: said and true boxes have more than"
        f" half in common ({summary['mean_overlap']:.0%} in the mean)"
        f"\nthe exported folder found {summary['boxes_right_of_export']:.1%}, with"
        f" {summary['same_answers']:.1%} of the answers the same to the letter"
        f"\nan answer: {summary['example']}"
        f"\ntraining {summary['train_seconds']} s, everything {summary['total_seconds']} s"
        f"\n\nlook at  {folder}/contact_sheet.png  {folder}/loss.png  {folder}/summary.json"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
