"""The command line, imported once: each line of input is a command, run in a process forked from here.

A line is a JSON list of the words; the answer is a line with (exit code, output, seconds of processor time).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from megatron_vlm import cli


def answer(words: list[str]) -> tuple[int, str, float]:
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        process = os.fork()
        if process == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            _run(words)
        _, status, used = os.wait4(process, 0)
        files = [file.seek(0) or file.read().decode() for file in (said, errors)]
    return os.waitstatus_to_exitcode(status), "".join(files), used.ru_utime + used.ru_stime


def _run(words: list[str]) -> None:
    """As Python would end after it."""
    sys.argv, code = [cli.__file__, *words], 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
