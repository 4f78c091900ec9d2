"""A tiny glm46v."""

from __future__ import annotations

from functools import partial

from transformers import Glm46VConfig, Glm46VImageProcessor, Glm46VProcessor, Glm46VVideoProcessor

from tiny import glm, glm4v
from tiny.family import TinyFamily

FAMILY = TinyFamily(
    glm.TEMPLATE,
    partial(glm.processor, kinds=(Glm46VProcessor, Glm46VImageProcessor, Glm46VVideoProcessor)),
    partial(glm4v.config, kind=Glm46VConfig),
    demo=glm4v.DEMO,
)
