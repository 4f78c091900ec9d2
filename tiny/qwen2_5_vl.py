"""A tiny qwen2_5_vl."""

from __future__ import annotations

from tiny import qwen
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

FAMILY = TinyFamily(
    qwen.QWEN2_5_TEMPLATE,
    qwen.qwen2_5_processor,
    qwen.qwen2_5_config,
    demo={
        "image_size": 56,
        "text": DEMO_TEXT,
        "vision": {**DEMO_TOWER, "depth": 2, "fullatt_block_indexes": [1]},
    },
    published={"image_size": 3584},
)
