"""Qianfan-OCR: InternVL's tiles, tower and projector, and a Qwen3.

The hub's files have the names of InternVL's first code, which Transformers turns into its own; queries, keys
and values of the tower are one tensor there. Drop path, by which Transformers leaves out parts of the tower
in training, by chance, is off.
"""

from torch import nn

from megatron_vlm.models.families import internvl
from megatron_vlm.models.family_parts import limits, llama, towers
from megatron_vlm.models.weights.rules import Rule, Whole

_LAYER = r"^(model\.vision_tower\.layers\.\d+\.)"
_EMBEDDINGS = r"^(model\.vision_tower\.embeddings\.)"


class QianfanOcr(internvl.InternVL):
    model_type = "qianfan_ocr"
    vision_limits = internvl.InternVL.vision_limits | {"drop_path_rate": limits.UNUSED}
    frames_as_images = False
    # what Transformers' `conversion_mapping` says of this model; it saves layers of the text as an encoder's
    renames = (
        (r"^vision_model\.(encoder\.)?", "model.vision_tower."),
        (_LAYER + r"attn\.proj\.", r"\1attention.projection_layer."),
        (_LAYER + r"attn\.", r"\1attention."),
        (_LAYER + r"ls([12])$", r"\1lambda_\2"),
        (_LAYER + r"norm1\.", r"\1layernorm_before."),
        (_LAYER + r"norm2\.", r"\1layernorm_after."),
        (_EMBEDDINGS + r"class_embedding$", r"\1cls_token"),
        (_EMBEDDINGS + r"position_embedding$", r"\1position_embeddings"),
        (_EMBEDDINGS + r"patch_embedding\.", r"\1patch_embeddings.projection."),
        (r"^language_model\.model\.(encoder\.)?", "model.language_model."),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^mlp1\.0\.", "model.multi_modal_projector.layer_norm."),
        (r"^mlp1\.1\.", "model.multi_modal_projector.linear_1."),
        (r"^mlp1\.3\.", "model.multi_modal_projector.linear_2."),
    )
    vision_keys = {
        "vision_tower.**": "model.vision_tower.**",
        "multi_modal_projector.**": "model.multi_modal_projector.**",
    }
    hf_model = llama.LlamaFamily.hf_model
    hf_head = llama.LlamaFamily.hf_head

    @property
    def rules(self) -> list[Rule]:
        fused = towers.fused_qkv("vision_tower.layers.*.attention", "qkv", Whole(), Whole(), Whole())
        return [*super().rules, *fused]

    def vision_modules(self) -> nn.Module:
        for layer in (vision := super().vision_modules()).vision_tower.layers:
            layer.drop_path1 = layer.drop_path2 = nn.Identity()
        return vision
