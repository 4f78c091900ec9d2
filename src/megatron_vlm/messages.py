"""Text for messages: foreign text that no terminal obeys, suggestions of what may have been meant, and what
was being read when an error came."""

import difflib
import functools
import inspect
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

LONGEST = 2_000  # characters of a line that are shown


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
    shown = "".join(map(_escape, shorten(mask_addresses(text), longest)))
    return PrintableText(shorten(shown, 3 * longest))  # an escape takes up to ten characters


def join_lines(texts: Iterable[object]) -> PrintableText:
    """Return a message of several lines, of which no text can make more than its own."""
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
    found = re.findall(r"(?i)\b(?:s3|msc|gs|az|abfss?|hf|https?|ftp):/+[^\s,\]]*", str(address))
    return any(mask_addresses(one) != one for one in found)


class PrintableRecord(logging.LogRecord):
    """A record of a library's log whose text is made printable and has no colours."""

    def getMessage(self) -> str:  # noqa: N802 - the name in logging
        return printable_lines(re.sub(r"\x1b\[[\d;]*m", "", super().getMessage()))


def listed(texts: Sequence[str], most: int = 20, comma: str = ", ") -> str:
    """The first texts, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return comma.join(texts[:most]) + more


def aligned(rows: Sequence[Sequence[str]], side: str = "<") -> list[str]:
    """The rows of a table as lines, their columns at the left ("<") or at the right (">")."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([f"{text:{side}{width}}" for text, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def readable_size(size: int) -> str:
    """A number of bytes in a readable unit: `12.3 GB`, `4.5 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def check_number(name: str, value: Any, holds: Callable[[Any], bool], wanted: str) -> None:
    """Raises ValueError, which says what is `wanted`, unless `value` is a number that passes `holds`."""
    try:
        right = holds(value)
    except TypeError:  # a text, None
        right = False
    if not right:
        raise ValueError(f"{name} is {value!r}; give {wanted}.")


def odd_fields(
    content: Mapping[str, Any], types: Mapping[str, Any], positive: Iterable[str] = ()
) -> Iterator[str]:
    """A message for each field that is there and not of its type, such as `dict[str, int | None]`.

    One of the `positive` fields may neither be nor, as a list, hold a number of zero or less."""
    for name in positive:
        value = content.get(name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not number > 0:
                yield f"{name} is {shorten(repr(value))}, expected more than 0"
                break
    for name, hint in types.items():
        if name in content and not _is_of(content[name], hint):
            wanted = hint.__name__ if isinstance(hint, type) and not get_args(hint) else hint
            wanted = str(wanted).replace("typing.", "")
            yield f"{name} is {shorten(repr(content[name]))}, expected {wanted}"


def _is_of(value: Any, hint: Any) -> bool:
    inner = get_args(hint)
    kind = get_origin(hint) or hint
    if kind is Literal:
        return value in inner
    if kind is UnionType:
        return any(_is_of(value, each) for each in inner)
    if isinstance(value, bool) and kind is not bool or not isinstance(value, kind or NoneType):
        return False
    if isinstance(value, dict) and inner:
        return all(_is_of(key, inner[0]) and _is_of(item, inner[1]) for key, item in value.items())
    return not inner or all(_is_of(item, inner[0]) for item in value)


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


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or the known words if none is close."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}."


def reading(what: str) -> Callable[[Callable], Callable]:
    """Decorates a function that reads what a user gave: an error from inside is then about that, and no bug.

    `what` is an argument of the function or an attribute of one (`self.path`), or else it is said as it is.
    The innermost of such functions knows best. `job.errors.explain` reads the mark.
    """
    name, _, attributes = what.partition(".")

    def decorated(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def reads(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if getattr(error, "reading", None) is None:
                    given = signature.bind(*args, **kwargs).arguments.get(name, what)
                    error.reading = attrgetter(attributes)(given) if attributes else given
                raise

        return reads

    return decorated
