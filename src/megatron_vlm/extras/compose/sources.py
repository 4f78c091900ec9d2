"""The two checkpoints of a command line, checked by their config.json before torch is imported."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vlm.checks import folder_problems
from megatron_vlm.config import ConfigError
from megatron_vlm.messages import suggestion
from megatron_vlm.supported import QUANTISED, any_config, resolve

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
LANGUAGE_MODELS = ("llama", "mistral", "qwen2", "qwen3")  # model types
ROLES = {  # what a special token is for
    "image": "stands for a piece of an image",
    "image_start": "before an image",
    "image_end": "after an image",
    "row_break": "between two rows of an image",
    "pad": "fills rows up",
    "end_of_turn": "ends a reply",
}
NEW_ROWS = ("mean", "normal")


@dataclass(frozen=True)
class Component:
    """A checkpoint, and the config of the part that is taken from it."""

    folder: Path
    config: dict[str, Any]


@dataclass(frozen=True)
class Choices:
    """The choices that the user has with SigLIP2 NaFlex; LFM2-VL was published with the default width."""

    min_image_tokens: int = 64
    max_image_tokens: int = 256
    projector_width: int = 2560


def open_tower(path: str) -> Component:
    """Return the checkpoint whose tower is taken; its text half, if it has one, is left.

    Raises:
        ConfigError: It has no tower that can be composed.
    """
    return _open("--tower", path, tower_config)


def open_language_model(path: str) -> Component:
    """Return the checkpoint of a language model. Raises ConfigError if it is none that can be composed."""
    return _open("--language-model", path, language_config)


def _open(option: str, path: str, read: Callable[..., dict[str, Any]]) -> Component:
    for problem in folder_problems(option, path, partial(read, place=f"{option} {path}")):
        raise ConfigError(problem)
    local = Path(path).expanduser()
    folder = resolve(local if local.is_dir() else path, read)
    return Component(folder, read(folder))


def tower_config(path: str | Path, place: str = "--tower") -> dict[str, Any]:
    """Return the vision config in a config.json. Raises ConfigError if its tower cannot be composed."""
    config = any_config(path)
    model_type = config.get("model_type")
    vision = config.get("vision_config") or config
    tower = {"model_type": WITH_TEXT_HALF.get(model_type, model_type)} | vision
    if tower["model_type"] not in TOWERS:
        remedy = f"give the checkpoint of one of {', '.join(TOWERS)}, alone or in a whole model"
        if model_type in LANGUAGE_MODELS:
            remedy = "it is a language model: give it as --language-model"
        raise ConfigError(f"{place}: no tower, its model type is {model_type!r}; {remedy}.")
    _refuse_quantised(place, config | tower)
    return tower


def language_config(path: str | Path, place: str = "--language-model") -> dict[str, Any]:
    """Return the config.json of a language model. Raises ConfigError unless it can be composed."""
    config = any_config(path)
    model_type = config.get("model_type")
    if model_type not in LANGUAGE_MODELS:
        remedy = f"give one of {', '.join(LANGUAGE_MODELS)}"
        if model_type in (*TOWERS, *WITH_TEXT_HALF):
            remedy = "it is a vision model: give it as --tower"
        raise ConfigError(
            f"{place}: no language model that can be composed, its model type is {model_type!r}; {remedy}."
        )
    _refuse_quantised(place, config)
    return config


def _refuse_quantised(place: str, config: Mapping[str, Any]) -> None:
    """Weights in FP8 would be widened when they are read, and config.json would still say FP8."""
    for key in QUANTISED:
        if config.get(key) is not None:
            raise ConfigError(
                f"{place}: its weights are quantised ({key} in config.json); give the checkpoint in bf16 "
                "that it was made from."
            )


def named_tokens(pairs: Iterable[str]) -> dict[str, str]:
    """Parse ROLE=TOKEN. Raises ConfigError for an unknown role, one without token or given twice."""
    tokens: dict[str, str] = {}
    for pair in pairs:
        role, _, token = pair.partition("=")
        if role not in ROLES:
            raise ConfigError(f"--token {pair}: {role} is no role{suggestion(role, ROLES)}")
        if not token or token != token.strip():
            problem = "spaces around the token" if token.strip() else "no token"
            raise ConfigError(f"--token {pair}: {problem}; write ROLE=TOKEN, as {role}=<|{role}|>.")
        if role in tokens:
            raise ConfigError(f"--token: {role} is given twice, {tokens[role]} and {token}; give it once.")
        tokens[role] = token
    return tokens
