"""Every setting that a message of the package names is one."""

import ast
import re
from pathlib import Path

import megatron_vlm
from megatron_vlm.config import RunConfig, all_settings

SETTINGS = {*all_settings(RunConfig())}
GROUPS = {key.split(".")[0] for key in SETTINGS if "." in key}
NAMED = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(GROUPS))})\.[a-z_]\w*)(?![\w/])")
FILES = {"data.mdb", "data.jsonl", "model.safetensors"}  # names of files that look alike
# folders whose texts name weights, model.layers and the like
OF_WEIGHTS = ("families", "family_parts", "weights", "compose")


def texts_of(source: str) -> list[tuple[int, str]]:
    """Line and text of every string but the docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def test_settings_named_in_messages_exist():
    root, named, wrong = Path(megatron_vlm.__file__).parent, set(), []
    for path in sorted(path for path in root.rglob("*.py") if path.parent.name not in OF_WEIGHTS):
        for line, text in texts_of(path.read_text()):
            found = {name for name in NAMED.findall(text)} - FILES
            named |= found
            wrong += [f"{path.relative_to(root)}:{line} {name}" for name in sorted(found - SETTINGS)]
    assert not wrong
    assert len(named) > 20 and "data.media_dir" in named  # the messages were read
