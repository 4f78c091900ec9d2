from megatron_vlm.parallel import cpu

cpu.install()
