"""Checks what a command names on disk before torch is imported: paths exist, and are of the right kind.

Everything else is said by the library that reads a file, with its path; see `inputs.attribute_errors_to`.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_vlm import stores
from megatron_vlm.adapter_settings import with_peft_settings
from megatron_vlm.config import MISSING, AdapterConfig, ConfigError, DataConfig, DataPaths, RunConfig
from megatron_vlm.data.on_disk.paths import ROWS, paths_of, tar_shards
from megatron_vlm.files import read_file
from megatron_vlm.messages import join_lines
from megatron_vlm.objectives import objective_of
from megatron_vlm.supported import ADAPTER_FILE, missing_weights, read_config
from megatron_vlm.validate import misfit, sizes_in

KINDS = {  # a name in a folder -> what the folder then is
    ".nv-meta": "a prepared Energon dataset",
    "dataset_info.json": "a dataset saved by `datasets`",
    "dataset_dict.json": "a dataset saved by `datasets`",
    "config.yaml": "a run folder",
    ADAPTER_FILE: "an adapter without its base model",
    "config.json": "a Hugging Face checkpoint",
}
META_FILE = "dataset_info.json"  # LLaMA-Factory's name for a file of several datasets
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def kind_of(path: Path) -> str:
    """Return in words what a path holds, by the file or folder that only such a thing has."""
    words = (words for name, words in KINDS.items() if (path / name).exists())
    return next(words, "a file" if path.is_file() else "another folder")


def is_prepared(path: str | Path) -> bool:
    """Return whether a folder, on disk or in a store, is a dataset of Energon."""
    return any(exists(f"{str(path).rstrip('/')}/.nv-meta/.info.{ending}") for ending in ("json", "yaml"))


def exists(name: str | Path) -> bool:
    """Return whether there is such a file or, on disk, such a folder."""
    return stores.is_file(name) if stores.is_store(name) else os.path.exists(os.path.expanduser(name))


def is_energon(name: str) -> bool:
    """Return whether this is a dataset of Energon, or the file of a metadataset."""
    if stores.is_store(name):  # folders of rows are not read there
        return Path(name).suffix not in ROWS
    return is_prepared(os.path.expanduser(name)) or (name.endswith(".yaml") and exists(name))


def is_hub_name(path: str) -> bool:
    return HUB_NAME.fullmatch(path) is not None and Path(path).suffix not in ROWS


def data_problems(dataset_type: str, key: str, paths: DataPaths, may_be_hub: bool = True) -> Iterator[str]:
    """Yield messages about paths that are not there, or are no data of this `data.dataset_type`."""
    for name in paths_of(paths):
        try:
            problem = _data_problem(dataset_type, name, may_be_hub and dataset_type == "hf")
        except stores.StoreError as error:
            yield f"{key}: {error}"
        else:
            if problem:
                yield f"{key}: {name} {problem}."


def _data_problem(dataset_type: str, name: str, may_be_hub: bool) -> str | None:
    path = name if stores.is_store(name) else os.path.expanduser(name)
    if is_prepared(path):
        if dataset_type == "hf":
            return "is a prepared Energon dataset; train from it, with data.dataset_type=energon"
    elif not exists(path):
        if not (may_be_hub and is_hub_name(name) or "://" in name and not stores.is_store(name)):
            return "does not exist; give a file or folder of conversations, or a hub name"
    elif dataset_type == "energon" and not name.endswith(".yaml"):
        if tar_shards(path)[1]:
            return f"has .tar shards and no index; run `megatron-vlm prepare {name}`, which copies no shard"
        remedy = "run `megatron-vlm prepare` first, or set data.dataset_type=hf"
        return f"is {kind_of(Path(path))}, not a prepared Energon dataset; {remedy}"
    elif dataset_type == "hf" and Path(path, "config.json").is_file():
        return f"is {kind_of(Path(path))}, not a dataset; give the folder or file of the conversations"
    return None


def meta_problems(data: DataConfig) -> Iterator[str]:
    """Yield messages about files of several datasets, such as LLaMA-Factory's, that a run could not open."""
    if not (data.datasets or re.search(r"\.json\b", f"{data.train_data_path} {data.valid_data_path}")):
        return  # without these imports, which take a while
    from megatron_vlm.data.chatml.record import Columns
    from megatron_vlm.data.records.opening import entries_of, kind_of

    for key, datasets in (("train_data_path", data.datasets), ("valid_data_path", ())):
        for path in paths_of(getattr(data, key)) if data.dataset_type == "hf" else ():
            is_meta = (datasets or Path(path).name == META_FILE) and path != MISSING
            try:
                if is_meta or path.endswith(".json") and os.path.isfile(path) and kind_of(path) == "meta":
                    entries_of(path, Columns(dict(data.columns)), None, datasets)
            except (ValueError, OSError) as error:
                yield str(error)


def folder_problems(setting: str, location: str, refuse: Callable[[str | Path], Any]) -> Iterator[str]:
    """Yield messages about a folder, here or in a store, or a hub name, that is no checkpoint for a setting.
    `refuse` raises ConfigError if its config.json does not fit."""
    path = Path(location).expanduser()
    label = f"{setting}: {location}"
    is_here = not stores.is_store(location) and (path.exists() or not is_hub_name(location))
    if is_here and not path.exists():
        yield f"{label} does not exist; give a checkpoint folder or a Hugging Face hub name."
    elif is_here and not (path / "config.json").is_file():
        remedy = "give the folder of a Hugging Face checkpoint"
        if (path / "config.yaml").is_file():
            remedy = f"export it first: megatron-vlm export {location} OUTPUT"
        elif (path / ADAPTER_FILE).is_file():
            remedy = f"give the folder of its base model, and adapter.start={location}"
        yield f"{label} is {kind_of(path)}, and has no config.json; {remedy}."
    else:
        try:
            refuse(path if is_here else location)
        except (ConfigError, OSError) as error:
            yield f"{setting}: {error}"


def checkpoint_problems(hf_path: str, load_weights: bool = True) -> Iterator[str]:
    """Yield messages about a checkpoint that cannot be trained. Of a hub name, config.json is read."""
    problems = list(folder_problems("model.hf_path", hf_path, read_config))
    yield from problems
    path = Path(hf_path).expanduser()
    if problems or stores.is_store(hf_path) or not path.exists():
        return
    if load_weights and (problem := missing_weights(path)):
        yield f"model.hf_path: {problem}"


def model_problems(config: RunConfig, needs_start: bool = False) -> Iterator[str]:
    """Yield messages about a model that cannot be built: its checkpoint, the layout, the first adapter.

    `needs_start`: also a run with checkpoints reads the weights that it started from.
    """
    resumes = any(Path(config.run_dir, "checkpoints").glob("step_*/state.json"))
    load_weights = config.model.load_weights and (config.adapter.used or not resumes or needs_start)
    problems = list(checkpoint_problems(config.model.hf_path, load_weights))
    yield from problems
    file = Path(config.model.hf_path).expanduser() / "config.json"
    if not problems and file.is_file():
        yield from filter(None, [misfit(config.parallel, sizes_in(json.loads(read_file(file))))])
    start = config.adapter.start
    if start is None or resumes and Path(config.run_dir, "checkpoints", "adapter_start").is_dir():
        return
    if not (Path(start) / ADAPTER_FILE).is_file():
        fact = f"holds no {ADAPTER_FILE}" if Path(start).exists() else "does not exist"
        yield f"adapter.start: {start} {fact}; give a folder that peft wrote."
    else:
        try:
            with_peft_settings(AdapterConfig(start=start))
        except ConfigError as error:
            yield from str(error).splitlines()


def run_problems(run_dir: Path) -> Iterator[str]:
    """Yield a message about a folder that cannot be read as a run's."""
    if not (run_dir / "config.yaml").exists():
        kind = f"is {kind_of(run_dir)}, not the folder of a run" if run_dir.exists() else "does not exist"
        yield f"{run_dir} {kind}; give what was --run-dir when it was trained."


def validate_paths(config: RunConfig, needs_data: bool = True) -> None:
    """Raise ConfigError with every problem of what the configuration names on disk, one a line."""
    problems = list(model_problems(config, objective_of(config).reference_passes > 0))
    data = config.data
    if needs_data:
        for key in ("train_data_path", "valid_data_path"):
            problems += data_problems(data.dataset_type, f"data.{key}", getattr(data, key))
        problems += data_problems("hf", "data.score_path", data.score_path)
        if data.media_dir and not (stores.is_store(data.media_dir) or exists(data.media_dir)):
            problems.append(f"data.media_dir={data.media_dir} does not exist; give a folder.")
        problems = problems or list(meta_problems(data))
    if stores.is_store(str(config.run_dir)):
        run_dir = config.run_dir
        problems.append(
            f"run_dir: {run_dir} is in a store; give a folder on disk, and train.upload_to={run_dir}."
        )
    if config.train.upload_to is not None:
        try:
            stores.is_file(config.train.upload_to)
        except stores.StoreError as error:
            problems.append(f"train.upload_to: {error}")
    _refuse(problems)


def validate_model(config: RunConfig) -> None:
    """Do as `validate_paths` for commands that build a run's model and neither read data nor train."""
    _refuse(list(model_problems(config)))


def _refuse(problems: list[str]) -> None:
    """Raise ConfigError with a line for each problem."""
    if problems:
        raise ConfigError(join_lines(problems))
