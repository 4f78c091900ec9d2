import logging
import os
import warnings

# Megatron-Core warns on every import about packages that are not installed, and logs that its own defaults
# are deprecated. torch warns about what Megatron's checkpoints still use, and about CUDA without a device.
if not os.environ.get("MEGATRON_VLM_DEBUG"):
    for _module in (r"megatron\.core", r"torch\.utils\._pytree", r"torch\.distributed\.checkpoint"):
        warnings.filterwarnings("ignore", module=_module)
    for _name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(_name).setLevel(logging.ERROR)
