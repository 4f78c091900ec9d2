"""GLM-GA: GLM-4.6V's model under another name, with image and video processors of its own."""

from megatron_vlm.models.families import glm4v as dense


class Glmga(dense.Glm4v):
    model_type = "glmga"
