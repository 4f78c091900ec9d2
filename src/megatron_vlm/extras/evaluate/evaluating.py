"""The evaluation of a run or a checkpoint: its answers, their scores, and their page.

settings.json   what decides the answers; another evaluation in the folder is refused
answers.jsonl   one line for each question, in order, as answers come
scores.json     the scores, and each answer's own
answers.html    the worst and the best answers, with their images
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image
from tqdm import tqdm

from megatron_vlm.commands.runs import open_run
from megatron_vlm.config import MISSING, ConfigError, RunConfig
from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.extras.evaluate.answering import (
    Questions,
    Record,
    Scored,
    answers,
    keys_of,
    open_questions,
    scored,
)
from megatron_vlm.extras.evaluate.metrics import METRICS, Metric
from megatron_vlm.extras.pages import render
from megatron_vlm.extras.preview.rows import seen_pictures, with_shapes
from megatron_vlm.files import atomic_write, open_to_write, read_file, read_text
from megatron_vlm.messages import QUIET
from megatron_vlm.models.hf import Source
from megatron_vlm.parallel import setup
from megatron_vlm.run_folder import OF_AN_EVALUATION, latest_checkpoint, take_lock

SHOWN = 20  # worst answers on the page, and as many of the best
RIGHT = 0.5  # the score from which an answer is right, as ANLS has it
MOST_PICTURES = 8  # of an answer on the page; a video has many frames


def evaluate_model(
    config: RunConfig, metrics: Mapping[str, Metric], output: Path, samples: int | None, max_new_tokens: int
) -> Iterator[str]:
    """Answers the rows that the configuration holds out, and yields lines about the scores on the first rank.

    Every process of the layout calls it. Goes on where the folder's answers end. Raises ConfigError for a
    folder of another evaluation, and for boxes if nothing tells how the model writes them.
    """
    chunks, source = open_run(config, raw_pixels=True)
    questions = open_questions(config.data, source, max_new_tokens, samples)
    if METRICS["boxes"] in metrics.values() and not questions.boxes.tells:
        raise ConfigError(
            f"--metric boxes: {source.description.hf_config.model_type} publishes no way to write "
            "boxes; give data.box_format=NAME."
        )
    settings = {"model": _identity(config, source), "max_new_tokens": max_new_tokens}
    settings |= {"dtype": config.model.dtype, **questions.fingerprint}
    locks: list[BinaryIO] = []  # held until the evaluation ends
    records = setup.on_first_rank(_begin, output, settings, locks)
    is_first = setup.is_first_rank()
    quiet = QUIET in os.environ or not is_first or None  # None: where there is no terminal
    with tqdm(total=len(questions), initial=len(records), unit="answer", disable=quiet) as bar:
        for some in answers(chunks, source, questions, max_new_tokens, len(records), config.data.num_workers):
            records += some
            if is_first:
                with open_to_write(output / "answers.jsonl", "ab") as file:
                    file.writelines(json.dumps(record).encode() + b"\n" for record in some)
            bar.update(len(some))
    if is_first:
        result = scored(records, metrics, questions.boxes)
        title = config.name if config.run_dir != MISSING else config.model.hf_path
        facts = {"model": config.model.hf_path, "checkpoint": settings["model"][0], "data": questions.name}
        facts |= {"questions": f"{len(records):,}"}
        _write(output, title, facts, questions, source, records, result)
        yield f"{len(records)} questions of {questions.name}"
        yield from result.lines()
        yield f"wrote {output}/answers.jsonl, scores.json and answers.html"
    setup.shutdown()


def _identity(config: RunConfig, source: Source) -> list[str]:
    """The name of the checkpoint that answers, and a digest of when its files were written."""
    folder = latest_checkpoint(config.run_dir) if config.run_dir != MISSING else source.folder
    return [folder.name, digest([[path.name, path.stat().st_mtime_ns] for path in sorted(folder.iterdir())])]


def _begin(folder: Path, settings: dict[str, Any], locks: list[BinaryIO]) -> list[Record]:
    """Begin in the folder, or go on in it. Return the answers it has; a line that was cut short goes.

    Raises:
        ConfigError: The folder has answers of another evaluation, or another one is going on in it.
    """
    locks.append(take_lock(folder, whose=OF_AN_EVALUATION))
    kept = folder / "settings.json"
    text = json.dumps(settings, indent=1)
    if kept.exists() and read_text(kept) != text:
        raise ConfigError(
            f"--output: {folder} has answers of another model, to other questions or with other "
            "settings; give a new folder."
        )
    atomic_write(kept, text)
    file = folder / "answers.jsonl"
    lines = read_file(file).splitlines(keepends=True) if file.exists() else []
    complete_lines = [line for line in lines if line.endswith(b"\n")]
    atomic_write(file, complete_lines)
    return [json.loads(line) for line in complete_lines]


def _write(
    output: Path,
    title: str,
    facts: dict[str, str],
    questions: Questions,
    source: Source,
    records: list[Record],
    result: Scored,
) -> None:
    """Write scores.json and answers.html."""
    samples = [
        keys_of(record["key"], record.get("id")) | record_scores
        for record, record_scores in zip(records, result.of_records, strict=True)
    ]
    scores = {name: asdict(score) for name, score in result.scores.items()}
    content = {"scores": scores, "unscored": result.unscored, "samples": samples}
    atomic_write(output / "scores.json", json.dumps(content, indent=1) + "\n")
    # the page has the worst and the best answers, with the images as the model saw them
    answers_shown = []
    for place, is_right in _ranked(result):
        figures = result.of_records[place]
        pictures = seen_pictures(questions[place].prompt["visual_inputs"], source.processor)[:MOST_PICTURES]
        if "iou" in figures and len(pictures) == 1:
            pictures = [_with_boxes(pictures[0], records[place], questions)]
        answer = {"record": records[place], "scores": figures, "pictures": pictures, "is_right": is_right}
        answers_shown.append(answer)
    page = render("evaluate/answers.html", title=title, facts=facts, result=result, answers=answers_shown)
    atomic_write(output / "answers.html", page)


def _ranked(result: Scored) -> list[tuple[int, bool]]:
    """The places of the worst and of the best answers by the first figure, and whether each is right."""
    for name, score in result.scores.items():
        places = [place for place, figures in enumerate(result.of_records) if name in figures]
        places.sort(key=lambda place: result.of_records[place][name], reverse=not score.higher_is_better)
        places = places[:SHOWN] + places[SHOWN:][-SHOWN:]
        values = [result.of_records[place][name] for place in places]
        rights = [value >= RIGHT if score.higher_is_better else value <= RIGHT for value in values]
        return [*zip(places, rights, strict=True)]
    return []


def _with_boxes(picture: Image.Image, record: Record, questions: Questions) -> Image.Image:
    """The picture with the boxes of an answer and of its references, each labelled so."""
    for label, texts in (("reference", record["references"]), ("answer", [record["answer"]])):
        for text in texts:
            picture = with_shapes(picture, questions.boxes.seen(text, picture.size), label)
    return picture
