"""Text for messages: foreign text that no terminal obeys, and suggestions of what may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 200  # the most characters of a key or a path that are shown


def printable(text: object, longest: int = LONGEST) -> str:
    """`text` on one line that no terminal obeys: for keys, paths, and whatever a user or an archive wrote.

    Escapes, newlines, bidirectional marks and everything else that Unicode does not call printable appear as
    Python writes them (`\\x1b`, `\\n`, `\\u202e`), also lone surrogates, so that any encoding can write them.
    More than `longest` characters are cut in the middle, as both ends of a path are useful.
    """
    shown = "".join(_shown(character) for character in _cut(str(text), longest))
    return _cut(shown, 3 * longest)  # an escape takes up to ten characters


def printable_lines(text: object) -> str:
    """A whole message as by `printable`, but newlines are kept and nothing is cut."""
    return "\n".join(printable(line, len(line)) for line in str(text).expandtabs().split("\n"))


def readable_size(size: int) -> str:
    """A number of bytes in a readable unit: `12.3 GB`, `4.5 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[: longest - 1 - half]}…{text[len(text) - half :]}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or the known words if none is close."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}."
