"""`megatron-vlm evaluate`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm.checks import data_problems, is_energon
from megatron_vlm.commands import arguments
from megatron_vlm.config import ConfigError, RunConfig, setting_types
from megatron_vlm.files import read_text
from megatron_vlm.job import watchdog
from megatron_vlm.messages import join_lines, printable
from megatron_vlm.overrides import apply_overrides

NAMES = ("exact_match", "contained", "anls", "boxes")  # of metrics, whose file is slow to import


def evaluate(
    model: Annotated[
        str | None, typer.Argument(help="A run folder, or a Hugging Face folder or hub name.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Argument(help="Held-out conversations: file, folder, hub name; default: the run's own."),
    ] = None,
    settings: arguments.Settings = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(NAMES)}, or file.py:function; again for more. Default: exact_match."),
    ] = None,
    output: arguments.Folder = Path("evaluation"),
    samples: Annotated[int | None, typer.Option(min=1, help="Ask so many, drawn at random.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    nproc: arguments.Processes = None,
    model_flag: Annotated[str | None, typer.Option("--model", help="The same as MODEL.")] = None,
    data_flag: Annotated[
        list[str] | None, typer.Option("--data", help="The same as DATA; repeat for several.")
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Score a model's answers to held-out conversations.

    It answers the last turn of each, and is scored against the reply there. Writes into --output:
    answers.jsonl, as they come, so that a killed evaluation goes on; scores.json; and answers.html, a page of
    the worst and the best answers with their images.
    """
    # MODEL may be a flag, and DATA that or left out: a word in their place is then the next, or a setting
    settings = [word for word in (model, data, *(settings or ())) if word]
    model = model_flag or _take_place(settings)
    data = data_flag or list(filter(None, [_take_place(settings)]))
    if model is None:
        raise ConfigError("evaluate: give MODEL, a run folder or a checkpoint.")

    from megatron_vlm.extras.evaluate.metrics import metric_of

    metrics = {name: metric_of(name) for name in metric or ["exact_match"]}
    config = with_data(arguments.config_of_model(model, settings, nproc), data)
    check_folder(output)
    arguments.prepare_cuda(config.parallel)
    # with --nproc this process only starts the ranks, which run the same command
    if nproc:
        flags = {"output": output, "samples": samples, "max-new-tokens": max_new_tokens}
        flags["metric"] = list(metrics)
        words = [model, *(f"--data={path}" for path in data), *(["--json"] if as_json else [])]
        raise typer.Exit(arguments.start_ranks(nproc, "evaluate", flags, [*words, *settings]))

    from megatron_vlm.extras.evaluate.evaluating import evaluate_model

    with watchdog.watching(output / "errors", config.train.hang_seconds), arguments.prose(as_json):
        for line in evaluate_model(config, metrics, output, samples, max_new_tokens):
            typer.echo(printable(line))
    if as_json and watchdog.rank() == 0:
        scores = json.loads(read_text(output / "scores.json"))
        del scores["samples"]  # as many as questions; the file has them
        arguments.print_json(**scores, output=str(output))


def _take_place(words: list[str]) -> str | None:
    """Take the first word out of the list, unless it is a setting."""
    names = {*setting_types(), *arguments.recipe_table.ARGUMENTS}
    return words.pop(0) if words and words[0].partition("=")[0] not in names else None


def check_folder(output: Path) -> None:
    """Raise ConfigError if a folder holds something else than an evaluation."""
    names = set(os.listdir(output)) if output.exists() else set()
    if names - {"errors", "lock"} and "settings.json" not in names:
        raise ConfigError(f"--output: {output} holds no evaluation; give a new folder.")


def with_data(config: RunConfig, data: Sequence[str]) -> RunConfig:
    """The configuration whose held-out rows are the data, if that is given. Raises ConfigError for data that
    cannot be read, and if there is none."""
    if not data:
        if config.data.train_data_path == arguments.NO_DATA:
            raise ConfigError("evaluate: give DATA, conversations to answer: a file, a folder or a hub name.")
        return config
    held_out = {
        "data.valid_data_path": data[0] if len(data) == 1 else list(data),
        "data.validation_share": 0.0,
        "data.streaming": False,
    }
    held_out["data.dataset_type"] = "energon" if is_energon(data[0]) else "hf"
    config = apply_overrides(config, held_out)
    if problems := list(data_problems(config.data.dataset_type, "DATA", config.data.valid_data_path)):
        raise ConfigError(join_lines(problems))
    return config
