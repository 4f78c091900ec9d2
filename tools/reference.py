"""Write settings and commands into docs/reference, between the marks of their pages, and a schema.

python tools/reference.py            write the pages
python tools/reference.py --check    exit 1 when a page is not what the code says
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from inspect import cleandoc, getdoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator

from megatron_vlm import config as configs
from megatron_vlm.cli import app
from megatron_vlm.config import MISSING, MOST, RunConfig
from megatron_vlm.overrides import ARGUMENT_OF_SETTING, json_schema
from tables import markdown, replaced

PAGES = Path(__file__).resolve().parent.parent / "docs" / "reference"

# ---- settings ----------------------------------------------------------------------------------------------


def settings() -> str:
    comments = comments_of_fields(Path(configs.__file__).read_text(encoding="utf-8"))
    groups = {name: kind for name, kind in get_type_hints(RunConfig).items() if is_dataclass(kind)}
    return "\n\n".join(_group(name, kind, comments) for name, kind in ({"": RunConfig} | groups).items())


def _group(name: str, kind: type, comments: dict[str, dict[str, str]]) -> str:
    """Return the section of a dataclass: its docstring, and a row for each of its settings."""
    rows = []
    for field, hint in get_type_hints(kind, include_extras=True).items():
        if is_dataclass(hint):
            continue
        key = f"{name}.{field}" if name else field
        short = ARGUMENT_OF_SETTING.get(key, key)
        names = f'<a id="{key}"></a>`{key}`' + (f"<br>or `{short}`" if short != key else "")
        meaning = as_markdown(comments[kind.__name__][field], kind)
        rows.append([names, type_words(hint), _default(getattr(kind(), field)), meaning])
    table = markdown(("setting", "value", "default", "meaning"), rows)
    return f"## {name}\n\n{getdoc(kind)}\n\n{table}" if name else table


def _default(value: Any) -> str:
    if value == MISSING:
        return "required"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def comments_of_fields(source: str) -> dict[str, dict[str, str]]:
    """Return the comment of each field, class → field → text: the lines above it, then the one beside it.

    Raises:
        ValueError: A field of a dataclass has no comment.
    """
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    alone = {number for number in texts if lines[number - 1].lstrip().startswith("#")}
    comments: dict[str, dict[str, str]] = {}
    for node in (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)):
        comments[node.name] = {}
        for field in (each for each in node.body if isinstance(each, ast.AnnAssign)):
            first = field.lineno
            while first - 1 in alone:
                first -= 1
            numbers = [number for number in range(first, field.end_lineno + 1) if number in texts]
            above = " ".join(texts[number] for number in numbers if number in alone)
            beside = [texts[number] for number in numbers if number not in alone]
            text = "; ".join(filter(None, (above, *beside)))
            if not text and not ast.unparse(field.annotation).endswith("Config"):
                raise ValueError(f"{node.name}.{field.target.id} has no comment; say above it what it means.")
            comments[node.name][field.target.id] = text
    return comments


def as_markdown(comment: str, kind: type) -> str:
    """Return a comment as a sentence of a page, with values and names of settings as code."""
    names = "|".join(re.escape(field.name) for field in fields(kind) if "_" in field.name)
    text = re.sub(r"`?\"(\w[\w-]*)\"`?", r"`\1`", comment)
    text = re.sub(r"\bNone\b(?=:)", "`null`", text)
    text = re.sub(r"\b(True|False)\b(?=:)", lambda match: f"`{match[1].lower()}`", text)
    text = re.sub(rf"(?<![\w`./])((?:{_GROUPS})\.\w+|FILE\.py:\w+)(?![\w`])", r"`\1`", text)
    if names:
        text = re.sub(rf"(?<![\w`./\[])({names})(?![\w`=/])", r"`\1`", text)
    text = text.replace("|", "\\|")
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."


_GROUPS = "|".join(field.name for field in fields(RunConfig))


def type_words(hint: Any) -> str:
    """Return the values that a type allows, in words."""
    if get_origin(hint) is Annotated:
        kind, *rules = get_args(hint)
        if words := next(filter(None, map(_named_rule, rules)), None):
            return words
        return _range(type_words(kind), rules) if kind in (int, float) else type_words(kind)
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        words = dict.fromkeys(type_words(kind) for kind in kinds)
        return " or ".join([*words, *(["`null`"] if NoneType in get_args(hint) else [])])
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {type_words(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"mapping of names to {type_words(get_args(hint)[1])}"
    return {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}[hint]


def _named_rule(rule: Any) -> str | None:
    """Return the word for a rule that is more than a range."""
    if isinstance(rule, AfterValidator):
        return {configs.as_path: "path", configs.as_time: "time"}[rule.func]
    pattern = [each.pattern for each in getattr(rule, "metadata", ()) if hasattr(each, "pattern")]
    return "`FILE.py:NAME`" if pattern else None


def _range(word: str, rules: list[Any]) -> str:
    """Return `integer ≥ 1` or `number ≥ 0, < 1`, without the bound of 64 bits."""
    signs = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
    bounds = [
        (sign, getattr(rule, name))
        for rule in rules
        for of, (sign, name) in signs.items()
        if type(rule) is of
    ]
    limits = [f"{sign} {bound:,}" for sign, bound in bounds if bound != MOST]
    return f"{word} {', '.join(limits)}" if limits else word


def schema() -> str:
    """Return the JSON schema of the settings, with each meaning as its description."""
    comments = comments_of_fields(Path(configs.__file__).read_text(encoding="utf-8"))
    described = json_schema()
    for kind, part in ({"RunConfig": described} | described["$defs"]).items():
        for name, setting in part["properties"].items():
            setting.pop("title", None)
            if "description" not in setting and "$ref" not in setting:
                setting["description"] = comments[kind][name]
        part["additionalProperties"] = part is described  # a file may also name a recipe
    return json.dumps(described, indent=1, ensure_ascii=False) + "\n"


# ---- the command line --------------------------------------------------------------------------------------


def command_line() -> str:
    program = typer.main.get_command(app)
    context = program.make_context("megatron-vlm", [], resilient_parsing=True)
    commands = {name: command for name, command in program.commands.items() if not command.hidden}
    rows = [
        [f"[`{name}`](#{name})", _plain(_first_sentence(command.help))] for name, command in commands.items()
    ]
    parts = [markdown(("command", "what it does"), rows)]
    if options := _shown(program.params):
        parts.append(f"Options before the command:\n\n{_table('option', options, context)}")
    for name, command in commands.items():
        inner = type(context)(command, parent=context, info_name=name)
        parts += _command(name, command, inner)
    return "\n\n".join(parts)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0]


def _command(name: str, command: Any, context: Any) -> list[str]:
    """Return the section of a command: its usage, its help, its arguments and its options."""
    usage = " ".join(["megatron-vlm", name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", f"    {usage}", _plain(cleandoc(command.help))]
    for kind in ("argument", "option"):
        if params := _shown(each for each in command.params if each.param_type_name == kind):
            parts.append(_table(kind, params, context))
    return parts


def _shown(params: Iterable[Any]) -> list[Any]:
    return [param for param in params if not getattr(param, "hidden", False) and param.name != "help"]


def _table(kind: str, params: list[Any], context: Any) -> str:
    """Return a row for each parameter, in the words of `--help`."""
    records = [param.get_help_record(context) for param in params]
    rows = [[f"`{names}`", _plain(" ".join(words.split()))] for names, words in records]
    return markdown((kind, "meaning"), rows)


def _plain(text: str) -> str:
    """Return the text with what Markdown would read escaped; code stays."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def main() -> None:
    generated = {"settings.md": settings, "cli.md": command_line, "settings.schema.json": schema}
    for name, written in generated.items():
        page = PAGES / name
        old = page.read_text(encoding="utf-8") if page.exists() else ""
        mark = page.stem.replace("-", "_")
        new = replaced(old, written(), mark) if page.suffix == ".md" else written()
        if "--check" in sys.argv and new != old:
            sys.exit(f"{page.name} does not show what the code says; run tools/reference.py")
        page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
