"""The work of a model: what its parts cost, and what a batch asks of it."""
