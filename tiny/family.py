"""What a family's file here says: how to build a tiny model of it, and its sizes in demo and benches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PretrainedConfig, ProcessorMixin

# Every family's demo sees a digit as four visual tokens of 4x4 pixels of the scan: models learn twice as fast
# as with sixteen. Random weights start at a scale of 1/sqrt(width). With the 0.02 that is meant for widths of
# thousands, the tower's features would be too weak.
DEMO_TEXT = {"num_hidden_layers": 3, "initializer_range": 0.125}
DEMO_TOWER = {"hidden_size": 96, "intermediate_size": 192, "initializer_range": 0.1}


@dataclass(frozen=True)
class TinyFamily:
    template: str  # chat template with {% generation %} blocks
    processor: Callable[..., ProcessorMixin]  # (corpus, template, **sizes)
    config: Callable[[ProcessorMixin, dict, dict], PretrainedConfig]  # (processor, text, vision)
    demo: dict  # arguments of `build_tiny_checkpoint` for `make demo`
    published: dict | None = None  # sizes of the published processor, for benches; None: as another family's
    # name -> arguments of `build_tiny_checkpoint`: text models and towers that the plain one does not have
    variants: dict[str, dict] = field(default_factory=dict)
    # end of a weight's name -> what its random values are multiplied by, as training would have made them
    factors: dict[str, float] = field(default_factory=dict)
