"""A conversation that ends with the user's turn, as the model sees it before it answers; special tokens."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.batch import DataNeeds, GenericVisualInputs, Prompt
from megatron_vlm.config import ConfigError
from megatron_vlm.data.encode.chat_template import TEMPLATE_ERRORS
from megatron_vlm.data.kinds import kind_of
from megatron_vlm.data.media.images import decode_image
from megatron_vlm.messages import listed, printable, reading

MOST_LISTED = 5  # tokens that a message names


def encode_prompt(
    processor: ProcessorMixin,
    messages: list[dict],
    images: list[bytes],
    needs: DataNeeds,
) -> Prompt:
    """The conversation as the model's input on the host, with the template's generation prompt at the end."""
    outputs = kind_of(processor).unpadded(processor_outputs(processor, messages, images))
    input_ids = outputs["input_ids"][0]
    tensors = {key: outputs[key] for key in needs.visual_keys if key in outputs}
    visual = GenericVisualInputs(**tensors) if tensors else None
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
        images=kind_of(processor).arranged([decode_image(image) for image in images]) or None,
        return_tensors="pt",
        add_special_tokens=not (bos and text.startswith(bos)),
    )


@reading("folder")
def stop_tokens(folder: Path, hf_config: Any) -> list[int]:
    """The end-of-turn and end-of-text ids in the checkpoint's generation config, or else (as in Transformers)
    in its config.json."""
    from transformers import GenerationConfig

    ids = hf_config.get_text_config().eos_token_id
    if (folder / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(folder).eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def vocabulary_notes(processor: ProcessorMixin, size: int) -> list[str]:
    """Lines about tokens of the tokenizer that are none of the model's `size`, if it has any.

    Raises ConfigError, which names them, if the chat template or the processor writes them into every
    conversation, or into those with images.
    """
    beyond = {token: name for name, token in processor.tokenizer.get_vocab().items() if token >= size}
    if not beyond:
        return []
    known = f"and the model has {size} (vocab_size in its config.json, the rows of its embedding)"
    remedy = (
        "Give the model rows for them with Transformers (resize_token_embeddings) and save it in the folder "
        "model.hf_path"
    )
    if written := _written(processor) & beyond.keys():
        raise ConfigError(
            f"model.hf_path: its chat template and processor write {_listed(beyond, written)}, {known}. "
            f"{remedy}, or take them out of the template."
        )
    return [
        f"model.hf_path: its tokenizer has {_listed(beyond, beyond.keys())}, {known}; a sample with one of "
        f"them would end the run. {remedy}"
    ]


def _listed(names: Mapping[int, str], tokens: Iterable[int]) -> str:
    """How many tokens these are, with the first few."""
    some = [f"{printable(names[token])} ({token})" for token in sorted(tokens)]
    return f"{len(some)} {'tokens' if len(some) > 1 else 'token'}, {listed(some, MOST_LISTED)}"


def _written(processor: ProcessorMixin) -> set[int]:
    """The tokens of a conversation with an image and of one without; none of one that is refused."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    written: set[int] = set()
    for images in ([file.getvalue()], []):
        question = [*({"type": "image"} for _ in images), {"type": "text", "text": "a"}]
        answer = [{"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        with suppress(*TEMPLATE_ERRORS):
            written.update(processor_outputs(processor, messages, images)["input_ids"][0].tolist())
    return written
