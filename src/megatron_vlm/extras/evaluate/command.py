"""`megatron-vlm evaluate`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm.checks import data_problems, is_energon
from megatron_vlm.commands import arguments
from megatron_vlm.config import ConfigError, RunConfig, setting_types
from megatron_vlm.job import watchdog
from megatron_vlm.messages import join_lines, printable
from megatron_vlm.overrides import apply_overrides

NAMES = ("exact_match", "contained", "anls", "boxes")  # of metrics, whose file is slow to import


def evaluate(
    model: Annotated[str, typer.Argument(help="A run folder, or a Hugging Face folder or hub name.")],
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
) -> None:
    """Score a model's answers to held-out conversations.

    It answers the last turn of each, and is scored against the reply there. Writes into --output:
    answers.jsonl, as they come, so that a killed evaluation goes on; scores.json; and answers.html, a page of
    the worst answers with their images.
    """
    # DATA may be left out: then the first word may be a setting already
    if data and data.partition("=")[0] in {*setting_types(), *arguments.recipe_table.ARGUMENTS}:
        settings = [data, *(settings or ())]
        data = None
    settings = settings or []

    from megatron_vlm.extras.evaluate.metrics import metric_of

    metrics = {name: metric_of(name) for name in metric or ["exact_match"]}
    config = with_data(arguments.config_of_model(model, settings, nproc), data)
    check_folder(output)
    arguments.prepare_cuda(config.parallel)
    # with --nproc this process only starts the ranks, which run the same command
    if nproc:
        flags = {"output": output, "samples": samples, "max-new-tokens": max_new_tokens}
        flags["metric"] = list(metrics)
        words = [model, *([data] if data else [])]
        raise typer.Exit(arguments.start_ranks(nproc, "evaluate", flags, [*words, *settings]))

    from megatron_vlm.extras.evaluate.evaluating import evaluate_model

    with watchdog.watching(output / "errors", config.train.hang_seconds):
        for line in evaluate_model(config, metrics, output, samples, max_new_tokens):
            typer.echo(printable(line))


def check_folder(output: Path) -> None:
    """Raise ConfigError if a folder holds something else than an evaluation."""
    names = set(os.listdir(output)) if output.exists() else set()
    if names - {"errors", "lock"} and "settings.json" not in names:
        raise ConfigError(f"--output: {output} holds no evaluation; give a new folder.")


def with_data(config: RunConfig, data: str | None) -> RunConfig:
    """The configuration whose held-out rows are the data, if that is given. Raises ConfigError for data that
    cannot be read, and if there is none."""
    if data is None:
        if config.data.train_data_path == arguments.NO_DATA:
            raise ConfigError("evaluate: give DATA, conversations to answer: a file, a folder or a hub name.")
        return config
    held_out = {"data.valid_data_path": data, "data.validation_share": 0.0, "data.streaming": False}
    held_out["data.dataset_type"] = "energon" if is_energon(data) else "hf"
    config = apply_overrides(config, held_out)
    if problems := list(data_problems(config.data.dataset_type, "DATA", data)):
        raise ConfigError(join_lines(problems))
    return config
