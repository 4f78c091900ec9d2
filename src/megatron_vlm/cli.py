"""The command `megatron-vlm`, and how commands run: as programs with short errors.

Everything heavy is imported inside the command that needs it.
"""

import contextlib
import faulthandler
import gc
import io
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megatron_vlm import config as configs
from megatron_vlm import recipes as recipe_table
from megatron_vlm.commands import arguments
from megatron_vlm.commands.arguments import is_first_process
from megatron_vlm.commands.prepare import prepare
from megatron_vlm.commands.weights import show_weights
from megatron_vlm.extras.compose.command import compose
from megatron_vlm.extras.evaluate.command import evaluate
from megatron_vlm.extras.plan.command import plan
from megatron_vlm.extras.preview.command import preview, replay
from megatron_vlm.extras.report.command import report
from megatron_vlm.imports import installed_versions
from megatron_vlm.job import watchdog
from megatron_vlm.job.errors import exit_with_reason
from megatron_vlm.messages import QUIET, PrintableRecord, aligned, join_lines, printable, printable_lines
from megatron_vlm.overrides import FLAGS, refuse_keys, setting_for_flag
from megatron_vlm.recipes.published import DEMO

# `rich_markup_mode=None`: logs and pipes need plain text, and rich costs start-up time
PLAIN = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
# flags are accepted with `_`, too, and some by the name of the setting that they set, as by `flag_of`
PLAIN["context_settings"] = {
    "token_normalize_func": lambda name: FLAGS.get(name := name.replace("_", "-"), name),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}

UsageError = typer.BadParameter.__base__  # click's, which newer versions of typer have under another name


class Commands(TyperGroup):
    """Commands whose errors tell a flag that does not exist from a setting that is written as one."""

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """Return the command, which takes the group's --quiet and --verbose as well."""
        command = super().get_command(ctx, cmd_name)
        shared = [param for param in self.params if param.name in ("quiet", "verbose")]
        if command is not None and shared[0] not in command.params:
            command.params += shared
        return command

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        with _naming_flags():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            with _naming_flags():
                return super().invoke(ctx)
        except EOFError as error:  # of which click would only say "Aborted!"
            cut = OSError(f"EOFError: {error}")
            cut.__dict__.update(error.__dict__)
            raise cut.with_traceback(error.__traceback__) from None


@contextlib.contextmanager
def _naming_flags() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if not hasattr(error, "possibilities"):  # only NoSuchOption has them
            raise
        alike = f" (there is {' and '.join(error.possibilities)})" if error.possibilities else ""
        advice = f"{alike}. A setting is written without dashes, as train.steps=10; --help lists the flags."
        if setting := setting_for_flag(error.option_name):
            advice = f"; {setting}."
        raise configs.ConfigError(
            f"{error.option_name}: `{error.ctx.info_name}` has no such flag{advice}"
        ) from error


def single(command) -> typer.Typer:
    """Return a program with a single command."""
    program = typer.Typer(**PLAIN)
    program.command()(command)
    return program


def run(program: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a program and end the process with the exit code of `job.errors.exit_with_reason`.

    MEGATRON_VLM_DEBUG=1, as --verbose, shows every traceback and every library's warning.
    """
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # the shell has closed it
            setattr(sys, stream, Path(os.devnull).open(mode))
    logging.setLogRecordFactory(PrintableRecord)
    if not is_first_process():
        logging.getLogger("megatron_vlm").setLevel(logging.ERROR)
    # what crashes in compiled code says where; a watched rank writes it to its file
    with contextlib.suppress(io.UnsupportedOperation):  # stderr may be no file
        faulthandler.enable()
    with exit_with_reason(name):
        for word in sys.argv[1:] if arguments is None else arguments:
            if address := re.fullmatch(r"(?:([\w.-]+)=)?(\[?\w+:/\S*)", word):
                refuse_keys(address[1] or "the command line", address[2])
        program(arguments, prog_name=name)


app = typer.Typer(
    cls=Commands,
    **PLAIN | {"add_completion": True},
    no_args_is_help=True,
    help="Train vision-language models: Hugging Face checkpoint in and out.",
)


def _show_versions(value: bool) -> None:
    if value:
        for package, number in installed_versions().items():
            typer.echo(f"{package} {number or 'not installed'}")
        raise typer.Exit


def _switch(name: str, about: str, *variables: str) -> Any:
    """Return a flag, such as --quiet and -q, which sets environment variables; ranks inherit them."""

    def switch(value: bool) -> None:
        if value:
            os.environ.update(dict.fromkeys(variables, "1"))

    settings = {"callback": switch, "is_eager": True, "expose_value": False, "help": about}
    return typer.Option(f"--{name}", f"-{name[0]}", **settings)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Print versions.")
    ] = False,
    quiet: Annotated[
        bool, _switch("quiet", "Print errors and the closing lines alone.", QUIET, "TQDM_DISABLE")
    ] = False,
    verbose: Annotated[
        bool, _switch("verbose", "Print tracebacks and libraries' warnings.", "MEGATRON_VLM_DEBUG")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    dataset_type: arguments.DatasetType = None,
    model: arguments.Model = None,
    data: arguments.Data = None,
    valid_data: arguments.ValidData = None,
    run_dir: arguments.RunDir = None,
    nproc: arguments.Processes = None,
    restarts: arguments.Restarts = 0,
    callbacks: arguments.OwnCallbacks = None,
    profile: arguments.ProfiledSteps = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the configuration and stop.")] = False,
) -> None:
    """Train by a recipe, or --model on --data without one. In torchrun's processes, or here with --nproc.

    The run folder holds checkpoints and metrics, which samples were dropped and why (drops/), which each
    step was trained on (batches/, see `replay`), and what --profile recorded (profile/).
    """
    flags = {"dataset_type": dataset_type, "run_dir": run_dir, "callbacks": callbacks}
    flags = arguments.given_flags(model, data, valid_data, **flags)
    config = recipe_table.compose(recipe, file, settings or (), flags, processes=nproc or 1)
    if dry_run and (recipe or file):
        arguments.show(config, arguments.processes(nproc))
        return
    # what needs no GPU is checked before processes start
    arguments.check_start_of(config, nproc, restarts=restarts, profile=profile)
    # without a recipe, one was made; the run folder keeps it, and ranks start by it
    if not (recipe or file):
        file = arguments.keep_recipe(config, dry_run)
        settings = None
        flags = {}
        if dry_run:
            return
    if arguments.is_first_process() and (
        note := recipe_table.family_note(recipe, file, config.model.hf_path)
    ):
        typer.echo(printable(note))
    arguments.prepare_cuda(config.parallel)
    if nproc:
        options = {"recipe": recipe, "config": file, **flags, "profile": profile}
        raise typer.Exit(arguments.start_ranks(nproc, "train", options, settings, restarts))

    # from here on this process is a rank
    with watchdog.watching(Path(config.run_dir, "errors"), config.train.hang_seconds):
        with watchdog.stage("importing torch and Megatron"):
            gc.disable()  # imports make a million objects that all stay; looking through them takes time
            from megatron_vlm.training.loop import train as train_run

            gc.enable()
        if not profile:
            train_run(config)
            return
        from megatron_vlm.callbacks.profiler import Profiler

        train_run(config, [Profiler(profile)])


@app.command()
def recipes(as_json: arguments.Json = False) -> None:
    """List recipes, run files and the arguments of recipes.

    A recipe is a model size. A run file is a recipe with settings for a purpose, such as adapters on one GPU.
    """
    published = (recipe for name, recipe in recipe_table.RECIPES.items() if not name.endswith(DEMO))
    names = {recipe.name: recipe.summary for recipe in published}
    files = {name: recipe_table.summary_of(file) for name, file in recipe_table.run_files().items()}
    if as_json:
        arguments.print_json(recipes=names, run_files=files, arguments=recipe_table.ARGUMENTS)
        return
    for title, table in (("Recipes, for --recipe", names), ("Run files, for --config", files)):
        typer.echo("\n".join([f"{title}:", *aligned([*table.items()]), ""]))
    typer.echo(f"Arguments of recipes: {', '.join(recipe_table.ARGUMENTS)}.")
    typer.echo("\nSee one: megatron-vlm train --recipe NAME --dry-run")


app.command()(plan)
app.command()(preview)
app.command()(replay)
app.command()(prepare)
app.command()(show_weights)
app.command()(compose)
app.command()(evaluate)
app.command()(report)


@app.command("import")
def import_(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    dataset_type: arguments.DatasetType = None,
    model: arguments.Model = None,
    data: arguments.Data = None,
    valid_data: arguments.ValidData = None,
    run_dir: arguments.RunDir = None,
    nproc: arguments.Processes = None,
) -> None:
    """Convert a Hugging Face checkpoint to a run's first one.

    `train` goes on from it in the same --run-dir.
    """
    flags = arguments.given_flags(model, data, valid_data, dataset_type=dataset_type, run_dir=run_dir)
    processes = arguments.processes(nproc) or 1
    config = recipe_table.compose(recipe, file, settings or (), flags, processes=processes)
    arguments.check_start_of(config, nproc, needs_data=False)
    arguments.prepare_cuda(config.parallel)
    if nproc:  # this process only starts the ranks: each runs the command again, without --nproc
        options = {"recipe": recipe, "config": file, **flags}
        raise typer.Exit(arguments.start_ranks(nproc, "import", options, settings))

    with watchdog.watching(Path(config.run_dir, "errors"), config.train.hang_seconds):
        from megatron_vlm.commands.runs import import_run

        import_run(config)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="The run folder.")],
    output: Annotated[str, typer.Argument(help="The folder to write, also s3://…; must not exist.")],
    settings: arguments.Settings = None,
    nproc: arguments.Processes = None,
    adapter: bool = False,
) -> None:
    """Write a run's latest checkpoint as a Hugging Face folder.

    Adapters are merged; --adapter writes these alone, as peft does.
    """
    config = arguments.config_of_trained_run(run_dir, settings, nproc)
    output = arguments.new_output(output, config, adapter)
    arguments.prepare_cuda(config.parallel)
    if nproc:  # this process only starts the ranks: each runs the command again, without --nproc
        flags = ["--adapter"] if adapter else []
        words = [str(run_dir), output, *flags, *(settings or ())]
        raise typer.Exit(arguments.start_ranks(nproc, "export", {}, words))

    with watchdog.watching(f"{output}.errors", config.train.hang_seconds):
        watchdog.claim_files()
        from megatron_vlm.commands.runs import export_run

        export_run(config, output, adapter)
    typer.echo(f"wrote {output}")


@app.command()
def verify(
    checked: Annotated[str, typer.Argument(help="A Hugging Face folder or hub name, or a run folder.")],
    source: Annotated[str, typer.Argument(help="What to compare it with, likewise.")],
    image: Annotated[
        Path | None, typer.Option(help="An image file; without it, a generated picture.")
    ] = None,
    question: Annotated[str, typer.Option(help="What is asked about it.")] = "What is in this picture?",
    tolerance: Annotated[float, typer.Option(min=0, help="Largest difference of a logit allowed.")] = 1e-3,
    as_json: arguments.Json = False,
) -> None:
    """Compare the logits of two checkpoints on an image.

    The exit code is 1 beyond the tolerance. Both are computed in fp32 in this process, one after the other.
    A run is its latest checkpoint.
    """
    encoded = arguments.image_of(image) if image else None
    config, other = arguments.configs_of_two(checked, source)

    # heavy imports come after everything that a user may have mistyped
    from megatron_vlm.commands.verify import verify as compare
    from megatron_vlm.commands.verify import worst_tensors

    with arguments.prose(as_json):
        difference = compare(config, other, question, encoded)
    is_within = difference.max_abs <= tolerance
    if as_json:
        arguments.print_json(**asdict(difference), tolerance=tolerance, within_tolerance=is_within)
    else:
        typer.echo(str(difference))
    if is_within:
        return
    typer.echo(f"more than the tolerance of {tolerance:g}", err=True)
    if worst := worst_tensors(config, other):
        typer.echo(join_lines(["weights that differ most:", *worst]), err=True)
    raise typer.Exit(1)


@app.command()
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
    draw: Annotated[
        Path | None,
        typer.Option(help="A PNG to write: the image with its boxes.", callback=arguments.output_file),
    ] = None,
) -> None:
    """Ask a run, or a Hugging Face checkpoint, a question.

    A run is its latest checkpoint. The answer is computed in one process.
    """
    if answers > 1 and not temperature:
        raise configs.ConfigError(
            f"--answers {answers}: at temperature 0 all are the same; add --temperature 1, or ask for one."
        )
    arguments.check_sampling(temperature, top_p, seed)
    images = [arguments.image_of(path) for path in image or ()]
    if draw is not None and (len(images) != 1 or answers > 1):
        raise configs.ConfigError("--draw: boxes are drawn for one image and one answer; give one --image.")
    config = arguments.config_of_model(model)

    # heavy imports come after everything that a user may have mistyped
    from megatron_vlm.commands.runs import draw_answer, generate_from_run

    sampling = {"temperature": temperature, "top_p": top_p, "answers": answers, "seed": seed}
    replies = generate_from_run(config, question, images, max_new_tokens, **sampling)
    typer.echo(printable_lines("\n---\n".join(replies)))
    if draw is not None:
        for line in draw_answer(config, replies[0], images[0], draw):
            typer.echo(printable(line))


def main() -> None:
    run(app, "megatron-vlm")


if __name__ == "__main__":
    main()
