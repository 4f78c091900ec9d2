"""Checks datasets on disk, as data and before torch is imported: every problem, a line each."""

from collections.abc import Iterator
from pathlib import Path

from megatron_vlm import hub, stores
from megatron_vlm.checks.model_on_disk import is_hub_name, is_prepared, kind_of
from megatron_vlm.config import DataConfig, DataPaths, RunConfig
from megatron_vlm.data.on_disk.fields import MEDIA
from megatron_vlm.data.on_disk.lines import first_records
from megatron_vlm.data.on_disk.named import describe_outside, is_address, is_path
from megatron_vlm.data.on_disk.paths import paths_of
from megatron_vlm.data.on_disk.plain import on_disk
from megatron_vlm.messages import printable
from megatron_vlm.objectives import objective_of

FEW_PATHS = 3  # fewer missing files may come from broken records, which a run counts and leaves out
RECORD_KEYS = {"messages", "conversations", "prompt"}  # a record that has one is none of a meta file


def data_problems(data: DataConfig, key: str, paths: DataPaths) -> Iterator[str]:
    """Messages about paths that cannot be read as a `data.dataset_type`. Rows in a store are fetched."""
    for name in paths_of(paths):
        path = Path(name).expanduser()
        shown = f"{key}: {printable(name)}"
        if stores.is_store(name):
            yield from _problems_in_store(data, name, key)
        elif "://" in name:
            continue
        elif data.dataset_type == "energon":
            yield from _energon_problems(path, shown)
        elif path.exists():
            yield from _rows_problems(path, shown, data.media_dir, data.columns, "data.media_dir=")
        elif not is_hub_name(name):
            remedy = "give a file or folder of conversations, or a hub name"
            if "," in name and all(Path(part.strip()).expanduser().exists() for part in name.split(",")):
                remedy = f"write several paths as a list: '[{printable(name)}]'"
            yield f"{shown} does not exist; {remedy}."
        elif not hub.is_cached(name, dataset=True) and (reason := hub.why_not("HF_DATASETS")):
            yield f"{key}: {hub.not_there(name, reason, dataset=True)}"


def _problems_in_store(data: DataConfig, name: str, key: str) -> Iterator[str]:
    shown = f"{key}: {printable(name)}"
    try:
        if data.dataset_type == "hf":
            media_dir = data.media_dir or name.rpartition("/")[0]
            yield from _file_problems(on_disk(name), shown, media_dir, data.columns, "data.media_dir=")
        else:
            infos = [f"{name.rstrip('/')}/.nv-meta/.info.{kind}" for kind in ("json", "yaml")]
            if not any(map(stores.is_file, [name] if name.endswith(".yaml") else infos)):
                yield f"{shown} is no prepared Energon dataset; copy one there, see `megatron-vlm prepare`."
    except stores.StoreError as error:
        yield f"{key}: {error}"


def _energon_problems(path: Path, shown: str) -> Iterator[str]:
    if not path.exists():
        yield f"{shown} does not exist; write one with `megatron-vlm prepare`."
    elif not path.is_dir():
        if path.suffix != ".yaml":
            yield (
                f"{shown} is a file, dataset_type energon reads prepared folders; set data.dataset_type=hf, "
                "or run `megatron-vlm prepare` on it first."
            )
    elif not is_prepared(path):
        inside = next((child for child in sorted(path.iterdir()) if is_prepared(child)), None)
        kind = kind_of(path) or "not a prepared Energon dataset"
        remedy = "give a folder that `megatron-vlm prepare` wrote"
        if inside is not None:
            remedy = f"give {printable(inside)}, which is one"
        elif "saved by" in kind:
            remedy = "set data.dataset_type=hf"
        yield f"{shown} is {kind}; {remedy}."


def source_problems(
    name: str, image_root: str | Path | None, columns: dict[str, str], is_hf: bool
) -> Iterator[str]:
    """Messages about a local path that `prepare` cannot read."""
    path = Path(name)
    shown = f"prepare: source {printable(name)}"
    if path.exists():
        yield from _rows_problems(path, shown, image_root, columns, "--image-root ")
    elif not is_hf and "://" not in name:
        yield f"{shown} does not exist; give a file or folder; a hub name needs --format hf."


def _rows_problems(
    path: Path, shown: str, media_dir: str | Path | None, columns: dict[str, str], setting: str
) -> Iterator[str]:
    """Messages about rows that cannot be read; `setting` is how the media folder is given."""
    if not (media_dir is None or stores.is_store(media_dir) or Path(media_dir).expanduser().is_dir()):
        yield f"{shown}: {setting}{printable(media_dir)} is not a folder; give the one paths start from."
    elif is_prepared(path):
        yield f"{shown} is a prepared Energon dataset; train from it, with data.dataset_type=energon."
    elif path.is_dir():
        kind = kind_of(path)
        if kind is not None and "saved by" not in kind:
            yield f"{shown} is {kind}, not a dataset; give the folder or file of the conversations."
    else:
        yield from _file_problems(path, shown, media_dir, columns, setting)


def _file_problems(
    path: Path, shown: str, media_dir: str | Path | None, columns: dict[str, str], setting: str
) -> Iterator[str]:
    try:
        records = list(first_records(path))
    except (ValueError, OSError) as error:
        yield str(error)
        return
    root = stores.folder(media_dir or path.parent)
    of_records = [_media_names(record, columns) for record in records]
    names = [name for each in of_records for name in each]
    if not names or any(_leads_into(root, name) for name in names):
        return
    if len(names) < FEW_PATHS and not all(of_records):
        return
    if is_address(names[0]):
        yield f"{shown}: {printable(names[0])} is an address; download it and give its path."
        return
    path = Path(root, names[0]).resolve() if isinstance(root, Path) and is_path(names[0]) else None
    if path is not None and path.exists():
        yield f"{shown}: {printable(names[0])} {describe_outside(names[0], path, root)}."
        return
    yield (
        f"{shown}: none of the first {len(names)} media paths in it leads to a file under {printable(root)}, "
        f"such as {printable(names[0])}; give {setting}FOLDER, where these paths start, or download them."
    )


def record_problems(config: RunConfig) -> Iterator[str]:
    """JSON files that begin with records without what the run's objective needs of each."""
    data, objective = config.data, objective_of(config)
    names = {data.columns.get(name, name) for name in objective.record_keys}
    for key in ("train_data_path", "valid_data_path") if names and data.dataset_type == "hf" else ():
        for name in paths_of(getattr(data, key)):
            path = Path(name).expanduser()
            records = list(first_records(path)) if path.is_file() else []
            known = any(each.keys() & RECORD_KEYS for each in records)  # no meta file
            if known and not any(names & each.keys() for each in records):
                yield (
                    f"data.{key}: {printable(name)}: its first {len(records)} records have no "
                    f"{objective.record_part} ({', '.join(sorted(names))}), which train.objective="
                    f"{config.train.objective} needs; give records that have it, or drop the objective."
                )


def _media_names(record: dict, columns: dict[str, str]) -> list[str]:
    """The media paths that a record names as plain text, under any of their names."""
    values = [record.get(columns.get(name, name)) for names in MEDIA.values() for name in names]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if item and is_path(item)]


def _leads_into(root: Path | str, name: str) -> bool:
    """Whether a file of this name is there and, as `data.media.files` demands, inside `root`."""
    try:
        if isinstance(root, str):
            return stores.is_file(stores.inside(root, name))
        path = (root / name).resolve()
        return path.is_relative_to(root.resolve()) and path.exists()
    except stores.StoreError:
        raise
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
        return False
