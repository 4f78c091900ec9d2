"""The `import`, `export` and `verify` of `megatron-vlm`; see `--help`."""

import typer

from megatron_vlm import cli
from megatron_vlm.cli import PLAIN

COMMANDS = ("import", "export", "verify")

if __name__ == "__main__":
    program = typer.Typer(**PLAIN, no_args_is_help=True, help="Convert checkpoints and compare them.")
    program.registered_commands = [
        command
        for command in cli.app.registered_commands
        if (command.name or command.callback.__name__) in COMMANDS
    ]
    cli.run(program, "convert_checkpoint.py")
