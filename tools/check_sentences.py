"""Find sentences of docstrings and pages that have to be read twice: python tools/check_sentences.py

It exits with 1 and names each place. A docstring's first line is a sentence about what the caller gets:
subject, verb, object. `TO_MEND` has the files and folders whose docstrings nobody has mended yet; it only
becomes shorter.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "megatron_vlm"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
WIDEST = 160  # characters of a line of a page, without what a script writes between marks
FIRST_WORDS = re.compile(r"(Of|Those|That of|By|As|What)\b")
TWICE = {  # what makes a sentence hard -> what to write instead
    r"\bthose of\b": "repeat the noun, or turn the sentence round",
    r"\bthat of\b(?! a )": "repeat the noun, or turn the sentence round",
    r"\bbe it\b": "whether it is",
    r"\bamid\b": "during",
    r"\banew\b": "again",
    r"\bfor ever\b": "without end",
    r"\bto be had\b": "available",
    r"\bin that which\b": "in what",
}
TO_MEND: list[str] = []


def documented(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring in a file."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def of_docstring(text: str) -> Iterator[str]:
    first = text.splitlines()[0]
    if FIRST_WORDS.match(text):
        yield f"begins with {text.split()[0]}"
    if not re.search(r"[.:;!?)]$|[.:;?] ", first):
        yield "its first sentence does not end on the first line"
    yield from hard(text)


def hard(text: str) -> Iterator[str]:
    for pattern, instead in TWICE.items():
        for match in re.finditer(pattern, " ".join(text.split())):
            yield f"{match[0]!r}; write: {instead}"


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """The line and the fault of each place in a page, without code and what scripts write."""
    text = re.sub(r"<!-- \w+:begin -->.*?<!-- \w+:end -->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", _blank, text, flags=re.DOTALL)
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > WIDEST:
            yield number, f"{len(line)} characters; at most {WIDEST}"
        yield from ((number, fault) for fault in hard(line) if not line.startswith("    "))


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def faults() -> Iterator[str]:
    for path in PAGES:
        for line, fault in of_page(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(ROOT)}:{line}: {fault}"
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE)
        if not any(name.is_relative_to(each) for each in TO_MEND):
            for line, text in documented(path):
                yield from (f"{path.relative_to(ROOT)}:{line}: {fault}" for fault in of_docstring(text))


def main() -> None:
    found = list(faults())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
