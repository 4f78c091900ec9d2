"""Reinforcement learning: containers for ragged samples, losses, and a model as a policy."""
