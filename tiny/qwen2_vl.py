"""A tiny qwen2_vl."""

from __future__ import annotations

from functools import partial

from transformers import Qwen2VLProcessor

from tiny import qwen
from tiny.family import DEMO_TEXT, TinyFamily

FAMILY = TinyFamily(
    qwen.QWEN2_5_TEMPLATE,
    partial(qwen.qwen2_5_processor, kind=Qwen2VLProcessor),
    qwen.qwen2_config,
    demo={
        "image_size": 56,
        "text": DEMO_TEXT,
        "vision": {"embed_dim": 96, "initializer_range": 0.1},
    },
    published={"image_size": 3584},
)
