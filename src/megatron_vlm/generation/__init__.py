"""Answers of the model to prompts: `generate`, see `docs/generation.md`."""

from megatron_vlm.parallel import cpu

cpu.install()
