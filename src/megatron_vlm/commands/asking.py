"""The command that asks a run's model a question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm.commands.arguments import config_of_trained_run, existing
from megatron_vlm.config import ConfigError
from megatron_vlm.files import read_file


def generate(
    run_dir: Annotated[Path, typer.Argument(help="The run folder.")],
    question: Annotated[str, typer.Argument(help="The user's turn; <image> stands for each image.")],
    image: Annotated[
        list[Path] | None, typer.Option(help="An image file; give one for each <image>.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token, else sampled.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1, help="Sample among the likeliest, which together have this.")
    ] = 1.0,
    answers: Annotated[int, typer.Option(min=1, help="So many sampled answers, a line between them.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answers.")] = 0,
) -> None:
    """Ask a run's latest checkpoint a question, in one process."""
    if answers > 1 and not temperature:
        raise ConfigError(
            f"--answers {answers}: at temperature 0 all are the same; add --temperature 1, or ask for one."
        )
    images = [read_file(existing(path)) for path in image or ()]
    config = config_of_trained_run(run_dir, None, None)

    from megatron_vlm.commands.runs import generate_from_run

    sampling = {"temperature": temperature, "top_p": top_p, "answers": answers, "seed": seed}
    typer.echo("\n---\n".join(generate_from_run(config, question, images, max_new_tokens, **sampling)))
