"""A tiny minicpmv4_7."""

from __future__ import annotations

from functools import partial

from transformers import MiniCPMV4_7Config, MiniCPMV4_7Processor

from tiny import minicpm


def config(processor: MiniCPMV4_7Processor, text: dict, vision: dict) -> MiniCPMV4_7Config:
    """`text` and `vision` override the toy sizes."""
    vocab = processor.tokenizer
    markers = {
        f"{name}_id": vocab.convert_tokens_to_ids(minicpm.MARKERS[f"{name}_token"])
        for name in ("image_start", "image_end", "slice_start", "slice_end")
    }
    (newline,) = vocab("\n")["input_ids"]
    return minicpm.config(MiniCPMV4_7Config, processor, text, vision, newline_id=newline, **markers)


FAMILY = minicpm.family(partial(minicpm.processor, kind=MiniCPMV4_7Processor), config)
