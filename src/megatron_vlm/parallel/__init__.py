import logging
import warnings

# Megatron-Core warns on every import about what is not installed, and logs what its own defaults deprecate.
warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.utils\._pytree")
logging.getLogger("megatron.core").setLevel(logging.ERROR)
