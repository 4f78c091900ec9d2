"""The command that asks a model a question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm.commands.arguments import config_of_model, image_of
from megatron_vlm.config import ConfigError
from megatron_vlm.messages import printable_lines


def generate(
    model: Annotated[str, typer.Argument(help="A run folder, or a Hugging Face folder or hub name.")],
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
    """Ask a run's latest checkpoint, or a Hugging Face checkpoint, a question, in one process."""
    if answers > 1 and not temperature:
        raise ConfigError(
            f"--answers {answers}: at temperature 0 all are the same; add --temperature 1, or ask for one."
        )
    images = [image_of(path) for path in image or ()]
    config = config_of_model(model)

    from megatron_vlm.commands.runs import generate_from_run

    sampling = {"temperature": temperature, "top_p": top_p, "answers": answers, "seed": seed}
    found = generate_from_run(config, question, images, max_new_tokens, **sampling)
    typer.echo(printable_lines("\n---\n".join(found)))
