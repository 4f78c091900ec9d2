"""Count words that make code hard to read; `tools/check_sentences.py` reads pages.

    python tools/check_words.py [--list N]

Counts, in src: local names, parameters and functions that say nothing (EMPTY); functions named by a
participle or adverb alone (PARTICIPLES); docstrings whose first sentence uses turned-round grammar (GRAMMAR);
long functions without a comment.
Prints one figure a row; --list N also prints the first N places of each.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

EMPTY = set(
    "found said written own gone theirs given held known told named whole rest others one each asked made "
    "left wanted taken shown due begun mine here most least what why how".split()
)
PARTICIPLES = set(
    "begun told said settled lost held given asked beside aside again hung turned joined drawn divided "
    "sole meant rated heeding spoken pretended shown known taken".split()
)
GRAMMAR = re.compile(
    r"\b(of which|of whom|those of|that of|those that|by which|in which case|likewise|where that|anew|amid|"
    r"for ever|as often as|none that|what is told|is told|are told|is said of|thereof|whatever ends)\b",
    re.I,
)


def bound_names(node: ast.AST):
    """(name, line) of what a function binds: parameters, assigned names, loop and comprehension variables."""
    for child in ast.walk(node):
        if isinstance(child, ast.arg):
            yield child.arg, child.lineno
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, child.lineno


def main(root: Path, listed: int) -> None:
    places: dict[str, list[str]] = {}

    def add(kind: str, place: str) -> None:
        places.setdefault(kind, []).append(place)

    words: Counter = Counter()
    for path in sorted((root / "src").rglob("*.py")):
        text = path.read_text()
        tree, lines = ast.parse(text), text.splitlines()
        seen = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{path.relative_to(root)}:{node.lineno}"
                if node.name.strip("_") in PARTICIPLES:
                    add("functions named by a participle", f"{where} {node.name}")
                for name, line in bound_names(node):
                    if name.strip("_") in EMPTY and (path, name, line) not in seen:
                        seen.add((path, name, line))
                        words[name] += 1
                        add("empty names", f"{path.relative_to(root)}:{line} {name}")
                length = node.end_lineno - node.lineno + 1
                body = lines[node.lineno : node.end_lineno]
                if length > 25 and not any(line.strip().startswith("#") or "  # " in line for line in body):
                    add("functions over 25 lines without a comment", f"{where} {node.name} ({length})")
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                doc = ast.get_docstring(node) or ""
                first = re.split(r"(?<=[.!?])\s", doc.strip() + " ")[0]
                if GRAMMAR.search(first):
                    add(
                        "docstrings turned round",
                        f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)} {first[:90]}",
                    )
    for kind in (
        "empty names",
        "functions named by a participle",
        "docstrings turned round",
        "functions over 25 lines without a comment",
    ):
        print(f"{kind} {len(places.get(kind, []))}")
        for place in places.get(kind, [])[:listed]:
            print("   ", place)
    print("most frequent:", dict(words.most_common(12)))


if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent, int(sys.argv[2]) if "--list" in sys.argv else 0)
