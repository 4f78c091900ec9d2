"""Print how large the package and its parts are: python tools/code_size.py [ROOT of another checkout]

Lines of code are those that are neither blank, nor a comment, nor a docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path
from statistics import median

from tables import markdown

ROOT = Path(__file__).resolve().parent.parent


def kinds_of_lines(text: str) -> Counter[str]:
    """How many lines are code, comment, docstring or blank."""
    tree, lines = ast.parse(text), text.splitlines()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#")
    }

    def kind(number: int, line: str) -> str:
        if number in docstrings:
            return "docstring"
        return "comment" if number in comments else "code" if line.strip() else "blank"

    return Counter(kind(number, line) for number, line in enumerate(lines, start=1))


def functions_of(text: str) -> list[tuple[int, int]]:
    """(lines, parameters) of each function."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    arguments = [(*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs) for f in found]
    names = [[a for a in each if a.arg not in ("self", "cls")] for each in arguments]
    return [(f.end_lineno - f.lineno + 1, len(given)) for f, given in zip(found, names, strict=True)]


def room_of(path: Path, source: Path) -> str:
    parts = path.relative_to(source).parts[:-1]
    return "/".join(parts) or "(top level)"


def spread(numbers: list[int]) -> str:
    return f"{median(numbers):g} / {numbers[len(numbers) * 9 // 10]} / {numbers[-1]}"


def main(root: Path) -> None:
    source = root / "src" / "megatron_vlm"
    texts = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
    rooms: dict[str, Counter] = {}
    for path, text in texts.items():
        counts = rooms.setdefault(room_of(path, source), Counter())
        counts += kinds_of_lines(text)
        counts["files"] += path.name != "__init__.py"
    kinds = ("files", "code", "comment", "docstring", "blank")
    rooms["all"] = sum(rooms.values(), Counter())
    rows = [
        (name, counts.total() - counts["files"], *map(counts.get, kinds)) for name, counts in rooms.items()
    ]
    print(markdown(("folder", "lines", *kinds), rows), "\n")
    functions = sorted(sum(map(functions_of, texts.values()), []))
    lengths, parameters = (sorted(column) for column in zip(*functions, strict=True))
    longest = max(texts, key=lambda path: len(texts[path].splitlines()))
    train = source / "training" / "loop.py"
    facts = {
        "functions": len(functions),
        "lines of a function: median / 90 % / most": spread(lengths),
        "parameters: median / 90 % / most": spread(parameters),
        "files of over 300 lines": sum(len(text.splitlines()) > 300 for text in texts.values()),
        "longest file": f"{longest.relative_to(source)}, {len(texts[longest].splitlines())} lines",
        "most files in a folder": max(n["files"] for name, n in rooms.items() if name != "all"),
        "lines of training/loop.py": len(texts[train].splitlines()),
        "lines of its longest function": max(functions_of(texts[train]))[0],
    }
    print(markdown(("measure", "value"), facts.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
