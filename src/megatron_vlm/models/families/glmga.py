"""GLM-GA: GLM-4.6V's model under another name, with image and video processors of its own."""

from megatron_vlm.models.families import glm4v as dense
from megatron_vlm.models.family_parts import glm4v


class Glmga(dense.Glm4v):
    model_type = "glmga"
    sections = glm4v.sections("glmga", dense.TEXT, *dense.VISION_TYPES)
