"""Hugging Face weights in and out, by one list of rules per family that works in both directions.

A rule pairs a parameter of `VLMModel` with the HF tensors that it is made of, and an operation that knows how
tensor parallelism cuts it. From safetensors, import reads only the slices that this rank holds; export
gathers one parameter at a time. Layer and expert numbers are global on both sides.
"""

from megatron_vlm.models.weights.by_part import parameters_by_part
from megatron_vlm.models.weights.exporting import export_hf, hf_tensors
from megatron_vlm.models.weights.files import HFCheckpoint, hub_name
from megatron_vlm.models.weights.importing import import_hf
from megatron_vlm.models.weights.rules import (
    ADAPTERS,
    Cut,
    GatedMLP,
    GroupedQKV,
    Operation,
    Rule,
    Vocabulary,
    WeightMap,
    Whole,
    find_rule,
    find_weight,
    named_global_weights,
    named_weights,
)
from megatron_vlm.models.weights.streaming import from_every_stage, hf_weights

__all__ = [
    "ADAPTERS",
    "GatedMLP",
    "GroupedQKV",
    "HFCheckpoint",
    "Operation",
    "Rule",
    "Cut",
    "Vocabulary",
    "WeightMap",
    "Whole",
    "export_hf",
    "find_rule",
    "find_weight",
    "from_every_stage",
    "hf_tensors",
    "hf_weights",
    "hub_name",
    "import_hf",
    "named_global_weights",
    "named_weights",
    "parameters_by_part",
]
