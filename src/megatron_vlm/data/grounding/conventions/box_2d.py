"""Gemma 4: JSON with thousandths, rows before columns. Gemma 3 was not trained on boxes and gets the same.

Source: ai.google.dev/gemma/docs/capabilities/vision/image.
"""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(unit=1000, rows_first=True, keys={"box": "box_2d", "point": "point"}, indent="  ")
