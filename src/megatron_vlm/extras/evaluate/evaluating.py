"""The evaluation of a run or a checkpoint: its answers, their scores, and the page of the worst."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from megatron_vlm.commands.runs import open_run
from megatron_vlm.config import MISSING, ConfigError, RunConfig
from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.data.encode.questions import Question
from megatron_vlm.extras.evaluate import files
from megatron_vlm.extras.evaluate.answering import Asking, Record, Scored, answers, scored
from megatron_vlm.extras.evaluate.answers_page import ShownAnswer, answers_page, seen_pictures, with_boxes
from megatron_vlm.extras.evaluate.metrics import METRICS, Metric
from megatron_vlm.extras.evaluate.questions import Questions, open_questions
from megatron_vlm.files import write_whole
from megatron_vlm.job import watchdog
from megatron_vlm.messages import printable
from megatron_vlm.models.hf import Source
from megatron_vlm.parallel import setup
from megatron_vlm.run_folder.checkpoint_files import read_state
from megatron_vlm.run_folder.folder import latest_checkpoint


def evaluate_model(
    config: RunConfig,
    metrics: Mapping[str, Metric],
    how: Asking,
    output: Path,
    samples: int | None,
    shown: int,
) -> Iterator[str]:
    """Answers the rows that the configuration holds out, and yields lines about the scores on the first rank.

    Every process of the layout calls it. Goes on where the folder's answers end. Raises ConfigError for a
    folder of another evaluation, and for boxes if nothing tells how the model writes them.
    """
    chunks, source = open_run(config, raw_pixels=True)
    questions = open_questions(config.data, source, how.max_new_tokens, samples, how.seed)
    if METRICS["boxes"] in metrics.values() and not questions.boxes.tells:
        raise ConfigError(
            f"--metric boxes: {source.description.hf_config.model_type} publishes no way to write "
            "boxes; give data.box_format=NAME."
        )
    settings = {"model": _identity(config, source), **_of_answers(how), **questions.fingerprint}
    settings |= {"dtype": config.model.dtype}
    first = setup.is_first_rank()
    locks: list[BinaryIO] = []
    setup.on_first_rank(lambda: locks.append(files.claim(output)))
    watchdog.claim_files()
    done = setup.on_first_rank(files.begin, output, settings)
    setup.on_first_rank(_check_place, output, questions, done)
    with tqdm(total=len(questions), initial=done, unit="answer", disable=None if first else True) as bar:
        for records in answers(chunks, source, questions, how, done, config.data.num_workers):
            if first:
                files.append(output, records)
            bar.update(len(records))
    watchdog.beat("scoring the answers")
    if first:
        records = files.read_answers(output)
        if len(records) > len(questions):
            raise ConfigError(
                f"{printable(output)}/answers.jsonl: {len(records)} lines for {len(questions)} questions are "
                "not what an evaluation wrote; remove the folder, or give another one."
            )
        result = scored(records, metrics, questions.boxes, how.seed)
        write_whole(output / "scores.json", scores_text(result, records))
        page = _page(config, questions, source, records, result, shown)
        write_whole(output / "answers.html", page)
        yield f"{len(records)} questions of {printable(questions.name)}"
        yield from questions.notes()
        yield from result.lines()
        yield f"wrote {printable(output)}/answers.jsonl, scores.json and answers.html"
        locks[0].close()
    setup.shutdown()


def _check_place(output: Path, questions: Questions, done: int) -> None:
    """Raise ConfigError unless the last answer of the folder is the one to question `done` - 1.

    It is another one if a line of answers.jsonl was lost.
    """
    if not 0 < done <= len(questions):
        return
    question = questions[done - 1]
    key = question.key if isinstance(question, Question) else question["key"]
    last = files.read_answers(output)[-1]["key"]
    if last != key:
        raise ConfigError(
            f"{printable(output)}/answers.jsonl: line {done} has the key {printable(last)}, and question "
            f"{done} has {printable(key)}; remove the folder, or give another one."
        )


def scores_text(result: Scored, records: list[Record]) -> str:
    """All scores as JSON, and a line for each record's own."""
    head = {"scores": {name: asdict(score) for name, score in result.scores.items()}}
    head |= {"problems": result.problems, "missing": result.missing}
    lines = []
    for record, parts in zip(records, result.of_records, strict=True):
        own = {name: points / of if of else None for name, (points, of) in parts.items()}
        lines.append(json.dumps({"key": record["key"], **own}))
    return json.dumps(head, indent=1)[:-2] + ',\n "samples": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _of_answers(how: Asking) -> dict[str, Any]:
    """The settings that decide an answer; greedy ones are not drawn."""
    settings = asdict(how)
    del settings["batch_size"]
    return settings if how.temperature else {"max_new_tokens": how.max_new_tokens, "temperature": 0.0}


def _identity(config: RunConfig, source: Source) -> list[str]:
    """The model that answers: a run's checkpoint by its checksums, or a checkpoint's files as they are."""
    if config.run_dir != MISSING:
        latest = latest_checkpoint(config.run_dir)
        return [latest.name, digest(read_state(latest)["files"])]
    read = [path for path in sorted(source.folder.iterdir()) if path.suffix in (".safetensors", ".json")]
    stats = [(path.name, path.stat()) for path in read]
    return [config.model.hf_path, digest([[name, of.st_size, of.st_mtime_ns] for name, of in stats])]


def _page(
    config: RunConfig,
    questions: Questions,
    source: Source,
    records: list[Record],
    result: Scored,
    shown: int,
) -> str:
    """The page of the worst answers by the first figure."""
    worst: list[ShownAnswer] = []
    for name, score in list(result.scores.items())[:1]:
        own = [(parts[name], place) for place, parts in enumerate(result.of_records) if name in parts]
        sign = 1 if score.higher_is_better else -1
        for _, place in sorted((sign * points / max(of, 1), place) for (points, of), place in own)[:shown]:
            visual = questions[place].prompt["visual_inputs"]
            parts = result.of_records[place]
            pictures = seen_pictures(visual, source.processor)
            if "iou" in parts and len(pictures) == 1:
                pictures = [with_boxes(pictures[0], records[place], questions.boxes)]
            worst.append(ShownAnswer(records[place], parts, pictures))
    title = config.name if config.run_dir != MISSING else config.model.hf_path
    return answers_page(title, questions.name, result.scores, {**result.problems, **result.missing}, worst)
