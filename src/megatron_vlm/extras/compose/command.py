"""`megatron-vlm compose`: the command around `compose.composing`."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm.commands.arguments import on_disk
from megatron_vlm.config import ConfigError
from megatron_vlm.extras.compose.sources import (
    NEW_ROWS,
    ROLES,
    TOWERS,
    Choices,
    named_tokens,
    open_language_model,
    open_tower,
)
from megatron_vlm.files import read_text, refuse_existing
from megatron_vlm.messages import printable, suggestion
from megatron_vlm.supported import read_config


def compose(
    output: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.", callback=on_disk)],
    tower: Annotated[str, typer.Option(help="SigLIP2, SigLIP, CLIP or Pixtral: folder or hub name.")],
    language_model: Annotated[
        str, typer.Option(help="Llama 3, Mistral, Qwen2 or Qwen3: folder or hub name.")
    ],
    token: Annotated[
        list[str] | None, typer.Option(help=f"ROLE=TOKEN for one of {', '.join(ROLES)}; again for more.")
    ] = None,
    new_rows: Annotated[
        str, typer.Option(help="Rows of added tokens: mean of the present ones, or normal around it.")
    ] = "mean",
    vocab_multiple: Annotated[
        int | None, typer.Option(min=1, help="Rows of the embedding are a multiple of it, for TP.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the projector, and of rows that are drawn.")] = 0,
    min_image_tokens: Annotated[int | None, typer.Option(min=1, help="Fewest of an image (SigLIP2).")] = None,
    max_image_tokens: Annotated[int | None, typer.Option(min=1, help="Most of an image (SigLIP2).")] = None,
    projector_width: Annotated[
        int | None, typer.Option(min=1, help="Inner width of the projector (SigLIP2); default 2560.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A jinja file; default: one in the tokenizer's style.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the special tokens and stop.")] = False,
) -> None:
    """Make a model out of a vision tower and a language model."""
    output = output.resolve()
    tokens = named_tokens(token or ())
    if new_rows not in NEW_ROWS:
        raise ConfigError(f"--new-rows {new_rows} does not exist{suggestion(new_rows, NEW_ROWS)}")
    refuse_existing(output)
    template = read_text(chat_template) if chat_template else None
    vision = open_tower(tower)
    language = open_language_model(language_model)
    options = {
        "min_image_tokens": min_image_tokens,
        "max_image_tokens": max_image_tokens,
        "projector_width": projector_width,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if options and TOWERS[vision.config["model_type"]] != "lfm2_vl":
        raise ConfigError(
            "--min-image-tokens, --max-image-tokens, --projector-width: with a "
            f"{vision.config['model_type']} they are given; leave them out, or give a SigLIP2 NaFlex tower."
        )

    from megatron_vlm.extras.compose import composing  # imports torch and Transformers

    choices = Choices(**options)
    plan = composing.plan(vision, language, tokens, choices, new_rows, vocab_multiple, template, seed)
    typer.echo(plan.table())
    if dry_run:
        return
    composing.write(plan, output)
    typer.echo(f"wrote {output}")
    try:
        read_config(output)
    except ConfigError as error:
        typer.echo(printable(f"Transformers loads it; this package does not train it yet: {error}"))
