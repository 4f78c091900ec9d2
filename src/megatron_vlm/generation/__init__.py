"""Answers of the model to prompts: `generate`, see `docs/generation.md`."""
