"""Scores of answers by the formulas of published benchmarks; `metrics` explains each of the names."""

NAMES = ("exact_match", "contained", "relaxed", "anls", "vqa", "multiple_choice", "boxes", "wer", "cer")
