"""No family's own: pixels of the image as resized in a list, for a model whose family publishes nothing."""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(unit=None, polygons=True)
