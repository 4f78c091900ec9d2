"""What reinforcement learning needs around a model: containers for ragged samples, and losses."""
