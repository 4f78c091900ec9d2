"""The configuration that a command works with, checked before anything heavy is imported."""

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_vlm import config as configs
from megatron_vlm import recipes as recipe_table
from megatron_vlm import stores
from megatron_vlm.callbacks import callback_class
from megatron_vlm.checks import meta_problems, run_problems, validate_model, validate_paths
from megatron_vlm.config import ConfigError, ParallelConfig, RunConfig
from megatron_vlm.data.on_disk.paths import items_of
from megatron_vlm.files import atomic_write, check_output, read_file, read_text, refuse_existing
from megatron_vlm.imports import is_users
from megatron_vlm.job.watchdog import LAUNCHER
from megatron_vlm.messages import QUIET, join_lines
from megatron_vlm.overrides import apply_overrides, flag_of, to_yaml
from megatron_vlm.recipes.proposal import as_recipe, changes
from megatron_vlm.run_folder import FOLDERS, check_folder, check_start, latest_checkpoint, refuse_links
from megatron_vlm.supported import read_config
from megatron_vlm.validate import validate

RECIPE = "recipe.yaml"  # in the run folder
NO_DATA = "none://"
ONE_PROCESS = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "sp": None}


def on_disk(path: Path | None) -> Path | None:
    """Return the path. Raise ConfigError for an address, where only a disk is written."""
    if path is not None and re.match("(s3|msc):/", str(path)):
        raise ConfigError(f"{path}: this command writes on a disk alone; give a path there.")
    return path


def machines() -> int:
    """Return the most machines on which this command is started: torchrun's PET_NNODES, `2` or `1:2`."""
    text = os.environ.get("PET_NNODES", "1")
    if not re.fullmatch(r"(\d+:)?0*[1-9]\d*", text):
        raise ConfigError(f"PET_NNODES: {text!r} is no number of machines; write 2, or 1:2 for one or two.")
    return int(text.rpartition(":")[2])


def processes(nproc: int | None) -> int | None:
    """Return the processes of all machines: `nproc` of each, else torchrun's; None without torchrun."""
    if nproc:
        return nproc * machines()
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def start_ranks(
    nproc: int, command: str, options: Mapping[str, Any], words: Sequence[str] | None, restarts: int = 0
) -> int:
    """Run a command in `nproc` processes, with its options, arguments and settings; return the exit code."""
    from megatron_vlm.job.launch import launch  # it imports torch

    flags = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{flag_of(name)}={item}" for item in values if item is not None]
    return launch(nproc, [command, *flags, *(words or ())], restarts=restarts)


def output_file(path: Path | None) -> Path | None:
    """Return the path. Raise ConfigError, before anything is read, if a command may not write there."""
    if path is not None:
        check_output(on_disk(path))
    return path


def check_sampling(temperature: float, top_p: float, seed: int = 0) -> None:
    """Raise ConfigError for a flag that only sampled answers need, at temperature 0."""
    if temperature == 0 and (top_p != 1 or seed):
        flag = f"--seed {seed}" if seed else f"--top-p {top_p:g}"
        raise ConfigError(
            f"{flag}: --temperature 0 samples nothing; add --temperature 1, or leave {flag} out."
        )


HtmlFile = Annotated[Path | None, typer.Option(help="The HTML file to write.", callback=output_file)]
Folder = Annotated[Path, typer.Option(help="The folder to write.", callback=on_disk)]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="tp=4 sets a recipe argument, train.steps=10 any setting."),
]
Recipe = Annotated[
    str | None,
    typer.Option(help="A name that `megatron-vlm recipes` lists, or your own FILE.py:NAME."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="A run file that `megatron-vlm recipes` lists, or a file of your own."),
]
DatasetType = Annotated[str | None, typer.Option(help="energon or hf; by default, what the data is.")]
Model = Annotated[
    str | None, typer.Option(help="Checkpoint: folder or hub name. It replaces the recipe's, or needs none.")
]
Data = Annotated[
    list[str] | None,
    typer.Option(help="Training data: file (or a.jsonl#5000, a.jsonl*0.3), folder, hub name; repeat to mix."),
]
ValidData = Annotated[list[str] | None, typer.Option(help="Validation data; repeat for several.")]
RunDir = Annotated[str | None, typer.Option(help="The run folder; a run goes on from it.")]
Processes = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, help="Start this many processes here with torchrun; several machines: PET_NNODES."
    ),
]
Restarts = Annotated[
    int, typer.Option(min=0, help="With --nproc: start again so often after a process or machine was lost.")
]
OwnCallbacks = Annotated[
    list[str] | None, typer.Option(help="FILE.py:CLASS, a Callback that is called as the run goes on.")
]
ProfiledSteps = Annotated[
    int, typer.Option(min=0, help="Record so many steps: a trace, and a table of where the time went.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")
]
Gpus = Annotated[
    int | None, typer.Option(min=1, help="GPUs of the run; default: the fewest that the layout needs.")
]


def print_json(**values: Any) -> None:
    """Print a JSON object with these keys."""
    typer.echo(json.dumps(values, indent=1))


def prose(as_json: bool) -> AbstractContextManager:
    """Send lines that are printed in this context to stderr, if JSON is to stand alone on stdout."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def show(config: RunConfig, world_size: int | None) -> None:
    """Print valid YAML, so that it can be saved and given back as --config, and what follows from it."""
    if problems := list(meta_problems(config.data)):
        raise ConfigError(join_lines(problems))
    typer.echo(to_yaml(config))
    missing = configs.missing_settings(config)
    validate(apply_overrides(config, dict.fromkeys(missing, "given later")), world_size)
    for name, value in configs.derived(config, world_size).items():
        typer.echo(f"# {name}: {value}")
    if missing:
        typer.echo(f"# still to give: {', '.join(missing)}")


def check(config: RunConfig, nproc: int | None, needs_data: bool = True, restarts: int = 0) -> None:
    """Raises ConfigError with every problem of the settings or, if they have none, of the paths."""
    needed = configs.fewest_processes(config.parallel)
    if machines() > 1 and processes(nproc) is None:
        raise ConfigError(
            f"--nproc: PET_NNODES asks for {machines()} machines; give the processes to start on each."
        )
    if restarts and not nproc:
        raise ConfigError("--restarts: it is --nproc that starts processes again; give both.")
    if needed > 1 and processes(nproc) is None:
        raise ConfigError(
            f"parallel: this layout needs {needed} processes and this is one; add --nproc {needed}, or start "
            f"it with `torchrun --nproc_per_node {needed} -m megatron_vlm.cli …`."
        )
    if not needs_data:
        config = _with_some_data(config)
    validate(config, processes(nproc) or 1)
    validate_paths(config, needs_data)


def prepare_cuda(parallel: ParallelConfig) -> None:
    """Set what CUDA and torch read when they are loaded, for this process and its children; what the user
    has set stays."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # micro batches differ in length: memory that one leaves is seldom what the next one asks for
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if max(parallel.tp, parallel.cp) > 1:
        # a collective starts where it was called, before the products that hide it
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def is_first_process() -> bool:
    """Return whether this process is the only one, a launcher, or rank 0 of torchrun's own."""
    return os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ


def check_start_of(config: RunConfig, nproc: int | None, profile: int = 0, **options: Any) -> None:
    """Raise ConfigError as `check`, and unless a run may start in its folder.

    The user's callbacks must be there, and the steps of a profile within the run. Torchrun's processes check
    more together.
    """
    check(config, nproc, **options)
    for name in (*items_of(config.train.callbacks), *filter(is_users, config.logging.trackers)):
        if is_first_process():
            callback_class(name)
    if "WORLD_SIZE" in os.environ or machines() > 1:  # those that wait for this one may hold the folder
        check_folder(config.run_dir)
    else:
        check_start(config.run_dir, config.model.hf_path)
    _check_profile(config, profile)


def _check_profile(config: RunConfig, steps: int) -> None:
    """Raises ConfigError if the run ends before `steps` steps are recorded, counted from its checkpoint."""
    latest = latest_checkpoint(config.run_dir)
    done = int(latest.name.removeprefix("step_")) if latest else 0
    needed = done + configs.PROFILE_WARM_UP + steps
    if steps and config.train.steps is not None and config.train.steps < needed:
        raise ConfigError(
            f"--profile {steps}: with {configs.PROFILE_WARM_UP} steps of warm-up after step {done} it needs "
            f"train.steps={needed}, which is {config.train.steps}; raise it, or profile fewer steps."
        )


def config_of_run(run_dir: Path, settings: list[str] | None, nproc: int | None) -> RunConfig:
    """The run's own configuration. One process ignores its layout, since checkpoints load in any."""
    refuse_links(run_dir)
    if problems := list(run_problems(run_dir)):
        raise ConfigError(join_lines(problems))
    assumed = {} if processes(nproc) else ONE_PROCESS
    flags = {"run_dir": str(run_dir)}
    config = recipe_table.compose(None, run_dir / "config.yaml", settings or (), flags, assumed)
    validate(_with_some_data(config), processes(nproc) or 1)
    return config


def config_of_trained_run(run_dir: Path, settings: list[str] | None, nproc: int | None) -> RunConfig:
    """`config_of_run` for a run that has a complete checkpoint, and whose model can be built."""
    config = config_of_run(run_dir, settings, nproc)
    if latest_checkpoint(run_dir) is None:
        raise ConfigError(f"{run_dir}: no complete checkpoint in this run folder; train it first.")
    validate_model(config)
    return config


def config_of_model(model: str, settings: Sequence[str] = (), nproc: int | None = None) -> RunConfig:
    """The configuration of a run; or one without a run folder, of a Hugging Face folder or hub name."""
    if Path(model, "config.yaml").exists() and not Path(model, "config.json").exists():
        return config_of_trained_run(Path(model), list(settings), nproc)
    assumed = {"model.hf_path": model, "data.train_data_path": NO_DATA, "data.seq_length": 1}
    config = apply_overrides(RunConfig(), assumed | recipe_table.read_settings(settings, {}))
    if settings:
        validate(apply_overrides(config, {"run_dir": "none"}), processes(nproc) or 1)
    try:
        validate_model(config)
    except ConfigError as error:
        lines = [line.removeprefix("model.hf_path: ") for line in str(error).splitlines()]
        raise ConfigError(join_lines(lines)) from error
    return config


def configs_of_two(checked: str, source: str) -> list[RunConfig]:
    """`config_of_model` of both. Raises ConfigError unless they are two, and of one model type."""
    both = [config_of_model(checked), config_of_model(source)]
    if Path(checked).is_dir() and Path(checked).resolve() == Path(source).resolve():
        raise ConfigError(
            f"verify: {checked} is given twice; give what it is to be compared with, such as its "
            "export or the checkpoint that it was trained from."
        )
    model_type, recipe_type = (read_config(config.model.hf_path)["model_type"] for config in both)
    if model_type != recipe_type:
        raise ConfigError(
            f"verify: {checked} is of model type {model_type}, and {source} of {recipe_type}; "
            "give two checkpoints of one model."
        )
    return both


def _with_some_data(config: RunConfig) -> RunConfig:
    """The configuration with a data path if it names none, for commands that read no data."""
    if config.data.train_data_path != configs.MISSING:
        return config
    return apply_overrides(config, {"data.train_data_path": NO_DATA})


def new_output(output: str, config: RunConfig, adapter: bool) -> str:
    """Return the folder for a run's export, or its `adapter` alone, without a slash at its end.

    Raises:
        OSError: The folder cannot be written.
        ConfigError: It is in a store, or lies among what the run itself writes; or there is no adapter.
    """
    run_dir = Path(config.run_dir)
    if adapter and not config.adapter.used:
        raise ConfigError(f"{run_dir} trains no adapters, adapter.r is 0; drop --adapter, or adapter=True.")
    if stores.is_store(output):
        remedy = "give a folder on disk; a run with train.upload_to copies its exports"
        raise ConfigError(f"{output} is in a store; {remedy}.")
    output = str(Path(output).expanduser())
    parts = [run_dir / name for name in FOLDERS if name != "exports"]
    if any(_is_in(Path(output), part) for part in parts):
        raise ConfigError(f"{output} lies among what the run writes; give one outside of {run_dir}.")
    refuse_existing(Path(output))
    return output


def _is_in(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def image_of(path: Path) -> bytes:
    """The bytes of an image file. Raises ConfigError, which names it, if there is no image in it."""
    if not path.exists():
        raise ConfigError(f"--image: {path} does not exist; give the path of an image file.")
    content = read_file(path)

    from megatron_vlm.data.accounts.drops import BadSample
    from megatron_vlm.data.media.images import decode_image

    try:
        decode_image(content)
    except BadSample as bad:
        raise ConfigError(f"--image: {path}: {bad.detail}; give another image.") from bad
    return content


def keep_recipe(config: RunConfig, dry_run: bool) -> Path:
    """Print the recipe of a run that was started without one, and write it into the run folder.

    Nothing is written in a dry run. Returns the file. Raises ConfigError if the run folder has the recipe of
    another run, and in torchrun's processes.
    """
    if processes(None) is not None or machines() > 1:
        raise ConfigError(
            "--model and --data make a recipe for one machine; write it there, with --dry-run, and give it "
            "to torchrun's processes as --config FILE."
        )
    text = as_recipe(config, shlex.join(["megatron-vlm", *sys.argv[1:]]))
    if dry_run or QUIET not in os.environ:
        typer.echo(text)
    file = Path(config.run_dir) / RECIPE
    if dry_run:
        return file
    if file.exists() and (different := changes(read_text(file), config)):
        remedy = f"give another --run-dir; to change a setting and go on, start it by --config {file}."
        raise ConfigError(join_lines([*(f"{file}: {text}" for text in different), f"{file}: {remedy}"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, text)
    if QUIET not in os.environ:
        typer.echo(f"wrote {file}")
    return file


def given_flags(
    model: str | None, data: list[str] | None, valid_data: list[str] | None, **flags: Any
) -> dict[str, Any]:
    """Return the flags that were given, as arguments of recipes; of a list of one path the path."""
    flags |= {"hf_path": model, "train_data_path": data, "valid_data_path": valid_data}
    set_flags = {name: value for name, value in flags.items() if value not in (None, [])}
    return {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in set_flags.items()
    }
