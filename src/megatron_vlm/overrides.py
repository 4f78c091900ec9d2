"""Settings by name: `key.path=value`, arguments of recipes, mappings and YAML to and from a `RunConfig`."""

import difflib
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_vlm.config import MISSING, ConfigError, RunConfig, all_settings, setting_types
from megatron_vlm.files import read_text
from megatron_vlm.messages import MOST_NEAR, any_of, has_keys, join_lines
from megatron_vlm.stores import KEYS

# setting one of a pair takes back the other
EXCLUSIVE = (("train.steps", "train.epochs"), ("optimizer.warmup_steps", "optimizer.warmup_ratio"))
MOST_YAML = 1 << 20  # characters of settings
MOST_PROBLEMS = 20  # that are named
# the keyword arguments that all recipes share, by the group of `RunConfig` that holds the setting
ARGUMENTS_OF_GROUP = {
    "": ("name", "run_dir"),
    "model.": ("hf_path", "load_weights", "dtype", "freeze", "fallbacks", "recompute", "recompute_layers"),
    "parallel.": ("tp", "pp", "vpp", "cp", "ep", "sp", "tp_comm_overlap"),
    "data.": (
        *("dataset_type", "train_data_path", "valid_data_path"),
        *("seq_length", "max_pixels", "num_workers"),
    ),
    "optimizer.": ("lr", "min_lr", "warmup_steps", "offload", "reduce_in_fp32"),
    "train.": (
        *("objective", "steps", "epochs", "micro_batch_size", "global_batch_size"),
        *("seed", "eval_every", "save_every", "callbacks"),
    ),
    "logging.": ("wandb_project",),
}
SETTING_OF_ARGUMENT = {name: group + name for group, names in ARGUMENTS_OF_GROUP.items() for name in names}
ARGUMENT_OF_SETTING = {setting: argument for argument, setting in SETTING_OF_ARGUMENT.items()}
# flags of the command line that have another name than the argument, which is accepted as well
FLAGS = {"hf-path": "model", "train-data-path": "data", "valid-data-path": "valid-data"}
NEAR = 0.75  # how alike two names are, of 1, when one may be a misspelling of the other


class _PlainLoader(yaml.SafeLoader):
    """Reads YAML without aliases, which a few lines nest to any size, and without a key that comes twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError("aliases are not read; write it out", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        counts = Counter(key for key in keys if isinstance(key, str))
        if twice := [key for key, count in counts.items() if count > 1]:
            raise yaml.MarkedYAMLError(f"{twice[0]} stands there twice; write it once", node.start_mark)
        return node


def apply_overrides(config: RunConfig, overrides: Iterable[str] | Mapping[str, Any]) -> RunConfig:
    """A copy of `config` with settings replaced; the original stays as it was.

    `overrides` are `key.path=value` texts, or a mapping by dotted or nested keys. Values are converted to
    the setting's type. A setting of a pair in `EXCLUSIVE` takes the place of the other one.

    Raises ConfigError naming the place of the first unknown keys and unfit values, one a line.
    """
    if not isinstance(overrides, Mapping):
        overrides = dict(split_override(text) for text in overrides)
    flat = _by_setting(flatten(overrides))
    for pair in EXCLUSIVE:
        changes = {key for key in pair if flat.get(key) not in (None, "null", "None")}
        if len(changes) == 1:
            flat = dict.fromkeys(set(pair) - changes) | flat
    changed = deepcopy(config)
    problems = []
    for key, value in flat.items():
        try:
            _set(changed, key, value)
        except ConfigError as error:
            problems.append(str(error))
        if len(problems) == MOST_PROBLEMS:  # each looks for a name like it
            break
    if problems:
        raise ConfigError(join_lines(problems))
    return changed


def as_settings(arguments: Mapping[str, Any], parameters: Collection[str] = ()) -> dict[str, Any]:
    """Recipe arguments, settings and names of other tools by the settings that they set.

    `parameters` belong to a user's recipe alone and keep their names. Raises ConfigError on an
    unknown argument, and if two names of a setting have two values.
    """
    settings = _by_setting(arguments, parameters)
    for name in settings:
        if "." not in name and name not in (*parameters, *setting_types()):
            raise ConfigError(f"{name}: no such setting{_hint(name, parameters)}")
    return settings


def _by_setting(values: Mapping[str, Any], parameters: Collection[str] = ()) -> dict[str, Any]:
    """The values by setting; an unknown name stays. Raises ConfigError if a setting gets two values."""
    settings: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in values.items():
        key = name if name in parameters else setting_of(name)
        if str(settings.setdefault(key, value)) != str(value):
            raise ConfigError(
                f"{names[key]}={settings[key]} and {name}={value} both set {key}; give one of them."
            )
        names.setdefault(key, name)
    return settings


def setting_of(name: str) -> str:
    """The setting of an argument of recipes, or of a name in another tool that means exactly the same.

    Any other name is returned as it is. A name of another tool is said to the log, once.
    """
    if name in SETTING_OF_ARGUMENT or _is_known(name):
        return SETTING_OF_ARGUMENT.get(name, name)
    setting, difference = _foreign(name)
    if setting is None or difference:
        return name
    _log_once(f"{name} is {setting} here")
    return setting


def _is_known(key: str) -> bool:
    """Whether it is a setting, or an entry of a setting that is a mapping."""
    return any(f"{key}.".startswith(f"{name}.") for name in setting_types())


@cache
def foreign_names() -> dict[str, tuple[str | None, str, str]]:
    """Return names of other tools: name -> our setting, the tools, what differs ("": nothing)."""
    rows = load_yaml(read_text(Path(__file__).with_name("foreign_names.yaml")))
    return {
        name: (setting, tools, "".join(difference)) for name, (setting, tools, *difference) in rows.items()
    }


def _foreign(name: str) -> tuple[str | None, str]:
    """Our setting and what differs, of another tool's name with or without its groups before it."""
    setting, _, difference = foreign_names().get(name.rpartition(".")[2], (None, "", ""))
    return setting, difference


def setting_for_flag(flag: str) -> str:
    """Return what to write for a flag that is a setting, here or in another tool; "" if it is none."""
    name = flag.lstrip("-").replace("-", "_")
    setting, difference = _foreign(name)
    if name in SETTING_OF_ARGUMENT or _is_known(name):
        return f"write {SETTING_OF_ARGUMENT.get(name, name)}=VALUE, without dashes"
    if difference:
        return f"here it is {setting}: {difference}" if setting else difference
    return f"write {setting}=VALUE, without dashes" if setting else ""


@cache
def _log_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def flag_of(name: str) -> str:
    """Return an argument's or a flag's name as `--help` spells it, without the dashes before it."""
    name = name.replace("_", "-")
    return FLAGS.get(name, name)


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings; a layer replaces what those before it set, and of a pair in `EXCLUSIVE` the other, too."""
    settings: dict[str, Any] = {}
    for layer in layers:
        replaced = {key for pair in EXCLUSIVE if {*pair} & layer.keys() for key in pair}
        settings = {key: value for key, value in settings.items() if key not in replaced} | layer
    return settings


def to_yaml(config: RunConfig) -> str:
    """Every setting, in the order of the dataclasses."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def from_yaml(text: str) -> RunConfig:
    """The inverse of `to_yaml`; what the text leaves out keeps its default. Raises as `apply_overrides`."""
    return apply_overrides(RunConfig(), load_yaml(text))


def load_yaml(text: str, place: str = "YAML") -> dict[str, Any]:
    """A YAML mapping as plain data. Raises ConfigError if the text is anything else."""
    try:
        settings = _plain_yaml(text)
        flatten(settings if isinstance(settings, dict) else {})
    except RecursionError as error:
        raise ConfigError(f"{place}: nested too deeply; write settings as `key: value` lines.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{place}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{place}: expected settings as `key: value` lines, found {type(settings).__name__}."
        )
    return settings


def _plain_yaml(text: str) -> Any:
    if len(text) > MOST_YAML:
        raise ValueError(f"{len(text)} characters, more than {MOST_YAML}")
    return yaml.load(text, _PlainLoader)  # noqa: S506 - a SafeLoader


def split_override(text: str) -> tuple[str, str]:
    """Key and value of `key.path=value`; the value may hold equals signs. Raises ConfigError without any."""
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        if os.path.exists(text):
            raise ConfigError(
                f"{text}: a path that is not said to be what; write hf_path={text} for a checkpoint, "
                f"train_data_path={text} for data, or a flag before each path."
            )
        raise ConfigError(f"{text}: expected key.path=value, as train.steps=100.")
    return key.strip(), value


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as a flat mapping with dotted keys."""
    flat = {}
    for key, value in settings.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        flat.update(inner)
    return flat


def _set(config: RunConfig, key: str, value: Any) -> None:
    types = setting_types()
    name = next((name for name in types if f"{key}.".startswith(f"{name}.")), None)
    inside = [name.removeprefix(f"{key}.") for name in types if name.startswith(f"{key}.")]
    if inside:
        raise ConfigError(f"{key}: a group of settings ({', '.join(inside)}); set one of them.")
    if name is None or (name != key and get_origin(types[name]) is not dict):
        raise ConfigError(f"{key}: no such setting{_hint(key)}")
    value = checked(name, value if name == key else {key.removeprefix(f"{name}."): value})
    group, _, attribute = name.rpartition(".")
    holder = getattr(config, group) if group else config
    setattr(holder, attribute, getattr(holder, attribute) | value if isinstance(value, dict) else value)


def checked(name: str, value: Any) -> Any:
    """The value of a setting in the setting's type. Raises ConfigError if it has another or breaks a rule."""
    is_template = name == "data.chat_template"
    if "${" in str(value) and not is_template:  # other programs would fill it in
        raise ConfigError(f"{name}: {value!r}: ${{…}} is not filled in; write the value out.")
    if name != "train.on_export":  # a command of the user's, which may ask any server
        refuse_keys(name, value)
    if name.endswith(("_data_path", "score_path")) and re.search(r"(?i)\bhttps?:/", str(value)):
        raise ConfigError(
            f"{name}: data is not read by https; download the file, or give the name of a dataset of the hub "
            "or s3://BUCKET/PATH."
        )
    try:
        value = fit_to_type(value, setting_types()[name])
        return read_template(value) if is_template and value else value
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from error


def read_template(template: str) -> str:
    """Return the text of a Jinja template, which is given as it stands or as the path of its file.

    Raises ValueError if the file has no Jinja, and as `read_text`.
    """
    if "{{" in template or "{%" in template:
        return template
    text = read_text(os.path.expanduser(template))
    if "{{" not in text and "{%" not in text:
        raise ValueError(f"{template} has no {{{{ and no {{%; give a file with a Jinja template.")
    return text


def setting_problems(config: RunConfig) -> list[str]:
    """Return messages about settings that are missing or break the rule of their type."""
    problems = []
    for key, value in all_settings(config).items():
        if value == MISSING:
            problems.append(f"{key}: not set; pass --{flag_of(key.split('.')[-1])} or {key}=…")
            continue
        try:
            checked(key, value)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def refuse_keys(name: str, value: Any) -> None:
    """Raise ConfigError for an address that holds keys, which the files of a run would show."""
    text = str(value)
    if ":/" in text and (re.search(r"(?i)(s3|msc):/+[^/\s,]*[:@]", text) or has_keys(text)):
        raise ConfigError(
            f"{name}: an address with keys, which files of the run would show; give it without them, and the "
            f"keys by {KEYS}."
        )


def fit_to_type(value: Any, hint: Any) -> Any:
    """Return the value in the type of a hint, whose rules pydantic checks; texts are read.

    A text is YAML for a list or a mapping, with its brackets or without, and for a value whose type is open.

    Raises:
        ValueError: It has another type or breaks a rule; the message says which.
    """
    types = _alternatives(hint)
    kinds = {get_origin(kind) or kind for kind in types}
    if NoneType in kinds and value in ("null", "None"):
        return None
    if isinstance(value, PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        if dict in kinds and not value.startswith("{"):
            value = f"{{{value}}}"
        if kinds == {list} and not value.startswith("["):
            value = f"[{value}]"
        if dict in kinds or list in kinds and value.startswith("["):
            value = _plain_yaml(value)
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    inner = [kind for outer in types for part in get_args(outer) for kind in _alternatives(part)]
    if bool not in (*types, *inner) and any(isinstance(entry, bool) for entry in entries):
        raise ValueError(f"{value!r}: true and false are no numbers or texts.")  # pydantic takes true for 1
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        place = f"{problems[0]['loc'][0]}: " if dict in kinds and problems[0]["loc"] else ""
        for problem in problems:
            if problem["type"] == "value_error":  # by a rule of ours, which names the value
                raise problem["ctx"]["error"] from error
        texts = dict.fromkeys(problem["msg"] for problem in problems)
        raise ValueError(f"{place}{problems[0]['input']!r}: {' or '.join(texts)}.") from error


def _alternatives(hint: Any) -> list[Any]:
    """The types of a hint, without the rules of an `Annotated` and with the parts of a union."""
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _alternatives(part)]
    return [hint]


@cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False))


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of a run's configuration, for editors of its YAML files."""
    return TypeAdapter(RunConfig).json_schema()


def _hint(name: str, parameters: Collection[str] = ()) -> str:
    """Return what to write in place of an unknown name: ours for another tool's, or five near ones.

    Last parts of names are compared, as most names share a group. `parameters` are known names, too.
    """
    setting, difference = _foreign(name)
    if difference:
        return f"; here it is {setting}: {difference}." if setting else f": {difference}."
    last = name.rpartition(".")[2]
    ours = {key.rpartition(".")[2]: key for key in reversed(setting_types())}
    ours |= dict(zip(parameters, parameters, strict=True)) | (
        {} if "." in name else {key: key for key in SETTING_OF_ARGUMENT}
    )
    setting_by_name = {foreign: row[0] for foreign, row in foreign_names().items() if row[0]} | ours
    near = [last] if last in ours else difflib.get_close_matches(last, setting_by_name, MOST_NEAR, NEAR)
    if not near:
        return "; `megatron-vlm train --dry-run` with a recipe or a model prints every setting."
    return f"; did you mean {any_of(dict.fromkeys(setting_by_name[match] for match in near))}?"
