"""`megatron-vlm plan`: what each GPU of a run would hold and do."""

import gc
import os
from typing import Annotated

import typer

from megatron_vlm import config as configs
from megatron_vlm import recipes as recipe_table
from megatron_vlm.commands import arguments
from megatron_vlm.config import ConfigError
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes.published import shipped_config
from megatron_vlm.supported import read_config
from megatron_vlm.validate import validate


def plan(
    settings: arguments.Settings = None,
    recipe: arguments.Recipe = None,
    file: arguments.ConfigFile = None,
    dataset_type: arguments.DatasetType = None,
    model: arguments.Model = None,
    data: arguments.Data = None,
    valid_data: arguments.ValidData = None,
    run_dir: arguments.RunDir = None,
    gpus: arguments.Gpus = None,
    gpu_memory: Annotated[float, typer.Option(min=1, help="GB of one GPU.")] = 80,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Run a real step on shapes alone.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Rehearse this rank; default: several.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Propose the quickest layouts that fit.")] = False,
    as_json: arguments.Json = False,
) -> None:
    """Compute what each GPU would hold and do, without one.

    Says what to change when it does not fit. Of the checkpoint it reads only config.json.
    `data.visual_share` and `data.max_pixels` say how many images a row has.
    """
    if as_json and (search or rehearse or rank is not None):
        raise ConfigError("--json: it has the plan alone; leave out --search, --rehearse and --rank.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: Megatron would use what it sees
    flags = arguments.given_flags(model, data, valid_data, dataset_type=dataset_type, run_dir=run_dir)
    config = recipe_table.compose(recipe, file, settings or (), flags, processes=gpus or 1, has_gpu=True)
    config = apply_overrides(config, dict.fromkeys(configs.missing_settings(config), "given later"))
    validate(config, gpus)
    shipped = shipped_config(config.model.hf_path)
    read_config(shipped or config.model.hf_path)

    gc.disable()  # imports make a million objects that all stay; looking through them takes time
    from megatron_vlm.extras.plan.plan import describe, figures, make_plan, rehearsed
    from megatron_vlm.extras.plan.search import searched
    from megatron_vlm.models.hf import look_at

    gc.enable()
    description, assumed = look_at(shipped or config.model.hf_path)
    run_plan = make_plan(config, description, gpus or configs.fewest_processes(config.parallel))
    capacity = gpu_memory * 1e9
    if as_json:
        arguments.print_json(**figures(run_plan, capacity))
        return
    typer.echo("\n".join(describe(run_plan, capacity)))
    if shipped:
        typer.echo(f"Read for {config.model.hf_path}: the copy of its config.json in this package.")
    if assumed:
        typer.echo(assumed)
    for line in rehearsed(run_plan, rank) if rehearse or rank is not None else ():
        typer.echo(line)
    for line in searched(run_plan, capacity) if search else ():
        typer.echo(line)
