"""Pairs of a chosen and a rejected answer, on their way to a batch."""
