"""The ways in which families write boxes, by name. Each new one is also in `config.BoxFormat`."""

from megatron_vlm.data.grounding.convention import Convention

CONVENTIONS = {
    # Qwen2.5-VL: `qwen-vl-finetune/tools/process_bbox.ipynb` and `cookbooks/spatial_understanding.ipynb` of
    # QwenLM/Qwen2.5-VL
    "bbox_2d_pixels": Convention(unit=None, keys={"box": "bbox_2d", "point": "point_2d"}),
    # Qwen3-VL and Qwen3.5: `cookbooks/omni_recognition.ipynb` and `cookbooks/spatial_understanding.ipynb` of
    # QwenLM/Qwen3-VL
    "bbox_2d": Convention(unit=1000, keys={"box": "bbox_2d", "point": "point_2d"}),
    # Gemma 4: ai.google.dev/gemma/docs/capabilities/vision/image; Gemma 3 was not trained on boxes
    "box_2d": Convention(unit=1000, rows_first=True, keys={"box": "box_2d", "point": "point"}, indent="  "),
    # Qwen2-VL: arXiv 2409.12191, section 2.2; `process_bbox.ipynb` of QwenLM/Qwen2.5-VL
    "box_tokens": Convention(
        unit=1000,
        pair="({},{})",
        comma=",",
        one="<|box_start|>{}<|box_end|>",
        each="<|box_start|>{}<|box_end|>",
        between="",
        label="<|object_ref_start|>{}<|object_ref_end|>",
    ),
    # InternVL: internvl.readthedocs.io, "Chat Data Format", grounding and detection data
    "ref_box": Convention(
        unit=1000, one="<box>[[{}]]</box>", several="<box>[{}]</box>", label="<ref>{}</ref>"
    ),
    # GLM-4.1V to GLM-4.6V: README.md of zai-org/GLM-V, "Grounding": the style of brackets varies
    "begin_of_box": Convention(
        unit=1000,
        pair="{},{}",
        comma=",",
        one="<|begin_of_box|>[{}]<|end_of_box|>",
        several="<|begin_of_box|>[{}]<|end_of_box|>",
        between=",",
    ),
    # no family's own, for models whose families publish nothing
    "pixels": Convention(unit=None, polygons=True),
    "thousandths": Convention(unit=1000, polygons=True),
    # LLaVA: table 7 of arXiv 2310.03744, and issue 606 of haotian-liu/LLaVA for the padding
    "shares": Convention(unit=1, decimals=2, polygons=True),
}
