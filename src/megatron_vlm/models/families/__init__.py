"""The families, by HF model_type. A new one is a file here and a line in `supported.SUPPORTED`."""

from importlib import import_module
from typing import Any

from megatron_vlm.models.description import Description
from megatron_vlm.models.family_parts import limits
from megatron_vlm.supported import SUPPORTED, unsupported

FAMILIES = tuple(SUPPORTED)  # each a module of this package


def describe(hf_config: Any) -> Description:
    """The description of a checkpoint with this HF config. Every path to a model starts here.

    Raises ValueError for a model type that the package does not know, and for keys whose values the family
    does not support, see `limits.checked`.
    """
    if hf_config.model_type not in FAMILIES:
        raise ValueError(unsupported(hf_config.model_type))
    return limits.checked(load(hf_config.model_type)(hf_config))


def load(model_type: str) -> type[Description]:
    """The class whose objects describe checkpoints of this type: its module has no other with this type."""
    classes = vars(import_module(f"{__name__}.{model_type}")).values()
    return next(family for family in classes if getattr(family, "model_type", None) == model_type)
