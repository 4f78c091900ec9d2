"""Answers of the model to prompts: `generate`, see `docs/reference/generation.md`."""

from megatron_vlm.parallel import cpu

cpu.install()
