"""Answers of a model to held-out conversations, and their scores."""
