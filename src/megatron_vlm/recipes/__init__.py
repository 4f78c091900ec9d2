"""Recipes: functions with keyword arguments that return the full configuration of a run.

from megatron_vlm.recipes import load_recipe
config = load_recipe("gemma3_vl_4b")(train_data_path="/data/shards", tp=4)
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.data.on_disk.paths import paths_of
from megatron_vlm.files import read_text
from megatron_vlm.imports import is_users
from megatron_vlm.inputs import odd_fields
from megatron_vlm.messages import listed, suggestion
from megatron_vlm.overrides import (
    SETTING_OF_ARGUMENT,
    apply_overrides,
    as_settings,
    flag_of,
    flatten,
    load_yaml,
    merged,
    split_override,
)
from megatron_vlm.recipes.proposal import dataset_type_of, propose
from megatron_vlm.recipes.published import OF_PARTS, RECIPES, Recipe
from megatron_vlm.recipes.users import UsersRecipe
from megatron_vlm.supported import read_config

ARGUMENTS = tuple(SETTING_OF_ARGUMENT)
RUN_FILE = {"recipe": str, "args": dict | None, "overrides": dict | None}
RUN_FILES = Path(__file__).parent / "files"  # recipes/ of the repository, see `run_files`


def load_recipe(name: str) -> Recipe | UsersRecipe:
    """Return the recipe of a name, or a user's function, `FILE.py:NAME` or `package.module:NAME`.

    Raises:
        ConfigError: There is no such recipe.
    """
    if name in RECIPES:
        return RECIPES[name]
    if is_users(name):
        return UsersRecipe(name)
    if name in run_files():
        raise ConfigError(f"{name}: a run file and no recipe; give it as --config {name}.")
    remedy = "`megatron-vlm recipes` lists them"
    raise ConfigError(f"{name}: no such recipe{suggestion(name, RECIPES, remedy)}")


@cache
def run_files() -> dict[str, Path]:
    """Return this package's own files for `--config`, by name."""
    return {file.stem: file for file in sorted(RUN_FILES.glob("*.yaml"))}


def summary_of(file: Path) -> str:
    """Return the sentence in the first line of one of `run_files`."""
    return read_text(file).partition("\n")[0].removeprefix("# ")


def compose(
    recipe: str | None = None,
    file: Path | None = None,
    settings: Iterable[str] = (),
    arguments: Mapping[str, Any] | None = None,
    assumed: Mapping[str, Any] | None = None,
    processes: int = 1,
    has_gpu: bool | None = None,
) -> RunConfig:
    """The configuration that a command line asks for. Each of these replaces what those before it set:

    1. the recipe, or the file's: `file` is YAML with `recipe`, `args` and `overrides`, or a run's own
       `config.yaml`; without both, what `propose` makes for the checkpoint on so many `processes`;
    2. the file's `args`, then its `overrides`;
    3. `assumed`, arguments of the recipe that a command sets unless its user does;
    4. `arguments` (the command's flags) and `settings`: `key=value` is a keyword argument of the recipe,
       `key.path=value` an override on what it returns.

    A recipe sees all of them, whether written `steps=10` or `train.steps=10`.
    Raises ConfigError on an unknown recipe, argument or setting, on a value of the wrong type, and on a
    setting that is given under two names with two values.
    """
    file_content = _read_run_file(file) if file else {}
    name = recipe or file_content.get("recipe")
    build = load_recipe(name) if name else None
    parameters = build.own_parameters if isinstance(build, UsersRecipe) else ()
    command_settings = {**as_settings(assumed or {}), **read_settings(settings, arguments or {}, parameters)}
    if file_content and recipe and file_content.get("recipe") != recipe:
        file_kind = (
            f"is of the recipe {file_content['recipe']}"
            if "recipe" in file_content
            else "is a whole configuration"
        )
        raise ConfigError(f"{file}: {file_kind}, and --recipe says {recipe}; give one of them.")
    if build:
        recipe_settings = as_settings(file_content.get("args", {}), parameters)
        overrides = as_settings(flatten(file_content.get("overrides", {})))
        # recipes are for Energon data; data that a command names may be of the other type
        if paths := paths_of(command_settings.get("data.train_data_path")):
            recipe_settings = {"data.dataset_type": dataset_type_of(paths[0])} | recipe_settings
        return build(**merged(recipe_settings, overrides, command_settings))
    if file_content:
        return apply_overrides(apply_overrides(RunConfig(), file_content), command_settings)
    if "model.hf_path" in command_settings:
        return propose(command_settings, processes, has_gpu)
    raise ConfigError(
        "give --recipe NAME or --config FILE, or --model and --data; `megatron-vlm recipes` lists them."
    )


def family_note(recipe: str | None, file: Path | None, hf_path: str) -> str | None:
    """Return a line about a recipe that is for another family than the checkpoint; None if it fits."""
    name = recipe or (_read_run_file(file).get("recipe") if file else None)
    model_type = read_config(hf_path)["model_type"]
    if name not in RECIPES or (of_recipe := RECIPES[name].model_type) in (model_type, *OF_PARTS):
        return None
    fitting = [entry.name for entry in RECIPES.values() if entry.model_type == model_type]
    return (
        f"recipe {name} is for {of_recipe}, and {hf_path} is {model_type}: its layout, "
        f"lengths and rates are taken all the same; recipes for {model_type}: {listed(fitting, 4)}"
    )


def read_settings(
    settings: Iterable[str], arguments: Mapping[str, Any], parameters: Collection[str] = ()
) -> dict[str, Any]:
    """The settings of a command line, by dotted key, and the parameters that a user's recipe alone has.

    Raises ConfigError if it gives a setting two values.
    """
    pairs = dict(split_override(text) for text in settings)
    entries = [(f"--{flag_of(name)} {value}", name, value) for name, value in arguments.items()]
    entries += [(f"{name}={value}", name, value) for name, value in pairs.items()]
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for text, name, value in entries:
        (key,) = as_settings({name: value}, parameters)
        if str(values.setdefault(key, value)) != str(value):
            raise ConfigError(f"{texts[key]} and {text} both set {key}; give one of them.")
        texts.setdefault(key, text)
    return values


def _read_run_file(file: Path) -> dict[str, Any]:
    # a file of the user's comes before one of ours, which also has the path that it has in the repository
    name = file.stem if file.parent.name == "recipes" else str(file)
    if not file.exists() and name in run_files():
        file = run_files()[name]
    try:
        content = load_yaml(read_text(file), place=str(file))
    except FileNotFoundError as error:
        fact = "no such file, and no run file of this package"
        raise ConfigError(f"{file}: {fact}{suggestion(name, run_files())}") from error
    except OSError as error:
        raise ConfigError(f"{file}: not readable ({error.strerror}); give another file.") from error
    if "recipe" not in content:
        if entries := [name for name in ("args", "overrides") if name in content]:
            raise ConfigError(
                f"{file}: has {entries[0]} and no recipe; add `recipe: NAME`, "
                "`megatron-vlm recipes` lists them."
            )
        return content
    for key in content:
        if key not in RUN_FILE:
            raise ConfigError(f"{file}: {key}: no such entry{suggestion(key, RUN_FILE)}")
    for problem in odd_fields(content, RUN_FILE):
        raise ConfigError(f"{file}: {problem}; correct it: `megatron-vlm recipes` lists the recipes.")
    arguments = {str(name): value for name, value in (content.get("args") or {}).items()}
    return {"recipe": content["recipe"], "args": arguments, "overrides": content.get("overrides") or {}}
