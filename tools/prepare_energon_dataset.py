"""The same as `megatron-vlm prepare`; see `--help`."""

from megatron_vlm.commands.prepare import prepare
from megatron_vlm.commands.program import run, single

if __name__ == "__main__":
    run(single(prepare), "prepare_energon_dataset")
