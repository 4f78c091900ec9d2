"""`megatron-vlm prepare`: the command around `prepare_energon_dataset`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_vlm import stores
from megatron_vlm.checks import data_problems, is_prepared
from megatron_vlm.commands.arguments import on_disk
from megatron_vlm.config import ConfigError
from megatron_vlm.data.on_disk.paths import tar_shards
from megatron_vlm.messages import QUIET
from megatron_vlm.overrides import fit_to_type


def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="JSON(L), meta file, HF dataset or .tar shards; or one per split as SPLIT=PATH."),
    ] = None,
    output: Annotated[
        Path, typer.Argument(help="Folder to write; must be empty or absent.", callback=on_disk)
    ] = ...,  # type: ignore[assignment]
    image_root: Annotated[
        str | None, typer.Option(help="Folder of the images; default: the source's.")
    ] = None,
    format: Annotated[str, typer.Option(help="auto, json, jsonl, hf or meta.")] = "auto",
    split: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SIZE, relative; repeat. Default: train=0.9 val=0.1; of shards, all train."),
    ] = None,
    samples_per_shard: Annotated[int, typer.Option(min=1)] = 1000,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one per core, one for few records.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which record goes to which split.")] = 1234,
    column: Annotated[
        list[str] | None, typer.Option(help="OURS=THEIRS, such as images=pictures; repeat.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="A name in a meta file; repeat. Default: all.")
    ] = None,
    max_skip_share: Annotated[
        float, typer.Option(min=0, max=1, help="Exit with 1 when more of the records than this are skipped.")
    ] = 0.5,
    engine: Annotated[str, typer.Option(help="local, or ray: on a cluster at RAY_ADDRESS.")] = "local",
) -> None:
    """Write conversations as an Energon dataset, or index shards.

    Shards are plain WebDataset files (.tar), which become an Energon dataset where they are.

    Example: prepare conversations.jsonl dataset/ --image-root images/ --split train=0.95 --split val=0.05

    Example with a held-out file: prepare train=train.jsonl val=held_out.jsonl dataset/

    Example with shards: prepare shards/ writes an index beside them and copies nothing; prepare shards/
    dataset/ writes it into another folder, with links to the shards.
    """
    sizes = _parse(split or [], "prepare: --split {}; write NAME=SIZE, such as train=0.9.", float)
    is_source = not sources or output.suffix == ".tar"  # shards alone, or the last that a pattern names
    sources = list(sources or [])
    if is_source:
        sources.append(str(output))
    if format == "auto" and not any(map(stores.is_store, sources)) and all(tar_shards(s)[1] for s in sources):
        if any(map(is_prepared, sources)):
            raise ConfigError(f"prepare: {sources[0]} has an index of Energon; train from it as it is.")
        if image_root or column or dataset:
            fact = "--image-root, --column and --dataset do not apply to .tar shards"
            raise ConfigError(f"prepare: {fact}; set data.columns when you train.")
        from megatron_vlm.data.prepare import index_shards

        output = None if is_source else output
        options = {
            "splits": sizes or None,
            "workers": workers,
            "seed": seed,
            "progress": QUIET not in os.environ,
        }
        typer.echo(str(index_shards(sources, output, **options)))
        return
    if is_source:
        raise ConfigError(f"prepare: {output} has no .tar shards to index; write prepare SOURCE OUTPUT.")
    paths = _parse_sources(sources)
    columns = _parse(column or [], "prepare: --column {}; write OURS=THEIRS, such as images=pictures.")
    for source in paths.values() if isinstance(paths, dict) else [paths]:
        for problem in data_problems("hf", "prepare: source", source, may_be_hub=format == "hf"):
            raise ConfigError(problem)
        if image_root and not (stores.is_store(image_root) or Path(image_root).expanduser().is_dir()):
            raise ConfigError(f"prepare: --image-root {image_root} is not a folder; give one.")

    # heavy imports come after everything that a user may have mistyped
    from megatron_vlm.data.prepare import prepare_energon_dataset

    summary = prepare_energon_dataset(
        paths,
        output,
        image_root=image_root,
        format=format,
        splits=sizes or None,
        samples_per_shard=samples_per_shard,
        workers=workers,
        seed=seed,
        columns=columns,
        datasets=dataset or [],
        engine=engine,
        progress=QUIET not in os.environ,
    )
    typer.echo(str(summary))
    if summary.skipped:
        _explain(summary, max_skip_share)


def _explain(summary: Any, max_share: float) -> None:
    """Say what helps against each reason in a `PrepareSummary`. Raises Exit if too much was skipped."""
    from megatron_vlm.data.accounts.drops import REASONS

    typer.echo(f"  named in {summary.output / 'skipped.jsonl'}")
    for reason in summary.skipped:
        typer.echo(f"  {reason}: {REASONS[reason]}")
    skipped = sum(summary.skipped.values())
    records = skipped + sum(summary.samples.values())
    if skipped > max_share * records:
        typer.echo(
            f"prepare: {skipped} of {records} records were skipped, over --max-skip-share {max_share:g}; the "
            f"lines above say what helps. {summary.output} holds the others.",
            err=True,
        )
        raise typer.Exit(1)


def _parse_sources(sources: list[str]) -> str | dict[str, str]:
    if len(sources) == 1 and (Path(sources[0]).exists() or "=" not in sources[0]):
        return sources[0]
    pairs = _parse(sources, "prepare: sources {}; give one, or each once as SPLIT=PATH.")
    if len(pairs) < len(sources):
        raise ConfigError(f"prepare: sources {sources}; give each split once.")
    return pairs


def _parse(pairs: list[str], wrong: str, kind: type = str) -> dict[str, Any]:
    """The pairs NAME=VALUE. Raises ConfigError with the text `wrong` for anything else."""
    parsed = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            parsed[name] = fit_to_type(value or None, kind)
        except ValueError as error:
            raise ConfigError(wrong.format(pair)) from error
    return parsed
