"""The families, by HF model_type. A new one is a file here and a line in FAMILIES."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_vlm.models.families.base import Family

FAMILIES = {  # HF model_type -> module of this package
    "gemma3": "gemma3",
    "mistral3": "ministral3",
    "glm4v_moe": "glm4v_moe",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
}


def family_for(hf_config: Any) -> Family:
    """The family of an HF config; raises ValueError for a model type the package does not know."""
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"model type {hf_config.model_type!r} of the checkpoint is not supported; "
            f"supported are {sorted(FAMILIES)}, with their vision towers."
        )
    return load(hf_config.model_type)


def load(model_type: str) -> Family:
    return import_module(f"{__name__}.{FAMILIES[model_type]}").FAMILY
