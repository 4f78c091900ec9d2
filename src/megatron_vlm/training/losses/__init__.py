"""Losses, which make a step's gradients: a file for each objective that has its own."""
