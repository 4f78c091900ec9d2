"""A tiny minicpmv4_6."""

from __future__ import annotations

from functools import partial

from transformers import MiniCPMV4_6Config

from tiny import minicpm

FAMILY = minicpm.family(minicpm.processor, partial(minicpm.config, MiniCPMV4_6Config))
