"""A conversation that ends with the user's turn, as the model sees it before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.batch import DataNeeds, GenericVisualInputs, Prompt
from megatron_vlm.data.media.anyres import arranged
from megatron_vlm.data.media.images import decode_image
from megatron_vlm.data.media.naflex import without_padding


def encode_prompt(
    processor: ProcessorMixin,
    messages: list[dict],
    images: list[bytes],
    needs: DataNeeds,
) -> Prompt:
    """The conversation as the model's input on the host, with the template's generation prompt at the end."""
    outputs = needs.of_processor(without_padding(processor_outputs(processor, messages, images)))
    input_ids = outputs["input_ids"][0]
    tensors = {key: outputs[key] for key in needs.visual_keys if key in outputs}
    visual = GenericVisualInputs.from_mapping(tensors) if tensors else None
    return {
        "input_ids": input_ids,
        "position_ids": needs.position_ids(input_ids, visual),
        "visual_inputs": visual,
    }


def processor_outputs(
    processor: ProcessorMixin, messages: list[dict], images: list[bytes]
) -> Mapping[str, Tensor]:
    """All outputs of the processor for the conversation, as one row, for a Transformers model."""
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    bos = processor.tokenizer.bos_token
    return processor(
        text=[text],
        images=arranged(processor, [decode_image(image) for image in images]) or None,
        return_tensors="pt",
        add_special_tokens=not (bos and text.startswith(bos)),
    )


def stop_tokens(folder: Path, hf_config: Any) -> list[int]:
    """The end-of-turn and end-of-text ids in the checkpoint's generation config, or else (as in Transformers)
    in its config.json."""
    from transformers import GenerationConfig

    ids = hf_config.get_text_config().eos_token_id
    if (folder / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(folder).eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
