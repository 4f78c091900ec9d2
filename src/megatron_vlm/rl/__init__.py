"""Reinforcement learning: containers for ragged samples, losses, and a model as a policy."""

from megatron_vlm.parallel import cpu

cpu.install()
