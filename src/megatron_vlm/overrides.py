"""Settings by name: `key.path=value`, mappings and YAML to and from a `RunConfig`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_vlm.config import EPOCH, MISSING, PATHS, ConfigError, RunConfig, all_settings
from megatron_vlm.messages import suggestion

DATA_PATHS = "a path or a list of paths"
EVERY = "a number of steps, or epoch"
EXCLUSIVE = ("train.steps", "train.epochs")  # setting one takes back the other
MODULE_NAMES = "a regex or a list of names"
MOST_YAML = 1 << 20  # characters of settings
LONGEST_NUMBER = 100


class _PlainLoader(yaml.SafeLoader):
    """Reads YAML in time and memory in proportion to its size: without aliases, which a few lines can nest to
    any size, and without numbers of many digits, whose cost grows with the square of their length."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError("aliases are not read; write it out", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
            raise yaml.MarkedYAMLError(f"a number of {len(node.value)} digits", node.start_mark)
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if twice := [key for key in keys if isinstance(key, str) and keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(f"{twice[0]} stands there twice; write it once", node.start_mark)
        return node


def apply_overrides(config: RunConfig, overrides: Iterable[str] | Mapping[str, Any]) -> RunConfig:
    """A copy of `config` with settings replaced; the original stays as it was.

    `overrides` are `key.path=value` texts, or a mapping by dotted or nested keys. Values are converted to
    the setting's type. `train.epochs` takes the place of an earlier `train.steps`, and the reverse. Raises
    ConfigError naming the place of an unknown key or of an unfit value.
    """
    if not isinstance(overrides, Mapping):
        overrides = dict(split_override(text) for text in overrides)
    tree, flat = OmegaConf.structured(config), flatten(overrides)
    given = {key for key in EXCLUSIVE if flat.get(key) not in (None, "null", "None")}
    if len(given) == 1:
        flat = dict.fromkeys(set(EXCLUSIVE) - given) | flat
    for key, value in flat.items():
        _set(tree, key, value)
    return _build(RunConfig, tree)


def to_yaml(config: RunConfig) -> str:
    """Every setting, in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


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
            raise ConfigError(f"{text}: a path without its flag; give each its own, as --data A --data B.")
        raise ConfigError(f"{text}: expected key.path=value, as train.steps=100.")
    return key.strip(), value


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as a flat mapping with dotted keys."""
    flat = {}
    for key, value in settings.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        flat.update(inner)
    return flat


def _set(tree: DictConfig, key: str, value: Any) -> None:
    if "${" in str(
        value
    ):  # OmegaConf would read the environment, and a chain of references grows without end
        raise ConfigError(f"{key}: {value!r}: ${{…}} is not filled in; write the value out.")
    *sections, name = key.split(".")
    node = tree
    for place, section in enumerate(sections):
        if node is not None and _types(node).get(section, "").startswith("dict"):
            if isinstance(value, dict | list | tuple):
                raise ConfigError(f"{key}: {value!r} does not fit; expected str.")
            try:
                node[section][".".join([*sections[place + 1 :], name])] = _entry(_types(node)[section], value)
            except ValueError as error:
                raise ConfigError(f"{key}: {value!r} does not fit; expected a number.") from error
            return
        node = node[section] if _is_group(node, section) else None
    if node is None or name not in _types(node):
        raise ConfigError(f"{key}: no such setting{_suggest_key(key)}")
    if _is_group(node, name):
        raise ConfigError(f"{key}: a group of settings ({', '.join(node[name])}); set one of them.")
    wanted = _types(node)[name]
    wanted = {"DataPaths": DATA_PATHS, "Every": EVERY, "ModuleNames": MODULE_NAMES}.get(wanted, wanted)
    try:
        value = _parse(value, wanted) if isinstance(value, str) else value
        if any(item is None or isinstance(item, dict | list | tuple) for item in _items(value)):
            raise yaml.YAMLError("lists and mappings hold plain values")
        if wanted == EVERY and value != EPOCH and type(value) is not int:
            raise yaml.YAMLError(f"neither a whole number nor {EPOCH}")
        value = _as_meant(value) if name in PATHS else value
        if wanted.startswith("dict") and isinstance(value, Mapping):
            value = {str(key): _entry(wanted, item) for key, item in value.items()}
        OmegaConf.update(node, name, _as_paths(key, value) if wanted == DATA_PATHS else value)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        example = f", as {key}.NAME=VALUE" if wanted.startswith("dict") else ""
        raise ConfigError(f"{key}: {value!r} does not fit; expected {wanted}{example}.") from error


def _entry(wanted: str, value: Any) -> str | float:
    """A value of a mapping whose type is `wanted`. YAML takes 1e-6 for text."""
    if wanted.endswith("float]"):
        return float(value)
    return int(str(value)) if wanted.endswith("int]") else str(value)


def _items(value: Any) -> list[Any]:
    """The items of a list, or the values of a mapping."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | ListConfig) else []


def _as_meant(value: Any) -> Any:
    """A path, or each of several, with the home folder in place of `~`, without quotes that a shell left."""
    if isinstance(value, list | tuple | ListConfig):
        return [_as_meant(path) for path in value]
    if not isinstance(value, str):
        return value
    quoted = len(value) > 2 and value[0] == value[-1] and value[0] in "\"'"
    return os.path.expanduser(value[1:-1] if quoted else value)


def _parse(text: str, wanted: str) -> Any:
    """The value of a text. Only lists and null are parsed: OmegaConf converts the rest by field type."""
    if text in ("null", "None") and "None" in wanted:
        return None
    if wanted.startswith("dict"):
        return _plain_yaml(text if text.startswith("{") else f"{{{text}}}")
    if wanted in (DATA_PATHS, MODULE_NAMES) and not text.startswith("["):
        return None if text in ("null", "None") else text
    if wanted.startswith("list") or wanted in (DATA_PATHS, MODULE_NAMES):
        return _plain_yaml(text if text.startswith("[") else f"[{text}]")
    return int(text) if wanted == EVERY and text.removeprefix("-").isdecimal() else text


def _as_paths(key: str, value: Any) -> str | list[str] | None:
    if value is None and key.endswith("valid_data_path"):
        return None
    paths = list(value) if isinstance(value, list | tuple | ListConfig) else [value]
    if not paths or not all(isinstance(path, str | PathLike) and str(path) for path in paths):
        raise ConfigError(f"{key}: {value!r} does not fit; expected a path or a list of paths.")
    return str(value) if isinstance(value, str | PathLike) else list(map(str, paths))


def _types(node: DictConfig) -> dict[str, str]:
    return {f.name: str(f.type) for f in fields(OmegaConf.get_type(node))}


def _is_group(node: DictConfig | None, name: str) -> bool:
    return node is not None and _types(node).get(name, "").endswith("Config")


def _suggest_key(key: str) -> str:
    known = [path for path, _ in all_settings(RunConfig())]
    same_name = [path for path in known if path.split(".")[-1] == key.split(".")[-1]]
    return f"; did you mean {same_name[0]}?" if same_name else suggestion(key, known)


def _build(cls: type, node: DictConfig) -> Any:
    """The dataclass of a node. `OmegaConf.to_object` refuses missing settings, which a dry run must show."""
    values = {}
    for f in fields(cls):
        value = MISSING if OmegaConf.is_missing(node, f.name) else node[f.name]
        if isinstance(value, DictConfig) and f.name not in _dicts(node):
            value = _build(OmegaConf.get_type(value), value)
        values[f.name] = _plain(value)
    return cls(**values)


def _dicts(node: DictConfig) -> set[str]:
    return {name for name, wanted in _types(node).items() if wanted.startswith("dict")}


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value
