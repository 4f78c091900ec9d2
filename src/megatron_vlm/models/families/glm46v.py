"""GLM-4.6V as Transformers names it: the model of `glm4v` under another name, with a processor of its own.

The published GLM-4.6V-Flash names itself `glm4v`, and GLM-4.6V `glm4v_moe`.
"""

from megatron_vlm.models.families import glm4v as dense


class Glm46v(dense.Glm4v):
    model_type = "glm46v"
