"""LLaVA: shares of what the model sees, with padding or cropped, to two decimals.

Sources: table 7 of arXiv 2310.03744, and issue 606 of haotian-liu/LLaVA for the padding.
"""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(unit=1, decimals=2, polygons=True)
