"""The `import`, `export` and `verify` of `megatron-vlm`; see `--help`."""

from megatron_vlm import cli

if __name__ == "__main__":
    cli.run(cli.commands("import", "export", "verify"), "convert_checkpoint.py")
