"""A conversation that ends with the user's turn, as the model sees it before it answers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.batch import DataNeeds, GenericVisualInputs, Prompt
from megatron_vlm.config import ConfigError
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.image_processors.base import image_options
from megatron_vlm.data.media.images import decode_image
from megatron_vlm.files import read_text
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.supported import GENERATION_FILE


def encode_prompt(
    processor: ProcessorMixin,
    messages: list[dict],
    images: list[bytes],
    needs: DataNeeds,
) -> Prompt:
    """The conversation as the model's input on the host, with the template's generation prompt at the end."""
    outputs = get_image_spec(processor).unpad(processor_outputs(processor, messages, images))
    input_ids = outputs["input_ids"][0]
    tensors = {key: outputs[key] for key in needs.visual_keys if key in outputs}
    visual = GenericVisualInputs(**tensors) if tensors else None
    return {
        "input_ids": input_ids,
        "position_ids": needs.position_ids(input_ids, visual),
        "visual_inputs": visual,
    }


@attribute_errors_to("processor.tokenizer.name_or_path")
def processor_outputs(
    processor: ProcessorMixin, messages: list[dict], images: list[bytes]
) -> Mapping[str, Tensor]:
    """All outputs of the processor for the conversation, as one row, for a Transformers model."""
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    bos = processor.tokenizer.bos_token
    return processor(
        text=[text],
        images=get_image_spec(processor).arrange([decode_image(image) for image in images]) or None,
        return_tensors="pt",
        add_special_tokens=not (bos and text.startswith(bos)),
        **(image_options(processor) if images else {}),
    )


@attribute_errors_to("folder")
def stop_tokens(folder: Path, hf_config: Any) -> list[int]:
    """The end-of-turn and end-of-text ids of the checkpoint.

    They are read from its generation config, whose other values are not looked at, or else (as in
    Transformers) from its config.json. Raises ConfigError that names a damaged file.
    """
    ids = hf_config.get_text_config().eos_token_id
    file = folder / GENERATION_FILE
    if file.is_file():
        try:
            ids = json.loads(read_text(file)).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{file} is no JSON object ({error}); download it again.") from error
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(number) is int for number in ids):
        raise ConfigError(f"{file}: eos_token_id is {ids}, expected numbers of tokens.")
    return ids
