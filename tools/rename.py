"""Rename functions, classes, methods, variables and modules everywhere, by the table in tools/renames.toml.

    pip install rope
    python tools/rename.py

A row of the table is `"path" = "new_name"` for a module, and `"path:name"`, `"path:Class.method"` or
`"path:function.local"` for a name in it; paths begin below src/megatron_vlm. Rows whose old name is not there
any more are passed over: a branch that began before the renames runs the tool once, and then merges.
References in src, tests, tools and examples follow, imports and keyword arguments included. Texts do not, and
neither do the few files whose syntax rope cannot follow: lines that have the old word are printed for these
and for the pages.
"""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

from rope.base.project import Project
from rope.refactor import patchedast
from rope.refactor.rename import Rename

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/megatron_vlm")


def main() -> None:
    table = tomllib.loads((ROOT / "tools/renames.toml").read_text())
    ignored = [".venv", ".git", "build", "*.egg-info"]
    project = Project(str(ROOT), ropefolder=None, ignored_resources=ignored, source_folders=["src"])
    unreadable = [file for file in project.get_python_files() if not can_follow(Path(file.real_path))]
    for place, new_name in table.items():
        path, _, name = place.partition(":")
        file = PACKAGE / path
        offset = find_definition(ROOT / file, name) if name else None
        if not (ROOT / file).exists() or name and offset is None:
            print(f"{place}: not there (any more)")
            continue
        files = [each for each in project.get_python_files() if each not in unreadable]
        changes = Rename(project, project.get_resource(str(file)), offset).get_changes(
            new_name, resources=files
        )
        project.do(changes)
        print(f"{place} -> {new_name}: {len(changes.changes)} files")
        if "." not in name:
            print_mentions(name or file.stem, [file.path for file in unreadable])
    project.close()


def can_follow(file: Path) -> bool:
    """Return whether rope finds every token of a file again; it does not know all of Python 3.12."""
    text = file.read_text(encoding="utf-8")
    try:
        patchedast.patch_ast(ast.parse(text), text)
    except (AttributeError, patchedast.MismatchedTokenError):
        return False
    return True


def find_definition(file: Path, name: str) -> int | None:
    """Return the offset of a name in the text of its file: `name`, `Class.method` or `function.local`."""
    if not file.exists():
        return None
    text = file.read_text(encoding="utf-8")
    node = ast.parse(text)
    for part in name.split("."):
        node = next((child for child in ast.walk(node) if part in names_bound(child)), None)
        if node is None:
            return None
    # the name stands in this line or, under decorators, below it; columns are counted in bytes
    lines = text.splitlines(keepends=True)
    column = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
    start = sum(map(len, lines[: node.lineno - 1])) + column
    return start + re.search(rf"\b{re.escape(part)}\b", text[start:]).start()


def names_bound(node: ast.AST) -> list[str]:
    """Return the name of a definition, a parameter or an assigned variable, if the node is one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def print_mentions(word: str, files: list[str]) -> None:
    """Print where the pages have the old word as a name of code, and where some files have it at all."""
    pages = ["README.md", "AGENTS.md", "CONTRIBUTING.md", "docs"]
    for pattern, paths in ((rf"`[^`]*\b{word}\b[^`]*`", pages), (rf"\b{word}\b", files)):
        command = ["git", "grep", "-nE", pattern, "--", *paths]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        print(lines, end="")


if __name__ == "__main__":
    main()
