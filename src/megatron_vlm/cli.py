"""The command `megatron-vlm`. Everything heavy is imported inside the command that needs it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm import config as configs
from megatron_vlm import recipes as recipe_table
from megatron_vlm.commands import arguments
from megatron_vlm.commands.prepare import prepare
from megatron_vlm.commands.program import PLAIN, Commands, processes, run, start_ranks, torchrun
from megatron_vlm.config_rules.settings import validate
from megatron_vlm.extras.compose.command import compose
from megatron_vlm.extras.evaluate.command import evaluate
from megatron_vlm.extras.report.command import report, runs
from megatron_vlm.files import write_output
from megatron_vlm.job import stops, watchdog
from megatron_vlm.messages import printable, printable_lines
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes.published import shipped_config
from megatron_vlm.supported import read_config

app = typer.Typer(
    cls=Commands,
    **PLAIN,
    no_args_is_help=True,
    help="Train vision-language models: Hugging Face checkpoint in and out.",
)


@app.command()
def train(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    dataset_type: arguments.DatasetType = None,
    train_data_path: arguments.TrainData = None,
    valid_data_path: arguments.ValidData = None,
    hf_path: arguments.Checkpoint = None,
    run_dir: Annotated[str | None, typer.Option("--run_dir", help="Where the run lives and resumes.")] = None,
    model: arguments.Model = None,
    data: arguments.Data = None,
    nproc: arguments.Processes = None,
    restarts: arguments.Restarts = 0,
    profile: arguments.ProfiledSteps = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the configuration and stop.")] = False,
) -> None:
    """Train by a recipe, or --model on --data without one. In torchrun's processes, or here with --nproc.

    The run folder holds checkpoints and metrics, which samples were dropped and why (drops/), which each
    step was trained on (batches/, see `replay`), and what --profile recorded (profile/).
    """
    flags = arguments.given_flags(
        dataset_type=dataset_type,
        train_data_path=train_data_path,
        valid_data_path=valid_data_path,
        hf_path=hf_path,
        run_dir=run_dir,
    )
    if model or data:
        from megatron_vlm.extras.plan.proposing import recipe_for

        if recipe or file:
            raise configs.ConfigError(
                "--model and --data make a recipe of their own; to change a recipe's checkpoint and data, "
                "give --hf_path and --train_data_path."
            )
        file, nproc = recipe_for(model, data, settings or (), flags, nproc, dry_run)
        settings = None
        flags = {}
        if dry_run:
            return
    config = recipe_table.compose(recipe, file, settings or (), flags)
    if dry_run:
        arguments.show(config, processes(nproc))
        return
    arguments.check(config, nproc, restarts=restarts)
    arguments.check_run_folder(config)
    arguments.check_profile(config, profile)
    if arguments.is_first_process() and (
        note := recipe_table.family_note(recipe, file, config.model.hf_path)
    ):
        typer.echo(note)
    arguments.prepare_cuda(config.parallel)
    if nproc:
        options = {"recipe": recipe, "config": file, **flags, "profile": profile}
        raise typer.Exit(start_ranks(nproc, "train", options, settings, restarts))

    stops.expect_warnings()
    with watchdog.watching(config.run_dir, config.train.hang_seconds):
        from megatron_vlm.train import train as run

        run(config, profile)


@app.command()
def recipes() -> None:
    """List the recipes and their arguments."""
    width = max(map(len, recipe_table.RECIPES))
    for recipe in recipe_table.RECIPES.values():
        typer.echo(f"{recipe.name:<{width}}  {recipe.summary}")
    typer.echo(f"\nArguments: {', '.join(recipe_table.ARGUMENTS)}.")
    typer.echo("\nSee one: megatron-vlm train --recipe NAME --dry-run")


@app.command()
def plan(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    gpus: arguments.Gpus = None,
    gpu_memory: Annotated[float, typer.Option(min=1, help="GB of one GPU.")] = 80,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Run a real step on shapes alone.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Rehearse this rank; default: several.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Propose the quickest layouts that fit.")] = False,
    gpu: arguments.GpuNumbers = None,
) -> None:
    """Say what each GPU would hold and do, and what to change when it does not fit. Needs no GPU.

    Of the checkpoint it reads only config.json. `data.visual_share` and `data.max_pixels` say how many images
    a row has. --rehearse and --search tell the time of a step, too, by a simple model of an H100.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: Megatron would use what it sees
    if gpu and not (rehearse or search):
        raise configs.ConfigError("--gpu: only --rehearse and --search tell a time by it; add one of them.")
    if rank is not None and not rehearse:
        raise configs.ConfigError(f"--rank {rank}: only --rehearse looks at a rank; add it.")
    config = recipe_table.compose(recipe, file, settings or ())
    missing = configs.missing_settings(config)
    config = apply_overrides(config, dict.fromkeys(missing, "given later"))
    validate(config, gpus)
    shipped = shipped_config(config.model.hf_path)
    read_config(shipped or config.model.hf_path)

    from megatron_vlm.extras.plan.notes import advice, describe, rehearsed, searched
    from megatron_vlm.extras.plan.plan import make_plan
    from megatron_vlm.models.hf import look_at

    description, assumed = look_at(shipped or config.model.hf_path)
    made = make_plan(config, description, gpus or configs.fewest_processes(config.parallel))
    typer.echo(describe(made))
    if shipped:
        typer.echo(f"Read for {config.model.hf_path}: the copy of its config.json in this package.")
    if assumed:
        typer.echo(assumed)
    for line in advice(made, gpu_memory * 1e9):
        typer.echo(line)
    for line in rehearsed(made, rank, gpu or []) if rehearse else ():
        typer.echo(line)
    for line in searched(made, gpu_memory * 1e9, gpu or []) if search else ():
        typer.echo(line)


@app.command()
def preview(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    dataset_type: arguments.DatasetType = None,
    train_data_path: arguments.TrainData = None,
    hf_path: arguments.Checkpoint = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to read and to count.")] = 100,
    shown: Annotated[int, typer.Option(min=0, help="Rows to show whole.")] = 10,
    output: arguments.HtmlFile = Path("preview.html"),
) -> None:
    """Write a page that shows the training data as the model will see it.

    Images as processed, text with the trained tokens marked, documents and their positions, what was dropped.
    """
    flags = arguments.given_flags(dataset_type=dataset_type, train_data_path=train_data_path, hf_path=hf_path)
    config = arguments.config_of_data(recipe, file, settings, flags)

    from megatron_vlm.extras.preview.measures import preview_page

    write_output(output, preview_page(config, rows, shown))
    typer.echo(f"wrote {output}")


@app.command()
def stats(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    dataset_type: arguments.DatasetType = None,
    train_data_path: arguments.TrainData = None,
    hf_path: arguments.Checkpoint = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples to read.")] = 1000,
) -> None:
    """Print how long the training data's samples are, and propose seq_length and max_patches."""
    flags = arguments.given_flags(dataset_type=dataset_type, train_data_path=train_data_path, hf_path=hf_path)
    config = arguments.config_of_data(recipe, file, settings, flags)

    from megatron_vlm.extras.preview.measures import stats_text

    typer.echo(stats_text(config, samples))


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="The run folder.")],
    settings: arguments.Settings = None,
    step: Annotated[int, typer.Option(min=1, help="The step, counted from 1.")] = 1,
    output: arguments.HtmlFile = None,
) -> None:
    """Show the very samples that a step of a run was trained on: their keys, and with --output a page."""
    config = arguments.config_of_run(run_dir, settings, None)

    from megatron_vlm.run_folder.batch_log import read_step

    logged = read_step(run_dir, step)
    for row in logged:
        for number, keys in enumerate(row["keys"]):
            place = f"rank {row['rank']} · micro batch {row['micro_batch']} · row {number}"
            typer.echo(f"{place}: {', '.join(map(printable, keys))}")
    if output is None:
        return

    from megatron_vlm.extras.preview.measures import replay_page

    shown, changed = replay_page(config, step, logged)
    write_output(output, shown)
    typer.echo(f"wrote {output}" + (f"; {changed}" if changed else ""))


app.command()(prepare)
app.command()(compose)
app.command()(evaluate)
app.command()(report)
app.command()(runs)


@app.command("import")
def import_(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    nproc: arguments.Processes = None,
) -> None:
    """Convert a Hugging Face checkpoint to a run folder's first checkpoint, ready to train from."""
    config = recipe_table.compose(recipe, file, settings or ())
    arguments.check(config, nproc, needs_data=False)
    arguments.check_run_folder(config)
    arguments.prepare_cuda(config.parallel)
    if nproc:
        options = {"recipe": recipe, "config": file}
        raise typer.Exit(start_ranks(nproc, "import", options, settings))

    with watchdog.watching(config.run_dir, config.train.hang_seconds):
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
    """Write a run's latest checkpoint as a Hugging Face folder, adapters merged; --adapter: these alone."""
    config = arguments.config_of_trained_run(run_dir, settings, nproc, needs_processor=False)
    output = arguments.new_output(output, run_dir)
    if adapter and not config.adapter.used:
        raise configs.ConfigError("--adapter: the run trains no adapters, adapter.r is 0; export without it.")
    arguments.prepare_cuda(config.parallel)
    if nproc:
        flags = ["--adapter"] if adapter else []
        raise typer.Exit(torchrun(nproc, ["export", str(run_dir), output, *flags, *(settings or ())]))

    with watchdog.watching(run_dir, config.train.hang_seconds, "errors/export"):
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
) -> None:
    """Compare the logits of two checkpoints on an image, in fp32; exit code 1 beyond the tolerance.

    Both are computed in this process, one after the other. A run is its latest checkpoint.
    """
    encoded = arguments.image_of(image) if image else None
    config, other = arguments.configs_of_two(checked, source)

    from megatron_vlm.commands.verify import verify as compare
    from megatron_vlm.commands.verify import worst_tensors

    difference = compare(config, other, question, encoded)
    typer.echo(str(difference))
    if difference.max_abs <= tolerance:
        return
    typer.echo(f"more than the tolerance of {tolerance:g}", err=True)
    if worst := worst_tensors(config, other):
        typer.echo("\n".join(["weights that differ most:", *worst]), err=True)
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
    """Ask a run's latest checkpoint, or a Hugging Face checkpoint, a question, in one process."""
    if answers > 1 and not temperature:
        raise configs.ConfigError(
            f"--answers {answers}: at temperature 0 all are the same; add --temperature 1, or ask for one."
        )
    arguments.check_sampling(temperature, top_p, seed)
    images = [arguments.image_of(path) for path in image or ()]
    if draw is not None and (len(images) != 1 or answers > 1):
        raise configs.ConfigError("--draw: boxes are drawn for one image and one answer; give one --image.")
    config = arguments.config_of_model(model)

    from megatron_vlm.commands.runs import draw_answer, generate_from_run

    sampling = {"temperature": temperature, "top_p": top_p, "answers": answers, "seed": seed}
    replies = generate_from_run(config, question, images, max_new_tokens, **sampling)
    typer.echo(printable_lines("\n---\n".join(replies)))
    if draw is not None:
        for line in draw_answer(config, replies[0], images[0], draw):
            typer.echo(printable_lines(line))


def main() -> None:
    run(app, "megatron-vlm")


if __name__ == "__main__":
    main()
