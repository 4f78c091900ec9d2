"""`megatron-vlm preview` and `replay`: training data as the model sees it."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm.commands import arguments
from megatron_vlm.files import write_output
from megatron_vlm.messages import aligned, join_lines, printable


def preview(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    dataset_type: arguments.DatasetType = None,
    model: arguments.Model = None,
    data: arguments.Data = None,
    valid_data: arguments.ValidData = None,
    run_dir: arguments.RunDir = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to read and to count.")] = 100,
    rows_shown: Annotated[int, typer.Option("--shown", min=0, help="Rows to show whole.")] = 10,
    output: arguments.HtmlFile = Path("preview.html"),
    as_json: arguments.Json = False,
) -> None:
    """Write a page of the training data as the model will see it.

    Prints how long its samples are, and the notes of a run's start. The page has images as
    processed, text with the trained tokens marked, documents of a row, and what was dropped.
    """
    flags = arguments.given_flags(model, data, valid_data, dataset_type=dataset_type, run_dir=run_dir)
    config = arguments.recipe_table.compose(recipe, file, settings or (), flags, arguments.ONE_PROCESS)
    arguments.check(config, 1)

    # imports torch, so it comes after the checks
    from megatron_vlm.extras.preview.preview import preview_page

    with arguments.prose(as_json):
        page, figures, notes = preview_page(config, rows, rows_shown)
    write_output(output, page)
    if as_json:
        (_, *heads), *table = figures
        lengths = {name: dict(zip(heads, map(_number, texts), strict=True)) for name, *texts in table}
        arguments.print_json(lengths=lengths, notes=notes, page=str(output))
        return
    typer.echo(join_lines([*aligned(figures), *notes, f"wrote {output}"]))


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def replay(
    run_dir: Annotated[Path, typer.Argument(help="The run folder.")],
    settings: arguments.Settings = None,
    step: Annotated[int, typer.Option(min=1, help="The step, counted from 1.")] = 1,
    output: arguments.HtmlFile = None,
) -> None:
    """Show the very samples that a step of a run was trained on.

    Prints their keys, and writes a page with --output.
    """
    config = arguments.config_of_run(run_dir, settings, None)

    from megatron_vlm.callbacks.samples import read_step

    logged = read_step(run_dir, step)
    for row in logged:
        for number, keys in enumerate(row["keys"]):
            place = f"rank {row['rank']} · micro batch {row['micro_batch']} · row {number}"
            typer.echo(printable(f"{place}: {', '.join(keys)}"))
    if output is None:
        return

    # a page needs the samples again: data and processor are opened, and torch is imported
    from megatron_vlm.extras.preview.preview import replay_page

    write_output(output, replay_page(config, step, logged))
    typer.echo(f"wrote {output}")
