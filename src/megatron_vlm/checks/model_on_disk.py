"""Checks checkpoints and run folders on disk, as data and before torch is imported: a line for each problem.

The files in a folder tell whether it is a checkpoint, a dataset or a run folder, so that a message can say
what was given in place of the right one.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_vlm import hub, stores
from megatron_vlm.config import AdapterConfig, ConfigError
from megatron_vlm.config_rules.peft_config import settled
from megatron_vlm.data.on_disk.paths import ROWS
from megatron_vlm.files import read_file
from megatron_vlm.messages import printable
from megatron_vlm.stores import fetched
from megatron_vlm.supported import ADAPTER_FILE, FETCHED, WEIGHT_FILE, read_config
from megatron_vlm.weight_files import description_problems, has_weights, tensors_of, weight_files

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "image_processor_config.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
TEMPLATE_KEYS = ("tokenizer_config.json", "processor_config.json")
HALF = ".cache/huggingface/download/**/*.incomplete"  # what `hf download --local-dir` has not finished
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
ADAPTER, RUN = "an adapter without its base model", "a run folder"


# ---- what a path is ---------------------------------------------------------------------------------------


def kind_of(path: Path) -> str | None:
    """Says in words what a folder holds; None if this package does not know it."""
    if is_prepared(path):
        return "a prepared Energon dataset"
    if any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        return "a dataset saved by `datasets`"
    if (path / "config.yaml").is_file() and ((path / "checkpoints").is_dir() or (path / "batches").is_dir()):
        return RUN
    if (path / ADAPTER_FILE).is_file():
        return ADAPTER
    if (path / "config.json").is_file():
        return "a Hugging Face checkpoint"
    if any(path.glob("*.tar")):
        return "a folder of shards that are not prepared"
    return None


def is_prepared(path: Path) -> bool:
    return any((path / ".nv-meta" / name).is_file() for name in (".info.json", ".info.yaml"))


def is_energon(name: str) -> bool:
    """Whether this is a dataset of Energon, or the file of a metadataset."""
    path = Path(os.path.expanduser(name))
    if stores.is_store(name):  # folders of rows are not read there
        return path.suffix not in ROWS
    return is_prepared(path) if path.is_dir() else path.is_file() and path.suffix == ".yaml"


def is_hub_name(path: str) -> bool:
    return HUB_NAME.fullmatch(path) is not None and Path(path).suffix not in ROWS


def read_json(file: Path) -> Any:
    """The content of a small JSON file; None if it cannot be read."""
    try:
        return json.loads(read_file(file))
    except (OSError, ValueError, RecursionError):
        return None


# ---- checkpoints ------------------------------------------------------------------------------------------


def checkpoint_problems(
    hf_path: str, load_weights: bool = True, needs_processor: bool = True, needs_template: bool = True
) -> Iterator[str]:
    """Messages about a Hugging Face folder, or a hub name in the cache, that cannot be trained."""
    path = Path(hf_path).expanduser()
    shown = f"model.hf_path: {printable(hf_path)}"
    problems = list(folder_problems("model.hf_path", hf_path, read_config))
    yield from problems
    in_a_store = stores.is_store(hf_path)
    if problems or not (in_a_store or path.exists()):
        return
    if in_a_store:
        path = fetched(hf_path, [name for name in FETCHED if name != "*.safetensors"])
    elif load_weights:
        yield from weight_problems(
            "model.hf_path", path, " (or set model.load_weights=false for random ones)"
        )
    if needs_processor:
        yield from _processor_problems(path, shown, needs_template)
        yield from description_problems(path)


def folder_problems(setting: str, given: str, refuse: Callable[[str | Path], Any]) -> Iterator[str]:
    """Messages about a folder, here or in a store, or a cached hub name, that is no checkpoint for a setting.
    `refuse` raises ConfigError if its config.json does not fit."""
    path = Path(given).expanduser()
    shown = f"{setting}: {printable(given)}"
    if stores.is_store(given):
        try:
            refuse(given)
        except (ConfigError, OSError) as error:
            yield f"{setting}: {error}"
        return
    if not path.exists():
        if not is_hub_name(given):
            yield f"{shown} does not exist; give a checkpoint folder or a Hugging Face hub name."
            return
        if not hub.is_cached(given) and (reason := hub.why_not()):
            yield f"{setting}: {hub.not_there(given, reason)}"
        return
    if not path.is_dir():
        yield f"{shown} is a file; give the folder that holds config.json and the weights."
        return
    if not (path / "config.json").is_file():
        kind = kind_of(path) or "a folder without config.json"
        remedy = "give the folder of a Hugging Face checkpoint"
        if kind == RUN:
            remedy = f"export it first: megatron-vlm export {printable(given)} OUTPUT"
        elif kind == ADAPTER and setting == "model.hf_path":
            remedy = f"give the folder of its base model, and adapter.start={printable(given)}"
        yield f"{shown} is {kind}; {remedy}."
        return
    try:
        refuse(path)
    except ConfigError as error:
        yield str(error)


def weight_problems(setting: str, path: Path, otherwise: str = "") -> Iterator[str]:
    """Messages about weights that cannot be read; `otherwise` says how to do without them."""
    shown = f"{setting}: {printable(path)}"
    if not has_weights(path):
        why = f"no weights; add {WEIGHT_FILE}"
        if any(path.glob("pytorch_model*.bin")):
            why = f"only pickled weights, which are not read; convert them to {WEIGHT_FILE}"
        elif half := next(chain(path.glob("*.incomplete"), path.glob(HALF)), None):
            why = f"half a download, {printable(half.name)}, and no weights; complete the download"
        yield f"{shown} holds {why}{otherwise}."
        return
    try:
        names = weight_files(path)
        missing = [name for name in names if not (path / name).is_file()]
        if not missing:
            tensors_of(path)
            return
        yield (
            f"{shown} lacks {len(missing)} of its {len(names)} weight files, such as "
            f"{printable(missing[0])}; complete the download."
        )
    except ValueError as error:
        yield f"{setting}: {error}"


def _processor_problems(path: Path, shown: str, needs_template: bool) -> Iterator[str]:
    for names, what in (
        (TOKENIZERS, "tokenizer (such as tokenizer.json)"),
        (PROCESSORS, "image processor (preprocessor_config.json or processor_config.json)"),
    ):
        if not any((path / name).is_file() for name in names):
            yield f"{shown} has no {what}; copy the original checkpoint's into it."
    keys = [read_json(path / name) for name in TEMPLATE_KEYS]
    has_template = any((path / name).exists() for name in TEMPLATES) or any(
        isinstance(content, dict) and content.get("chat_template") for content in keys
    )
    if needs_template and not has_template:
        yield (
            f"{shown} has no chat template; put the one of the model's Instruct sibling into it as "
            "chat_template.jinja, or name it as data.chat_template."
        )


def start_problems(start: str) -> Iterator[str]:
    """Messages about a folder that is no adapter to train on, or one that cannot be trained."""
    path = Path(start)
    shown = f"adapter.start: {printable(start)}"
    if not path.exists():
        yield f"{shown} does not exist; give a folder that peft wrote."
    elif not (path / ADAPTER_FILE).is_file():
        remedy = "give a folder that peft wrote"
        if kind_of(path) == RUN:
            remedy = f"export it first: megatron-vlm export {printable(start)} OUTPUT --adapter"
        yield f"{shown} is {kind_of(path) or 'something'} without {ADAPTER_FILE}; {remedy}."
    else:
        try:
            settled(AdapterConfig(start=start))
        except ConfigError as error:
            yield str(error)


# ---- run folders ------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Whether a folder is read as a run where a checkpoint could be meant, too."""
    return (path / "config.yaml").exists() and not (path / "config.json").exists()


def run_problems(run_dir: Path) -> Iterator[str]:
    """Messages about a folder that cannot be read as a run's."""
    shown = printable(run_dir)
    if not run_dir.exists():
        yield f"{shown} does not exist; give the folder of a run."
    elif not (run_dir / "config.yaml").exists():
        kind = "a file" if run_dir.is_file() else kind_of(run_dir) or "a folder without config.yaml"
        yield f"{shown} is {kind}, not the folder of a run; give what was --run_dir when it was trained."


def run_dir_problems(run_dir: str | Path) -> Iterator[str]:
    """Messages about a folder into which no run can be written."""
    path = Path(run_dir).expanduser()
    shown = f"run_dir: {printable(run_dir)}"
    if stores.is_store(str(run_dir)):
        yield f"{shown} is in a store; give a folder on disk, and train.upload_to={printable(run_dir)}."
        return
    there = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), Path("/"))
    if not there.is_dir():
        yield f"{shown} cannot be made, {printable(there)} is a file; give another folder."
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{shown}: you may not write in {printable(there)}; give another folder, or ask for access."


def upload_problems(url: str | None) -> Iterator[str]:
    """Messages about an address to which nothing can be copied."""
    if url is not None and not stores.is_store(url):
        yield f"train.upload_to: {printable(url)} is no address; give s3://BUCKET/PATH or msc://PROFILE/PATH."
    elif url is not None:
        try:
            stores.is_file(url)
        except stores.StoreError as error:
            yield f"train.upload_to: {error}"
