"""A conversation that ends with the user's turn, as the model sees it before it answers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ProcessorMixin

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.images import decode_image


def encode_prompt(
    processor: ProcessorMixin,
    messages: list[dict],
    images: list[bytes],
    visual_keys: tuple[str, ...],
    device: torch.device,
) -> dict[str, Any]:
    """`input_ids` (T,) with the template's generation prompt at the end, and `visual_inputs` or None."""
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    bos = processor.tokenizer.bos_token
    outputs = processor(
        text=[text],
        images=[decode_image(image) for image in images] or None,
        return_tensors="pt",
        add_special_tokens=not (bos and text.startswith(bos)),
    )
    visual = {key: outputs[key] for key in visual_keys if key in outputs}
    return {
        "input_ids": outputs["input_ids"][0].to(device),
        "visual_inputs": GenericVisualInputs.from_mapping(visual).to(device) if visual else None,
    }
