"""InternVL: thousandths in tags, the boxes of one label together.

Source: internvl.readthedocs.io, "Chat Data Format", grounding and detection data.
"""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(unit=1000, one="<box>[[{}]]</box>", several="<box>[{}]</box>", label="<ref>{}</ref>")
