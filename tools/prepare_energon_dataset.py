"""The same as `megatron-vlm prepare`; see `--help`."""

import typer

from megatron_vlm.data.prepare_command import prepare_command

if __name__ == "__main__":
    typer.run(prepare_command)
