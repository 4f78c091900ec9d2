"""Measure a Hugging Face dataset for data.packing=global or data.group_by_length, before the run needs it.

python tools/precompute_tokens.py --config recipes/mine.yaml data.num_workers=16

Takes the arguments of `megatron-vlm train`. Stopped, it goes on where it was; started several times, or on
several machines with one data.lengths_cache, the work is shared. A run with the same data, processor and
settings then finds the lengths there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_vlm.cli import run as run_program
from megatron_vlm.cli import single
from megatron_vlm.config import ConfigError
from megatron_vlm.recipes import compose


def main(
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    recipe: Annotated[str | None, typer.Option(help="A name that `megatron-vlm recipes` lists.")] = None,
    config: Annotated[Path | None, typer.Option(help="A file of recipes/ or a run's config.yaml.")] = None,
    part: Annotated[str, typer.Option(help="2/8: begin with the second eighth of the work.")] = "1/1",
) -> None:
    """Measure the training samples of a run."""
    from megatron_vlm.data.load.hf import HFProvider
    from megatron_vlm.data.load.lengths import DROPPED, measure_dataset
    from megatron_vlm.data.run_data import train_encoder
    from megatron_vlm.models.families import describe
    from megatron_vlm.models.hf import load_config, load_processor
    from megatron_vlm.objectives import objective_of

    run = compose(recipe, config, settings or ())
    data = run.data
    if data.dataset_type != "hf":
        raise ConfigError(
            f"data.dataset_type: {data.dataset_type} needs no lengths beforehand; only hf does."
        )
    number, _, parts = part.partition("/")
    path = run.model.hf_path
    hf_config = load_config(path)
    needs = describe(hf_config).data_needs
    encoder = train_encoder(data, load_processor(path, data), needs)
    encoder.documents = objective_of(run).sample_encoder(encoder.documents, run)
    rows = HFProvider(data).train_rows(encoder, run.train.seed)
    place = {"rank": int(number) - 1, "world_size": int(parts)}
    tokens, patches = measure_dataset(rows, data.lengths_cache, data.num_workers, **place)
    kept = tokens != DROPPED
    typer.echo(f"{kept.sum()} of {len(rows)} samples fit; {(~kept).sum()} will be dropped")
    if kept.any():
        typer.echo(f"tokens: mean {tokens[kept].mean():.0f}, most {tokens[kept].max()}")
        typer.echo(f"patches: mean {patches[kept].mean():.0f}, most {patches[kept].max()}")


if __name__ == "__main__":
    run_program(single(main), "precompute_tokens.py")
