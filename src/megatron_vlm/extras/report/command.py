"""`megatron-vlm report` and `megatron-vlm runs`: what run folders tell, without the model."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_vlm.commands.arguments import output_file
from megatron_vlm.config import ConfigError
from megatron_vlm.extras.report.history import STATES, History, find_runs, read_history
from megatron_vlm.extras.report.live import FILE
from megatron_vlm.files import write_output
from megatron_vlm.messages import aligned, printable

DAMAGED = "damaged"
EVERY = 15  # seconds
SORTS: dict[str, Callable[[History], Any]] = {
    "name": lambda run: str(run.folder),
    "state": lambda run: STATES.index(run.state),
    "step": lambda run: -run.step,
    "loss": lambda run: run.last.get("loss", float("inf")),
    "best": lambda run: run.best or (float("inf"), 0),
    "when": lambda run: -run.changed,
}
HEADS = ("run", "state", "step", "loss", "best", "when", "last line")


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The page; default: report.html, of one run in its folder.", callback=output_file),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Write it again while a run goes on.")] = False,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two pages of --follow.")] = EVERY,
) -> None:
    """Write a page of a run, or of several over each other: curves, settings, data, checkpoints, commands.

    The page needs no network. A run writes its own at each checkpoint and now and then between.
    """
    if every != EVERY and not follow:
        raise ConfigError(
            f"--every {every:g}: one page is written without --follow; add it, or leave --every out."
        )
    page = output or (run_dirs[0] / FILE if len(run_dirs) == 1 else Path(FILE))

    from megatron_vlm.extras.report.page import report_page

    while True:
        histories = [read_history(folder) for folder in run_dirs]
        write_output(page, report_page(histories))
        typer.echo(f"wrote {printable(page)}")
        if not (follow and any(history.running for history in histories)):
            return
        time.sleep(every)


def runs(
    folder: Annotated[Path, typer.Argument(help="Where run folders lie, at any depth up to four.")] = Path(
        "runs"
    ),
    state: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(STATES)} or {DAMAGED}; again for more.")
    ] = None,
    sort: Annotated[str, typer.Option(help=f"By {', '.join(SORTS)}.")] = "when",
) -> None:
    """List the runs of a folder: state, step, loss, best value of train.best_by, when, and why one died."""
    if not folder.is_dir():
        raise ConfigError(f"{printable(folder)} is no folder; give one that holds runs.")
    if sort not in SORTS:
        raise ConfigError(f"--sort {printable(sort)}: give one of {', '.join(SORTS)}.")
    for asked in state or ():
        if asked not in (*STATES, DAMAGED):
            raise ConfigError(f"--state {printable(asked)}: give one of {', '.join((*STATES, DAMAGED))}.")
    readable: list[tuple[Any, tuple[str, ...]]] = []
    damaged: list[tuple[str, ...]] = []
    for path in find_runs(folder):
        try:
            history = read_history(path)
            readable.append((SORTS[sort](history), _line(history)))
        except (OSError, ValueError) as error:  # the others are listed all the same
            damaged.append((printable(path), DAMAGED, "", "", "", "", printable(error)))
    lines = [line for _, line in sorted(readable)] + damaged
    lines = [line for line in lines if not state or line[1] in state]
    if not lines:
        typer.echo(f"no runs in {printable(folder)}" + (f" that are {' or '.join(state)}" if state else ""))
        return
    typer.echo("\n".join(aligned([HEADS, *lines])))


def _line(run: History) -> tuple[str, ...]:
    loss = f"{run.last['loss']:.4f}" if "loss" in run.last else ""
    best = "{:.4f} at step {}".format(*run.best) if run.best else ""
    steps = f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
    return printable(run.folder), run.state, steps, loss, best, when, run.last_line
