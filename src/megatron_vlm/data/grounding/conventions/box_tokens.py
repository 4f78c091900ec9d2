"""Qwen2-VL: thousandths in pairs, and tokens around boxes and what they are of.

Sources: arXiv 2409.12191, section 2.2; `qwen-vl-finetune/tools/process_bbox.ipynb` of QwenLM/Qwen2.5-VL.
"""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(
    unit=1000,
    pair="({},{})",
    comma=",",
    one="<|box_start|>{}<|box_end|>",
    each="<|box_start|>{}<|box_end|>",
    several="{}",
    between="",
    label="<|object_ref_start|>{}<|object_ref_end|>",
)
