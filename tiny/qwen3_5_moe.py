"""A tiny qwen3_5_moe."""

from __future__ import annotations

from tiny import qwen
from tiny.family import TinyFamily

FAMILY = TinyFamily(
    qwen.QWEN3_TEMPLATE,
    qwen.qwen3_processor,
    qwen.qwen3_5_moe_config,
    demo={
        "image_size": 64,
        "text": {**qwen.QWEN3_5_DEMO_TEXT, "num_experts": 4, "num_experts_per_tok": 2},
        "vision": {**qwen.family.DEMO_TOWER, "depth": 2},
    },
)
