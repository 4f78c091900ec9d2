"""Answers of a model to held-out conversations, and their scores by the formulas of published benchmarks."""

NAMES = ("exact_match", "contained", "anls", "boxes")
