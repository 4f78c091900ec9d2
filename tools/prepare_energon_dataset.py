"""The same as `megatron-vlm prepare`; see `--help`."""

from megatron_vlm.commands.prepare import prepare_command
from megatron_vlm.commands.program import run, single

if __name__ == "__main__":
    run(single(prepare_command), "prepare_energon_dataset")
