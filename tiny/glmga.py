"""A tiny glmga, whose images are cut to squares of four tokens, as its processor can."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from transformers import (
    Glm46VProcessor,
    GlmgaConfig,
    GlmgaImageProcessor,
    GlmgaVideoProcessor,
    ProcessorMixin,
)

from tiny import glm, glm4v
from tiny.family import TinyFamily

KINDS = (Glm46VProcessor, GlmgaImageProcessor, GlmgaVideoProcessor)


def processor(
    corpus: Iterable[str], template: str, patch_expand_factor: int = 2, **sizes: int
) -> ProcessorMixin:
    """`sizes` are those of `glm.processor`."""
    made = glm.processor(corpus, template, kinds=KINDS, **sizes)
    for part in (made.image_processor, made.video_processor):
        part.patch_expand_factor = patch_expand_factor
    return made


FAMILY = TinyFamily(
    glm.TEMPLATE,
    processor,
    partial(glm4v.config, kind=GlmgaConfig),
    demo=glm4v.DEMO,
)
