"""Qwen2.5-VL: JSON with pixels of the image as resized.

Sources: `qwen-vl-finetune/tools/process_bbox.ipynb` and `cookbooks/spatial_understanding.ipynb` of
QwenLM/Qwen2.5-VL.
"""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(unit=None, keys={"box": "bbox_2d", "point": "point_2d"})
