"""docs/design/architecture.md names every file that changes Megatron, torch or Energon from outside."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from places import ROOT

from rooms import modules

SOURCE = ROOT / "src" / "megatron_vlm"
PAGE = ROOT / "docs" / "design" / "architecture.md"
OURS = {"megatron_vlm", *sys.stdlib_module_names} - {"multiprocessing"}


def bound(tree: ast.Module) -> set[str]:
    """The names in a file that stand for something of another package, or for an attribute of it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            others = [alias for alias in node.names if alias.name.split(".")[0] not in OURS]
            names |= {alias.asname or alias.name.split(".")[0] for alias in others}
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] not in OURS:
            names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        for target, value in assigned(node):
            if isinstance(target, ast.Name) and is_of(value, names):
                names.add(target.id)
    return names


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Each target of an assignment with its value."""
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        values = node.value.elts if isinstance(node.value, ast.Tuple) else None
        if isinstance(target, ast.Tuple) and values and len(values) == len(target.elts):
            yield from zip(target.elts, values, strict=True)
        else:
            yield target, node.value


def is_of(node: ast.expr | None, names: set[str]) -> bool:
    """Whether this is a chain of attributes that begins at one of the names, or an imported module."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "importlib.import_module" and "megatron_vlm" not in ast.unparse(node)
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def changes(code: str) -> list[str]:
    """The places where a file sets an attribute of another package, or the class of an object."""
    tree = ast.parse(code)
    names, places = bound(tree), []
    for node in ast.walk(tree):
        for target, _ in assigned(node):
            if isinstance(target, ast.Attribute) and (
                target.attr == "__class__" or is_of(target.value, names)
            ):
                places.append(ast.unparse(target))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and is_of(node.args[0], names):
            places.append(ast.unparse(node))
    return places


def test_the_page_names_every_file_that_changes_another_package():
    section = PAGE.read_text(encoding="utf-8").split("## Changes to other packages")[1].split("\n## ")[0]
    named = re.findall(r"^\| `([a-z_/]+)\.py` \|", section, re.MULTILINE)
    texts = {name.replace(".", "/"): path.read_text(encoding="utf-8") for name, path in modules().items()}
    assert sorted(named) == sorted(name for name, text in texts.items() if changes(text))


def test_changes_are_found():
    assert changes("import torch\ntorch.compile = None") == ["torch.compile"]
    assert changes("from megatron.core import a\nb = a.c\nb.d, e = 1, 2") == ["b.d"]
    assert changes("import torch\nsetattr(torch.cuda, 'x', 1)") == ["setattr(torch.cuda, 'x', 1)"]
    assert changes("part.__class__ = Other") == ["part.__class__"]
    assert changes("import sys\nsys.excepthook = print\nself.value = 1") == []


# ---- what Megatron calls deprecated ------------------------------------------------------------------------


def test_one_file_uses_gpt_model():
    files = [file for file in SOURCE.rglob("*.py") if "gpt_model import" in file.read_text(encoding="utf-8")]
    assert [file.name for file in files] == ["language_model.py"]


def test_hybrid_model_cannot_take_our_head_yet():
    """When it can, read docs/design/architecture.md, and move if nothing else is missing."""
    megatron = Path(next(iter(find_spec("megatron").submodule_search_locations)))
    tree = ast.parse((megatron / "core/models/hybrid/hybrid_model.py").read_text(encoding="utf-8"))
    [model] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "HybridModel"]
    [forward] = [node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    taken = {argument.arg for argument in forward.args.args + forward.args.kwonlyargs}
    assert "decoder_input" in taken and "output_processor" not in taken
