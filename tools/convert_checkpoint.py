"""The `import`, `export` and `verify` of `megatron-vlm`; see `--help`."""

from megatron_vlm import cli
from megatron_vlm.commands.program import some_of

if __name__ == "__main__":
    cli.run(some_of(cli.app, "import", "export", "verify"), "convert_checkpoint.py")
