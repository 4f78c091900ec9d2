"""Shows a run's data without training on it: a page of its rows, and of the rows of one step."""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_vlm.batch import Batch
from megatron_vlm.config import RunConfig
from megatron_vlm.data.accounts.drops import TooManyDrops
from megatron_vlm.data.chatml.sample import ChatMLSample
from megatron_vlm.data.on_disk.paths import paths_of
from megatron_vlm.data.run_data import RunData
from megatron_vlm.extras.grounding.boxes import Boxes
from megatron_vlm.extras.pages import key_facts, render
from megatron_vlm.extras.preview.rows import VISUAL, Original, Row, RowReader, original_of
from megatron_vlm.feed import vocabulary_notes
from megatron_vlm.messages import QUIET
from megatron_vlm.models.hf import open_source
from megatron_vlm.overrides import apply_overrides, flatten, load_yaml, to_yaml

QUANTILES = {"least": 0, "half": 0.5, "95 %": 0.95, "99 %": 0.99, "most": 1}


def preview_page(config: RunConfig, count: int, rows_shown: int) -> tuple[str, list[list[str]], list[str]]:
    """HTML of the first rows of the run's training data as the model will see them, its figures, and notes.

    A run's start prints the same notes; the last one counts what was dropped.
    """
    rows = []
    patches = []
    # what a run would not accept is what one wants to see
    with training_data(apply_overrides(config, {"data.max_drop_share": 1.0})) as (data, read):
        with suppress(TooManyDrops):  # nothing but drops in an epoch
            for batch in _first(data, count):
                rows += read(batch)
                patches.append(data.patches_of(batch["visual_inputs"]))
        drops = {drop["key"]: drop for drop in data.drops.examples()}  # each once, however often it was read
        notes = [*data.notes, *data.train_loader.notes]
    if drops:
        notes.append(f"dropped samples: {dict(Counter(drop['reason'] for drop in drops.values()))}")
    figures = _figures(rows, patches)
    title = f"{config.name}: training data"
    return _page(title, config, rows[:rows_shown], figures, list(drops.values())), figures, notes


def replay_page(config: RunConfig, step: int, logged: list[dict[str, Any]]) -> str:
    """HTML that shows the rows of a step of the run, made again from what `callbacks.samples` kept.

    Raises ValueError if the data no longer gives the samples that were trained.
    """
    # the order of rows is not needed, and to compute it may cost a pass over the dataset
    packing = "none" if config.data.packing == "none" else "stream"
    changes = {"data.packing": packing, "data.group_by_length": False, "data.max_drop_share": 1.0}
    rows = []
    with training_data(apply_overrides(config, changes)) as (data, read):
        for row in logged:
            batch = data.train_loader.replay(row["restore_key"])
            if batch["__key__"] != row["keys"]:
                raise ValueError(
                    f"replay: rank {row['rank']}, micro batch {row['micro_batch']} held {row['keys']}, "
                    f"{_paths(config)} now gives {batch['__key__']}; the dataset has changed."
                )
            rows += read(batch)
    return _page(f"{config.name}: step {step}", config, rows, [], [])


@contextmanager
def training_data(config: RunConfig) -> Iterator[tuple[RunData, RowReader]]:
    """The run's training data on a single rank, one row per batch, read in this process; no run folder.

    What its encoder encodes is noted, as rows do not hold the ids of records or the sizes of their images.
    """
    with tempfile.TemporaryDirectory() as folder:
        alone = {"run_dir": folder, "data.num_workers": 0, "train.micro_batch_size": 1}
        config = apply_overrides(config, alone)
        source = open_source(config.model.hf_path, data=config.data)
        data = RunData(config, source.processor, source.needs, rank=0, world_size=1)
        data.notes += vocabulary_notes(source.processor, source.description.text.vocab_size)
        try:
            boxes = Boxes(source.processor, config.data, source.needs.box_format)
            originals: dict[str, Original] = {}
            encode = data.documents.encode

            def noted(sample: ChatMLSample, measured: Any = None) -> Any:
                encoded = encode(sample, measured) if measured else encode(sample)
                originals[sample.__key__] = original_of(sample)
                return encoded

            data.documents.encode = noted
            yield data, RowReader(source, boxes, originals)
        finally:
            data.close()


def _first(data: RunData, count: int) -> Iterator[Batch]:
    """The first batches that contain a sample not seen before.

    Stops when more batches repeat samples than bring new ones: packed rows of a small dataset mix its epochs.
    """
    seen: set[str] = set()
    fresh = repeated = 0
    with tqdm(
        total=count, desc="reading", unit="row", leave=False, disable=QUIET in os.environ or None
    ) as bar:
        for batch in data.train_loader:
            if fresh == count or repeated > fresh:
                return
            keys = set(batch["__key__"][0])
            if keys <= seen:
                repeated += 1
                continue
            seen |= keys
            fresh += 1
            bar.update()
            yield batch


def _paths(config: RunConfig) -> str:
    return ", ".join(paths_of(config.data.train_data_path))


def _figures(rows: list[Row], patches: list[int]) -> list[list[str]]:
    """A table of how long samples and rows are, its heads first."""
    documents = [document for row in rows for document in row.documents]
    visual = [sum(run.tokens for run in document.runs if run.kind == VISUAL) for document in documents]
    columns = {
        "tokens of a sample": [document.tokens for document in documents],
        "of them trained": [document.trained for document in documents],
        "of them of images": visual,
        "tokens of a row": [row.tokens for row in rows],
        "padding of a row": [row.length - row.tokens for row in rows],
        "patches of a row": patches,
    }
    table = [[f"{len(documents)} samples in {len(rows)} rows", *QUANTILES, "mean"]]
    for name, values in columns.items():
        if not values:
            continue
        numbers = [*np.quantile(values, list(QUANTILES.values()), method="nearest"), np.mean(values)]
        table.append([name, *(f"{number:,.0f}" for number in numbers)])
    return table


def _page(title: str, config: RunConfig, rows: list[Row], figures: list[list[str]], drops: list[dict]) -> str:
    settings = to_yaml(config)
    return render(
        "preview/preview.html",
        title=title,
        facts=key_facts(flatten(load_yaml(settings))),
        settings=settings,
        rows=rows,
        figures=figures,
        drops=drops,
    )
