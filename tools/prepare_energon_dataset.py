"""The same as `megatron-vlm prepare`; see `--help`."""

from megatron_vlm.cli import run, single
from megatron_vlm.commands.prepare import prepare

if __name__ == "__main__":
    run(single(prepare), "prepare_energon_dataset")
