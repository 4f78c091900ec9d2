"""`python -m megatron_vlm` is the command `megatron-vlm`."""

from megatron_vlm.cli import main

main()
