"""Vision-language training: Megatron-Core language models, Hugging Face towers, one batch contract."""

__version__ = "0.1.0"
