"""Shows a run's data without training on it: a page of its rows, and its statistics."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_vlm.batch import Batch, GenericVisualInputs
from megatron_vlm.config import RunConfig
from megatron_vlm.data.accounts.fingerprint import data_changes
from megatron_vlm.data.encode.packing import pack_buffer
from megatron_vlm.data.grounding.boxes import Boxes
from megatron_vlm.data.on_disk.paths import paths_of
from megatron_vlm.data.run_data import RunData
from megatron_vlm.extras.preview.page import RowReader, page
from megatron_vlm.models.hf import open_source
from megatron_vlm.overrides import apply_overrides, to_yaml
from megatron_vlm.run_folder.checkpoint_files import read_state
from megatron_vlm.run_folder.folder import latest_checkpoint

QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1)
ANY_LENGTH = 2**20  # tokens; with this seq_length no sample is too long
GRANULARITY = 256  # tokens; a proposed seq_length is a multiple of this


def preview_page(config: RunConfig, rows: int, shown: int) -> str:
    """HTML that shows the first rows of the run's training data as the model will see them."""
    with training_data(config) as (data, read):
        rows_shown = [row for batch in _first(data, rows) for row in read(batch)]
        drops = _drops(data)
    title = f"{config.name}: {_paths(config)}"
    return page(title, to_yaml(config), rows_shown, shown, drops)


def replay_page(config: RunConfig, step: int, logged: list[dict[str, Any]]) -> tuple[str, str]:
    """HTML that shows the rows of a step of the run, made again from what `run_folder.batch_log` kept; and
    how the data has changed since the last checkpoint, in words that the page shows, too (empty: not at all).

    Raises ValueError if the data no longer gives the samples that were trained.
    """
    # the order of rows is not needed, and to compute it may cost a pass over the dataset
    packing = "none" if config.data.packing == "none" else "stream"
    changes = {"data.packing": packing, "data.group_by_length": False, "data.max_drop_share": 1.0}
    with training_data(apply_overrides(config, changes)) as (data, read):
        rows_shown = []
        for row in logged:
            batch = data.train_loader.replay(row["restore_key"])
            if batch["__key__"] != row["keys"]:
                raise ValueError(
                    f"replay: rank {row['rank']}, micro batch {row['micro_batch']} held {row['keys']}, "
                    f"{_paths(config)} now gives {batch['__key__']}; the dataset has changed."
                )
            rows_shown += read(batch)
        changed = _changed_since_saved(config, data)
    title = f"{config.name}: step {step}" + (f"; {changed}" if changed else "")
    return page(title, to_yaml(config), rows_shown, len(rows_shown), []), changed


def _changed_since_saved(config: RunConfig, data: RunData) -> str:
    latest = latest_checkpoint(config.run_dir)
    states = [rank["loader"] for rank in read_state(latest)["ranks"] if rank["loader"]] if latest else []
    names = data_changes(states[0]["fingerprint"], data.train_loader.fingerprint) if states else []
    if not names:
        return ""
    return (
        f"the data has changed since {latest.name} was saved ({', '.join(names)}): samples of the same keys "
        "may not be what was trained"
    )


def stats_text(config: RunConfig, samples: int) -> str:
    """Tokens, images and patches of the first samples of the training data, and settings that fit them."""
    changes = {"data.packing": "none", "data.max_patches": None, "data.group_by_length": False}
    changes |= {"data.seq_length": ANY_LENGTH}
    changes |= {"data.shuffle_buffer_size": 1}  # a larger one mixes the epochs of a small dataset
    with training_data(apply_overrides(config, changes)) as (data, _):
        measured = np.array([_measures(data, batch) for batch in _first(data, samples)])
        drops = Counter(drop["reason"] for drop in _drops(data))
    tokens, trained, images, patches = measured.T
    lines = [f"{len(measured)} samples of {_paths(config)}", ""]
    lines += _table({"tokens": tokens, "trained tokens": trained, "images": images, "patches": patches})
    if drops:
        lines.append(f"dropped: {', '.join(f'{count} {reason}' for reason, count in drops.items())}")
    return "\n".join([*lines, "", *_proposal(tokens, patches)])


@contextmanager
def training_data(config: RunConfig) -> Iterator[tuple[RunData, RowReader]]:
    """The run's training data on a single rank, one row per batch, read in this process; no run folder."""
    with tempfile.TemporaryDirectory() as folder:
        alone = {"run_dir": folder, "data.num_workers": 0, "train.micro_batch_size": 1}
        config = apply_overrides(config, alone)
        source = open_source(config.model.hf_path, data=config.data)
        data = RunData(config, source.processor, source.needs, rank=0, world_size=1)
        try:
            boxes = Boxes(source.processor, config.data, source.needs.box_format)
            yield data, RowReader(source, boxes)
        finally:
            data.close()


def _first(data: RunData, count: int) -> Iterator[Batch]:
    """The first batches that contain a sample not seen before.

    Stops when more batches repeat samples than bring new ones: packed rows of a small dataset mix its epochs.
    """
    seen: set[str] = set()
    fresh = known = 0
    with tqdm(total=count, desc="reading", unit="row", leave=False, disable=None) as bar:
        for batch in data.train_batches():
            if fresh == count or known > fresh:
                return
            keys = set(batch["__key__"][0])
            if keys <= seen:
                known += 1
                continue
            seen |= keys
            fresh += 1
            bar.update()
            yield batch


def _paths(config: RunConfig) -> str:
    return ", ".join(paths_of(config.data.train_data_path))


def _drops(data: RunData) -> list[dict]:
    """The drops, each sample once, however often it was read."""
    return list({drop["key"]: drop for drop in data.drops.examples()}.values())


def _measures(data: RunData, batch: Batch) -> tuple[int, int, int, int]:
    visual: GenericVisualInputs | None = batch["visual_inputs"]
    images = len(visual.items()) if visual is not None else 0
    patches = data.patches_of(visual)
    return int((batch["attention_mask"] > 0).sum()), int((batch["loss_mask"] > 0).sum()), images, patches


def _table(columns: dict[str, np.ndarray]) -> list[str]:
    width = max(map(len, columns))
    heads = ["least", *(f"{q:.0%}" for q in QUANTILES[1:-1]), "most", "mean"]
    lines = [" " * width + "".join(f"{head:>9}" for head in heads)]
    for name, values in columns.items():
        numbers = [*np.quantile(values, QUANTILES, method="nearest"), values.mean()]
        lines.append(f"{name:<{width}}" + "".join(f"{number:>9,.0f}" for number in numbers))
    return lines


def _proposal(tokens: np.ndarray, patches: np.ndarray) -> list[str]:
    """Proposes a patch budget and a row length: the smallest that holds 99.9 % of the samples and at least
    four average ones."""
    wanted = max(np.quantile(tokens, 0.999), 4 * tokens.mean())
    seq_length = int(-(-wanted // GRANULARITY) * GRANULARITY)
    fitting = tokens[tokens <= seq_length]
    rows = pack_buffer(fitting.tolist(), seq_length, [0] * len(fitting), None)
    fill = fitting.sum() / seq_length / len(rows)
    alone = tokens.mean() / np.quantile(tokens, 1)
    lines = [
        f"Proposed: data.packing=stream data.seq_length={seq_length}",
        f"  packed, {fill:.1%} of a row's tokens are not padding; padded to the longest, {alone:.1%} are.",
        f"  {len(tokens) - len(fitting)} of these samples are longer.",
    ]
    if patches.any():
        budget = max(1.2 * seq_length * patches.sum() / tokens.sum(), patches.max())
        lines[0] += f" data.max_patches={int(-(-budget // GRANULARITY) * GRANULARITY)}"
    return lines
