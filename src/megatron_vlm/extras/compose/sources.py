"""The sources that a command line asks to compose, checked as data before torch is imported."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vlm.checks.paths import folder_problems
from megatron_vlm.config import ConfigError
from megatron_vlm.messages import suggestion
from megatron_vlm.signatures import unparsable_files, unreadable_files
from megatron_vlm.supported import QUANTISED, any_config, resolve
from megatron_vlm.weight_files import tensors_of

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "image_processor_config.json")

TOWERS = {  # model type of a tower -> of the model that holds it
    "siglip2_vision_model": "lfm2_vl",
    "siglip_vision_model": "llava",
    "clip_vision_model": "llava",
    "pixtral": "mistral3",
}
WITH_TEXT_HALF = {  # model type of a checkpoint with both halves -> of its tower
    "siglip2": "siglip2_vision_model",
    "siglip": "siglip_vision_model",
    "clip": "clip_vision_model",
}
LANGUAGE_MODELS = {  # model type -> the class with an output layer
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROLES = {  # what a special token is for
    "image": "stands for a piece of an image",
    "image_start": "before an image",
    "image_end": "after an image",
    "row_break": "between two rows of an image",
    "pad": "fills rows up",
    "end_of_turn": "ends a reply",
}
NEW_ROWS = ("mean", "normal")
IMAGE_TOKENS = (64, 256)  # the fewest and the most of an image in its own size


@dataclass(frozen=True)
class Component:
    """A checkpoint, and the config of the part that is taken from it."""

    folder: Path
    config: dict[str, Any]


def open_tower(path: str) -> Component:
    """The checkpoint whose tower is taken; its text half, if it has one, is left. Raises ConfigError."""
    return _open("--tower", path, tower_config, PROCESSORS, "an image processor")


def open_language_model(path: str) -> Component:
    """The checkpoint of a language model. Raises ConfigError if it is none that can be composed."""
    return _open("--language-model", path, language_config, TOKENIZERS, "a tokenizer")


def _open(
    option: str,
    path: str,
    read: Callable[..., dict[str, Any]],
    files: Sequence[str],
    what: str,
) -> Component:
    """`files` hold `what`, and one of them is needed."""
    for problem in folder_problems(option, path, partial(read, named=f"{option} {path}")):
        raise ConfigError(problem)
    folder = resolve(Path(path).expanduser() if Path(path).expanduser().is_dir() else path, read)
    try:
        tensors_of(folder)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    if not any((folder / name).is_file() for name in files):
        raise ConfigError(
            f"{option} {path} has no file of {what} ({' or '.join(files)}); copy the original "
            "checkpoint's into it."
        )
    for problem in (*unreadable_files(folder), *unparsable_files(folder)):
        raise ConfigError(f"{option}: {problem}")
    return Component(folder, read(folder))


def tower_config(path: str | Path, named: str = "--tower") -> dict[str, Any]:
    """The vision config in a config.json; raises ConfigError if it is not of a tower that can be composed."""
    config = any_config(path)
    model_type = config.get("model_type")
    vision = config.get("vision_config")
    tower = config if vision is None else vision
    tower = {"model_type": WITH_TEXT_HALF.get(model_type, model_type)} | tower
    if tower["model_type"] not in TOWERS:
        remedy = f"give the checkpoint of one of {', '.join(TOWERS)}, alone or in a whole model"
        if model_type in LANGUAGE_MODELS:
            remedy = "it is a language model: give it as --language-model"
        raise ConfigError(f"{named}: no tower, its model type is {model_type!r}; {remedy}.")
    _refuse_quantised(named, config, tower)
    return tower


def language_config(path: str | Path, named: str = "--language-model") -> dict[str, Any]:
    """The config.json of a language model; raises ConfigError unless it can be composed."""
    config = any_config(path)
    model_type = config.get("model_type")
    if model_type not in LANGUAGE_MODELS:
        remedy = f"give one of {', '.join(LANGUAGE_MODELS)}"
        if model_type in (*TOWERS, *WITH_TEXT_HALF):
            remedy = "it is a vision model: give it as --tower"
        raise ConfigError(
            f"{named}: no language model that can be composed, its model type is {model_type!r}; {remedy}."
        )
    architectures = config.get("architectures") or [LANGUAGE_MODELS[model_type]]
    if LANGUAGE_MODELS[model_type] not in architectures:
        raise ConfigError(
            f"{named}: its config.json names {architectures}; give a {LANGUAGE_MODELS[model_type]}."
        )
    _refuse_quantised(named, config)
    return config


def _refuse_quantised(named: str, *configs: dict[str, Any]) -> None:
    for key in QUANTISED:
        if any(config.get(key) is not None for config in configs):
            raise ConfigError(
                f"{named}: its weights are quantised ({key} in config.json), which would be copied as they "
                "are; give the checkpoint in bf16 that it was made from."
            )


def named_tokens(pairs: Iterable[str]) -> dict[str, str]:
    """ROLE=TOKEN, parsed. Raises ConfigError for an unknown role, one without token or given twice."""
    named: dict[str, str] = {}
    for pair in pairs:
        role, _, token = pair.partition("=")
        if role not in ROLES:
            raise ConfigError(f"--token {pair}: {role} is no role{suggestion(role, ROLES)}")
        if not token or token != token.strip():
            what = "spaces around the token" if token.strip() else "no token"
            raise ConfigError(f"--token {pair}: {what}; write ROLE=TOKEN, as {role}=<|{role}|>.")
        if role in named:
            raise ConfigError(f"--token: {role} is given twice, {named[role]} and {token}; give it once.")
        named[role] = token
    return named
