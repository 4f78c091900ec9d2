"""No regular expression of the package takes more than in proportion to a text that a stranger wrote."""

import ast
import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from re import _constants as codes
from re import _parser as parser

import pytest

from rooms import SOURCE

RUNS = (14, 24, 30, 300, 1000, 5000)  # characters; a worse power shows with fewer
SECONDS = (
    0.05  # of a processor for the longest; a square takes more than twice that, others under a thousandth
)
USES = ("match", "fullmatch", "search", "sub", "split", "findall", "finditer")
# made of names that only their function knows: words of a tokenizer, escaped and with possessive repeats,
# types of errors, patterns of Transformers, and rules for weights
LOCAL = {
    "adapter_settings": 1,
    "data.encode.chat_template": 7,
    "data.encode.processing": 2,
    "extras.grounding.convention": 2,  # tried in tests/unit/data/test_boxes.py
    "data.on_disk.rows_file": 1,
    "data.chatml.record": 1,
    "weight_files": 1,
    "models.weights.rules": 1,
    "extras.report.page": 1,  # of the names of our own figures
    "inputs": 1,
}
SAMPLES = (" ", "a", "0", "_", ".", "/", "<", "\u00e9")


def patterns() -> Iterator[tuple[str, str | bytes | None, set[str]]]:
    """(module, pattern, functions) of each use of `re`; None for a pattern that is made of other names."""
    files = {file: file.read_text(encoding="utf-8") for file in sorted(SOURCE.rglob("*.py"))}
    for file, text in files.items():
        module, tree = ".".join(file.relative_to(SOURCE).with_suffix("").parts), ast.parse(text)
        names = names_of(tree)
        for node in ast.walk(tree):
            call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
            if call and isinstance(node.func.value, ast.Name) and node.func.value.id == "re":
                if node.func.attr not in (*USES, "compile"):
                    continue
                try:
                    pattern = eval(compile(ast.Expression(node.args[0]), module, "eval"), names)  # noqa: S307
                except NameError:
                    pattern = None
                uses = {node.func.attr}
                if uses == {"compile"}:
                    own = [n for n, v in names.items() if isinstance(v, re.Pattern) and v.pattern == pattern]
                    found = re.findall(rf"\b({'|'.join(own)})\.(\w+)", "".join(files.values())) if own else []
                    uses = {use for _, use in found} & {*USES} or {*USES}
                yield module, pattern, uses


def names_of(tree: ast.Module) -> dict:
    """The values of a module's names that are made of constants; nothing of the package is imported."""
    names: dict = {"re": re}
    for node in tree.body:
        if isinstance(node, ast.Assign) and not any(isinstance(part, ast.Lambda) for part in ast.walk(node)):
            with contextlib.suppress(Exception):
                exec(compile(ast.Module([node], []), "names", "exec"), names)  # noqa: S102
    return names


def shortest(tokens) -> str:
    """A short text that the tokens of a parsed pattern fit."""
    return "".join(_shortest(code, value) for code, value in tokens)


def _shortest(code, value) -> str:
    if code is codes.LITERAL:
        return chr(value)
    if code is codes.IN:
        return characters(value)[0]
    if code in (codes.ANY, codes.NOT_LITERAL):
        return "x"
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return shortest(value[2]) * value[0]
    if code is codes.SUBPATTERN:
        return shortest(value[-1])
    if code is codes.BRANCH:
        return shortest(value[1][0])
    return ""


def characters(items) -> list[str]:
    """Characters that a class has."""
    tried = [*SAMPLES, *(chr(v) for c, v in items if c is codes.LITERAL)]
    tried += [chr(value[0]) for code, value in items if code is codes.RANGE]
    parsed = parser.SubPattern(parser.State(), [(codes.IN, items)])
    from re import _compiler

    fits = _compiler.compile(parsed)
    return [c for c in tried if fits.fullmatch(c)] or ["x"]


def texts(tokens, before: str = "") -> Iterator[tuple[str, str]]:
    """(what leads to a repeat without an end, what it repeats)."""
    for number, (code, value) in enumerate(tokens):
        here = before + shortest(tokens[:number])
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            if value[1] > 100:
                first = value[2][0] if len(value[2]) == 1 else None
                repeated = characters(first[1]) if first and first[0] is codes.IN else [shortest(value[2])]
                yield from ((here, each) for each in repeated)
                yield from ((here, each) for each in SAMPLES)
            yield from texts(value[2], here)
        elif code is codes.SUBPATTERN:
            yield from texts(value[-1], here)
        elif code is codes.BRANCH:
            for branch in value[1]:
                yield from texts(branch, here)


def slow(pattern: str | bytes, uses: Iterable[str]) -> list[str]:
    """The first text with which the pattern takes too long, in words."""
    compiled = re.compile(pattern)
    shown = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    runs = {("", each) for each in SAMPLES} | set(texts(parser.parse(shown)))
    for use in {use if use.endswith("match") else "search" for use in uses}:
        for before, repeated in sorted(runs):
            for times in RUNS:
                text = before + repeated * times + "\0"
                text = text if isinstance(pattern, str) else text.encode("latin-1", "ignore")
                began = time.process_time()
                getattr(compiled, use)(text)
                if time.process_time() - began > SECONDS:
                    return [f"{use}: {before!r} and {times} times {repeated!r}"]
    return []


def test_no_pattern_takes_the_square_of_a_text():
    local: dict[str, int] = {}
    tried = 0
    for module, pattern, uses in patterns():
        if pattern is None:
            local[module] = local.get(module, 0) + 1
            continue
        tried += 1
        assert not slow(pattern, uses), (module, pattern)
    assert local == LOCAL and tried > 20


@pytest.mark.parametrize("pattern", [r"\s*[\w .:/-]{1,64}\s*", r"\s*(.*?)\s*(?:#\d+)?\s*", r"(a|a)*b"])
def test_a_pattern_that_does_is_found(pattern):
    assert slow(pattern, ["fullmatch"])
