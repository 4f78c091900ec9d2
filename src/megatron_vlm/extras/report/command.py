"""`megatron-vlm report`: the page of a run, or of several over each other."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm.commands.arguments import output_file
from megatron_vlm.extras.report.history import read_history
from megatron_vlm.extras.report.live import FILE
from megatron_vlm.files import write_output
from megatron_vlm.messages import printable


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The page; default: report.html, of one run in its folder.", callback=output_file),
    ] = None,
) -> None:
    """Write a page of a run, or of several over each other.

    It has curves, settings, data and checkpoints, and needs no network. A run writes its own at each
    checkpoint and now and then between.
    """
    page = output or (run_dirs[0] / FILE if len(run_dirs) == 1 else Path(FILE))

    from megatron_vlm.extras.report.page import report_page

    write_output(page, report_page([read_history(folder) for folder in run_dirs]))
    typer.echo(printable(f"wrote {page}"))
