"""Qwen3-VL and Qwen3.5: JSON with thousandths.

Sources: `cookbooks/omni_recognition.ipynb` and `cookbooks/spatial_understanding.ipynb` of QwenLM/Qwen3-VL.
"""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(unit=1000, keys={"box": "bbox_2d", "point": "point_2d"})
