"""No family's own: thousandths in a list, for a model whose family publishes nothing."""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(unit=1000, polygons=True)
