"""Vision-language training: Megatron-Core language models, Hugging Face towers, one batch contract."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_vlm.api import evaluate, export, generate
    from megatron_vlm.callbacks import Callback
    from megatron_vlm.config import RunConfig
    from megatron_vlm.recipes import load_recipe
    from megatron_vlm.rl.policy import Policy
    from megatron_vlm.training.loop import train

__version__ = "0.1.0"
__all__ = ["Callback", "Policy", "RunConfig", "evaluate", "export", "generate", "load_recipe", "train"]

# where each name is, so that importing the package loads none of them
_MODULES = {
    "Callback": "callbacks",
    "Policy": "rl.policy",
    "RunConfig": "config",
    "evaluate": "api",
    "export": "api",
    "generate": "api",
    "load_recipe": "recipes",
    "train": "training.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
