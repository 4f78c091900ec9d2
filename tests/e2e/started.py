"""The command line, imported once: each line of input is a command, run in a process forked from here.

A line is a JSON list of the words; the answer is a line with (exit code, output, seconds of processor time).
What a command imported is imported here as well before the next one, unless torch is among it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from typing import IO

from megatron_vlm import cli


def answer(words: list[str]) -> tuple[int, str, float]:
    with (
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as names,
    ):
        process = os.fork()
        if process == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            _run(words, names)
        _, status, used = os.wait4(process, 0)
        _import_as_well(names)
        files = [file.seek(0) or file.read().decode() for file in (said, errors)]
    return os.waitstatus_to_exitcode(status), "".join(files), used.ru_utime + used.ru_stime


def _run(words: list[str], names: IO[bytes]) -> None:
    """As Python would end after it."""
    sys.argv, code = [cli.__file__, *words], 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    names.write("\n".join(sys.modules).encode())
    names.flush()
    os._exit(code)


def _import_as_well(names: IO[bytes]) -> None:
    names.seek(0)
    imported = names.read().decode().splitlines()
    if "torch" not in imported:
        for name in imported:
            with contextlib.suppress(ImportError):  # of modules that others make
                importlib.import_module(name)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
