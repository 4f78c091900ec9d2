"""A tiny qwen3_vl."""

from __future__ import annotations

from tiny import qwen
from tiny.family import DEMO_TEXT, TinyFamily

FAMILY = TinyFamily(
    qwen.QWEN3_TEMPLATE,
    qwen.qwen3_processor,
    qwen.qwen3_config,
    demo={"image_size": 64, "text": DEMO_TEXT, "vision": qwen.DEMO_TOWER},
    published={"image_size": 4096},
)
