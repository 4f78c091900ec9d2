"""A tiny qwen3_5."""

from __future__ import annotations

from tiny import qwen
from tiny.family import TinyFamily

FAMILY = TinyFamily(
    qwen.QWEN3_TEMPLATE,
    qwen.qwen3_processor,
    qwen.qwen3_5_config,
    demo={"image_size": 64, "text": qwen.QWEN3_5_DEMO_TEXT, "vision": {**qwen.family.DEMO_TOWER, "depth": 2}},
    published={"image_size": 4096},
)
