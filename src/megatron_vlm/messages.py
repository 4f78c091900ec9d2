"""Text for messages: foreign text that no terminal obeys, lists, tables, and what may have been meant."""

import difflib
import logging
import re
import unicodedata
from collections.abc import Iterable, Sequence

LONGEST = 2_000  # characters of a line that are shown
QUIET = "MEGATRON_VLM_QUIET"  # in the environment: print errors and the closing lines alone
MOST_NEAR = 5  # names that a message proposes


class PrintableText(str):
    """Text that can be printed as it is; its line breaks are by intent."""


def printable(text: object, longest: int = LONGEST) -> PrintableText:
    """Return a message on one line that no terminal obeys. Call it where text is printed, and only there.

    Names of files and keys, and values that a user or an archive wrote, stand in messages as they are.
    Escapes, newlines, bidirectional marks and everything else that Unicode does not call printable appear as
    Python writes them (`\\x1b`, `\\n`, `\\u202e`), also lone surrogates, so that any encoding can write them.
    More than `longest` characters are cut in the middle, as both ends of a message are useful. Keys in an
    address are left out, see `mask_addresses`. A `PrintableText` is returned as it is.
    """
    if isinstance(text, PrintableText):
        return text
    escaped = "".join(map(_escape, shorten(mask_addresses(text), longest)))
    return PrintableText(shorten(escaped, 3 * longest))  # an escape takes up to ten characters


def join_lines(texts: Iterable[object]) -> PrintableText:
    """Return a message with a line for each text; no text can make a second one."""
    return PrintableText("\n".join(map(printable, texts)))


def printable_lines(text: object) -> PrintableText:
    """Return a whole text that no terminal obeys: as by `printable`, but nothing is cut, and newlines, tabs,
    all spaces and what joins characters of scripts and emojis are kept."""
    return PrintableText("".join(c if _is_of_text(c) else _escape(c) for c in mask_addresses(text)))


def mask_addresses(text: object) -> str:
    """Return the text without the keys in its addresses, and with buckets not under Energon's name for them.

    Keys stand before an @, or in the query of a presigned address (`?X-Amz-Signature=…`).
    """
    text = str(text).replace("msc://_s3-", "s3://")
    text = re.sub(r"(?i)((?:s3|msc):/+)[^/\s:@]*:\S*@|(://)[^/\s@]*@", r"\1\2…@", text)
    return re.sub(r"[^\s'\"]+", _without_query, text) if "?" in text else text


def _without_query(word: re.Match[str]) -> str:
    """A word of a text; if it is an address with a query of keys and values, without what is in the query."""
    address, _, query = word[0].partition("?")
    has_values = re.search(r"(?i)=|%3d", query)
    return f"{address}?…" if ":/" in address and has_values else word[0]


def has_keys(address: object) -> bool:
    """Return whether an address, or any in a list of them, has what `mask_addresses` leaves out."""
    addresses = re.findall(r"(?i)\b(?:s3|msc|gs|az|abfss?|hf|https?|ftp):/+[^\s,\]]*", str(address))
    return any(mask_addresses(text) != text for text in addresses)


class PrintableRecord(logging.LogRecord):
    """A record of a library's log whose text is made printable and has no colours."""

    def getMessage(self) -> str:  # noqa: N802 - the name in logging
        return printable_lines(re.sub(r"\x1b\[[\d;]*m", "", super().getMessage()))


def listed(texts: Sequence[str], count: int = 20, comma: str = ", ") -> str:
    """Return the first texts, and how many more there are."""
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return comma.join(texts[:count]) + more


def aligned(rows: Sequence[Sequence[str]], side: str = "<") -> list[str]:
    """The rows of a table as lines, their columns at the left ("<") or at the right (">")."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([f"{text:{side}{width}}" for text, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def plural(count: int, noun: str) -> str:
    """The count with its noun: `1 step`, `2,000 steps`, `2 processes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def readable_size(size: int) -> str:
    """A number of bytes in a readable unit: `12.3 GB`, `4.5 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _is_of_text(character: str) -> bool:
    return character in "\n\t\u200c\u200d" or unicodedata.category(character) == "Zs"


def shorten(text: str, longest: int = 60) -> str:
    """Return the text with its middle cut out if it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[: longest - 1 - half]}…{text[len(text) - half :]}"


def any_of(names: Iterable[str]) -> str:
    """Return `a, b or c`."""
    *leading, last = names
    return f"{', '.join(leading)} or {last}" if leading else last


def suggestion(word: str, names: Iterable[str], remedy: str = "") -> str:
    """Return `; did you mean X, Y or Z?` with at most five near names, best first.

    If none is near, return all names where they are few, else `remedy`, which says where they are.
    """
    names = list(names)
    near = difflib.get_close_matches(word, names, MOST_NEAR, 0.8) or difflib.get_close_matches(word, names, 1)
    if near:
        return f"; did you mean {any_of(near)}?"
    return f"; {remedy}." if remedy else f"; known are {listed(names, MOST_NEAR)}."
