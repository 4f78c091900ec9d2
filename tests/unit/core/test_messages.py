"""No terminal obeys what is printed: keys, paths and texts of strangers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_vlm.messages import printable, printable_lines

HOSTILE = {
    "\x1b[2J\x1b]0;owned\x07": r"\x1b[2J\x1b]0;owned\x07",
    "a\nmegatron-vlm: all is well\r": r"a\nmegatron-vlm: all is well\r",
    "txt\u202egpj.exe\u2066": r"txt\u202egpj.exe\u2066",
    "\x9b31m\x00\x7f": r"\x9b31m\x00\x7f",
    "a\u2028b\u200bc\ufeff": r"a\u2028b\u200bc\ufeff",
    "\udcff": r"\udcff",
    "\U000e0041": r"\U000e0041",
    "größe/图 1.jpg": "größe/图 1.jpg",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_terminal_would_obey_is_shown_escaped(text):
    assert printable(text) == HOSTILE[text]


def test_no_character_of_unicode_gets_through_that_is_not_printable():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = printable(everything, 10 * len(everything))
    assert shown.isprintable() and len(shown) > len(everything)
    shown.encode("utf-8")


def test_a_long_text_keeps_both_ends():
    shown = printable("first" + "\x1b" * 100_000 + "last")
    assert shown.startswith("first") and shown.endswith("last") and "…" in shown and len(shown) <= 6_000
    assert printable("x" * 2_000) == "x" * 2_000


def test_a_message_keeps_its_own_lines():
    assert printable_lines("one\ntwo \x1b[31m" + "y" * 500) == "one\ntwo \\x1b[31m" + "y" * 500
    answer = "a\tb\u00a0:\u3000\u0645\u06cc\u200c\u062e \U0001f469\u200d\U0001f467\n"
    assert printable_lines(answer + "\x1b]0;x\x07\r\u202e\x9b") == answer + r"\x1b]0;x\x07\r\u202e\x9b"
    assert printable(ValueError("a\nb")) == r"a\nb"


def test_what_a_library_logs_reaches_no_terminal_raw(capfd):
    code = (
        "import logging; from megatron_vlm.messages import PrintableRecord\n"
        "logging.setLogRecordFactory(PrintableRecord)\n"
        "logging.getLogger('transformers.x').warning('\\x1b[1mkey\\x1b[0m %s\\nnext', 'a\\x1b]0;pwn\\x07')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert capfd.readouterr().err == "key a\\x1b]0;pwn\\x07\nnext\n"


def test_a_hostile_name_is_escaped_where_an_error_and_a_line_of_a_run_are_printed(tmp_path):
    """Names stand in messages as they are; the error, its traceback's file and a run's lines are escaped."""
    code = (
        "from megatron_vlm.callbacks.base import Run\n"
        "from megatron_vlm.job.errors import exit_with_reason\n"
        "from types import SimpleNamespace\n"
        "name = '\\x1b]0;pwn\\x07\\u202e s3://KEY:SECRET@bucket/x'\n"
        "Run.message(SimpleNamespace(is_first_rank=True, has_ended=False), f'note {name}')\n"
        "with exit_with_reason('test'):\n"
        "    raise RuntimeError(f'{name}: it fails')\n"
    )
    clean = {"TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, **clean})
    [file] = tmp_path.glob("megatron-vlm-*.txt")
    for text in (ended.stdout.decode(), ended.stderr.decode(), file.read_text()):
        assert r"\x1b]0;pwn\x07\u202e s3://…@bucket/x" in text, text
        assert "SECRET" not in text and text.replace("\n", "").isprintable()


def test_no_name_makes_a_line_of_its_own_or_fills_the_screen(capfd):
    code = (
        "import sys; from megatron_vlm.config import ConfigError\n"
        "from megatron_vlm.job.errors import exit_with_reason\n"
        "from megatron_vlm.messages import join_lines\n"
        "name = 'a\\nmegatron-vlm: all is well'\n"
        "with exit_with_reason('test'):\n"
        "    text = f'{name} is no number, but ' + 10_000_000 * 'x' + '; give one'\n"
        "    raise ConfigError(join_lines([name, 'second']) if sys.argv[1:] else text)\n"
    )
    for arguments in ([], ["several lines"]):
        assert subprocess.run([sys.executable, "-c", code, *arguments]).returncode == 2
    single, first, second = capfd.readouterr().err.splitlines()
    assert single.startswith(r"test: a\nmegatron-vlm: all is well is no number, but xx")
    assert single.endswith("xx; give one") and len(single) < 2_100
    assert (first, second) == (r"test: a\nmegatron-vlm: all is well", "second")
