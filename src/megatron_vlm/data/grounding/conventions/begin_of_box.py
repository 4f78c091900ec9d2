"""GLM-4.1V to GLM-4.6V: thousandths between tokens.

Source: README.md of zai-org/GLM-V, "Grounding": the style of brackets varies.
"""

from megatron_vlm.data.grounding.convention import Convention

CONVENTION = Convention(
    unit=1000,
    pair="{},{}",
    comma=",",
    one="<|begin_of_box|>[{}]<|end_of_box|>",
    several="<|begin_of_box|>[{}]<|end_of_box|>",
    between=",",
)
