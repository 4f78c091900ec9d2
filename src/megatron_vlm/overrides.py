"""Settings by name: `key.path=value`, mappings and YAML to and from a `RunConfig`."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict
from math import isfinite
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen

from megatron_vlm.config import ConfigError, RunConfig, setting_types
from megatron_vlm.files import read_text
from megatron_vlm.messages import has_keys, join_lines, suggestion
from megatron_vlm.stores import KEYS

EXCLUSIVE = ("train.steps", "train.epochs")  # setting one takes back the other
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
MOST_YAML = 1 << 20  # characters of settings
LONGEST_NUMBER = 100
LONGEST_KEY = 1000  # characters, as all keys within it begin with it
MOST_PROBLEMS = 20  # that are named


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
        counts = Counter(key for key in keys if isinstance(key, str))
        if twice := [key for key, count in counts.items() if count > 1]:
            raise yaml.MarkedYAMLError(f"{twice[0]} stands there twice; write it once", node.start_mark)
        return node


def apply_overrides(config: RunConfig, overrides: Iterable[str] | Mapping[str, Any]) -> RunConfig:
    """A copy of `config` with settings replaced; the original stays as it was.

    `overrides` are `key.path=value` texts, or a mapping by dotted or nested keys. Values are converted to
    the setting's type. `train.epochs` takes the place of an earlier `train.steps`, and the reverse. Raises
    ConfigError naming the place of the first unknown keys and unfit values, one a line.
    """
    if not isinstance(overrides, Mapping):
        overrides = dict(split_override(text) for text in overrides)
    flat = flatten(overrides)
    ends = {key for key in EXCLUSIVE if flat.get(key) not in (None, "null", "None")}
    if len(ends) == 1:
        flat = dict.fromkeys(set(EXCLUSIVE) - ends) | flat
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
    if len(prefix) > LONGEST_KEY:
        raise ConfigError(f"{prefix}: a key of {len(prefix)} characters; no setting has one.")
    flat = {}
    for key, value in settings.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        flat.update(inner)
    return flat


def _set(config: RunConfig, key: str, value: Any) -> None:
    known = setting_types()
    name = next((name for name in known if f"{key}.".startswith(f"{name}.")), None)
    inside = [name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}.")]
    if inside:
        raise ConfigError(f"{key}: a group of settings ({', '.join(inside)}); set one of them.")
    if name is None or (name != key and get_origin(known[name]) is not dict):
        raise ConfigError(f"{key}: no such setting{_suggest_key(key)}")
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
    hint = setting_types()[name]
    try:
        value = fitted(value, hint)
        return read_template(value) if is_template and value else value
    except (ValueError, OSError) as error:
        raise ConfigError(f"{name}: {error}") from error
    except (TypeError, yaml.YAMLError) as error:
        example = f", as {name}.NAME=VALUE" if get_origin(hint) is dict else ""
        raise ConfigError(f"{name}: {value!r} does not fit; expected {in_words(hint)}{example}.") from error


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


def refuse_keys(name: str, value: Any) -> None:
    """Raise ConfigError for an address that holds keys, which the files of a run would show."""
    if re.search(r"(?i)(s3|msc):/+[^/\s,]*[:@]", str(value)) or has_keys(value):
        raise ConfigError(
            f"{name}: an address with keys, which files of the run would show; give it without them, and the "
            f"keys by {KEYS}."
        )


def fitted(value: Any, hint: Any) -> Any:
    """The value in the type of a hint; text is read. Raises TypeError for another type, and ValueError for a
    value that breaks a rule of an `Annotated` or is no choice of a `Literal`."""
    kind = get_origin(hint)
    inner = get_args(hint)
    if kind is Annotated:  # first its type, as its rules compare numbers and not texts
        value = fitted(value, inner[0])
        for rule in inner[1:]:
            value = rule(value) if callable(rule) else _keeping(value, rule)
        return value
    if kind in (Union, UnionType):
        return _fitted_to_one(value, inner)
    if kind is Literal:
        if not isinstance(value, str):
            raise TypeError
        if value not in inner:
            raise ValueError(f"{value} does not exist{suggestion(value, inner)}")
        return value
    if kind is list:
        items = _from_yaml(value, "[]")
        if not isinstance(items, list | tuple):
            raise TypeError
        return [fitted(item, inner[0]) for item in items]
    if kind is dict:
        return _fitted_mapping(value, inner[1])
    return _fitted_scalar(value, hint)


def _fitted_to_one(value: Any, hints: tuple[Any, ...]) -> Any:
    """The value in the first type that takes it. A text in brackets is a list where there may be one."""
    if NoneType in hints and value in (None, "null", "None"):
        return None
    others = [hint for hint in hints if hint is not NoneType]
    lists = [hint for hint in others if get_origin(hint) is list]
    if lists and (isinstance(value, list | tuple) or str(value).startswith("[")):
        others = lists
    if len(others) == 1:
        return fitted(value, others[0])
    for hint in others:
        try:
            return fitted(value, hint)
        except (TypeError, ValueError) as error:
            if isinstance(error, ValueError) and get_args(hint)[:1] == (str,):
                raise  # the rule of a text says best what is wrong with it
    raise TypeError


def _fitted_mapping(value: Any, hint: Any) -> dict[str, Any]:
    entries = _from_yaml(value, "{}")
    if not isinstance(entries, Mapping):
        raise TypeError
    mapping = {}
    for key, entry in entries.items():
        try:
            mapping[str(key)] = fitted(entry, hint)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    return mapping


def _from_yaml(value: Any, brackets: str) -> Any:
    """Reads a text, written with these brackets or without, as YAML; returns other values as they are."""
    if not isinstance(value, str):
        return value
    return _plain_yaml(value if value.startswith(brackets[0]) else f"{brackets[0]}{value}{brackets[1]}")


def _fitted_scalar(value: Any, kind: type) -> Any:
    if kind is bool:
        switch = SWITCHES.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(switch, bool):
            raise TypeError
        return switch
    if isinstance(value, bool) or not isinstance(value, str | int | float | PathLike):
        raise TypeError
    if kind is str:
        return str(value)
    try:
        number = int(str(value)) if kind is int else float(value)
    except ValueError as error:
        raise TypeError from error
    if not isfinite(number):
        raise ValueError(f"{number} is not a finite number.")
    return number


def _keeping(value: Any, rule: Any) -> Any:
    """The value. Raises ValueError if it breaks a rule; a text in place of a rule is only for `in_words`."""
    shown = f"{value:g}" if isinstance(value, float) else value
    match rule:
        case Ge(ge=least) if value < least:
            raise ValueError(f"{shown} is less than {least}.")
        case Gt(gt=bound) if value <= bound:
            raise ValueError(f"{shown} is not more than {bound}.")
        case Le(le=most) if value > most:
            raise ValueError(f"{shown} is more than {most}.")
        case Lt(lt=bound) if value >= bound:
            raise ValueError(f"{shown} is not less than {bound}.")
        case MinLen() if not value:
            raise ValueError("is empty; give a name, or leave the setting out.")
    return value


def in_words(hint: Any) -> str:
    """Describes the value that a hint asks for: its text if it is `Annotated` with one, else its type."""
    kind = get_origin(hint)
    inner = get_args(hint)
    if kind is Annotated:
        texts = [rule for rule in inner[1:] if isinstance(rule, str)]
        return texts[0] if texts else in_words(inner[0])
    if kind in (Union, UnionType):
        return " | ".join(map(in_words, inner))
    if kind is Literal:
        return " | ".join(inner)
    if kind is not None:
        return f"{kind.__name__}[{', '.join(map(in_words, inner))}]"
    return "None" if hint is NoneType else hint.__name__


def _suggest_key(key: str) -> str:
    known = setting_types()
    same_name = [path for path in known if path.split(".")[-1] == key.split(".")[-1]]
    return f"; did you mean {same_name[0]}?" if same_name else suggestion(key, known)
