"""Boxes and points of records: what the hook `data.chatml.sample.grounding` calls."""

from megatron_vlm.extras.grounding.boxes import Boxes, draw
from megatron_vlm.extras.grounding.objects import objects_of

__all__ = ["Boxes", "draw", "objects_of"]
