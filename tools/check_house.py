"""Figures of the house, counted in the code: python tools/check_house.py

tests/unit/core/test_architecture.py holds them: a figure may only fall.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache

from rooms import modules, uses

KINDS_OF_IMAGES = re.compile(
    r"is_naflex|is_anyres|InternVL|LLaVA|LFM2|Pixtral|Qwen(?!.vl.utils)|GLM|Gemma", re.IGNORECASE
)
OWN_PLACES = (
    "data.image_processors",
    "extras.grounding.convention",
)  # where families' ways stand under their names
NEXT_STREAM = re.compile(r"next\((?:streams|data_iterator)\)")
# What one need not read to understand a run, and why.
LEFT_OUT = {
    "models.families": "one family is an example of all",
    "models.family_parts": "what several families share; those of the example are read",
    "models.adapters": "a run without adapters does not enter it",
    "adapter_settings": "as models.adapters",
    "models.weights": "the rules and the import are read; the rest is files, shards and the way back",
    "models.layers": "attention and rotary are read; the others are kernels, experts and delta nets",
    "models.costs": "what parts of a model cost: plans, balance of a pipeline, figures",
    "data.image_processors": "one image processor is an example of all",
    "data.load.energon": "a second loader behind the same interface, with energon_state and energon_safety",
    "data.records.hub": "one of several sources",
    "data.records.opening": "mixtures of sources, with blends and streams",
    "data.records.blends": "as data.records.opening",
    "data.records.streams": "as data.records.opening",
    "data.media.videos": "one of two media",
    "data.on_disk": "how files of rows are opened",
    "data.preferences": "a second objective",
    "rl": "a second objective",
    "generation": "as scoring",
    "data.encode.questions": "as scoring",
    "job": "how a run ends, not what it does",
    "callbacks.exports": "what a run writes besides its checkpoints",
    "run_folder": "names and locks of files",
    "extras": "scores of answers and pages of a run, without which it trains as well",
    "files": "how files are opened and written whole, not what is in them",
    "stores": "as files",
    "inputs": "what was being read at an error, and what a file is that a library refused",
    "messages": "how what others wrote is printed, and what was being read at an error",
    "supported": "what config.json must say so that a checkpoint can be trained",
    "weight_files": "which safetensors a checkpoint has, and whether they can be read",
    "training.figures": "what a run says of itself, with profile",
    "callbacks.profiler": "as training.figures",
    "parallel.cpu": "Megatron on a machine without a GPU",
}
# Read although their rooms are left out, or because they are imported by names that a run makes.
READ = {
    "models.families.gemma3",
    "models.family_parts.llama",
    "models.weights.rules",
    "models.weights.importing",
    "models.layers.attention",
    "models.layers.attention_plan",
    "models.layers.attention_sizes",
    "models.layers.fused",
    "data.image_processors.base",
    "data.load.hf",
}


# Imported by names that a table holds, whatever is read of them.
BY_NAME = "data.image_processors."


@cache
def text(name: str) -> str:
    return modules()[name].read_text(encoding="utf-8")


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(text(name))


def nodes(kind: type | tuple[type, ...]) -> Iterator[ast.AST]:
    return (node for name in modules() for node in ast.walk(tree(name)) if isinstance(node, kind))


def lines(names: set[str]) -> int:
    return sum(len(text(name).splitlines()) for name in names)


def closure(*starts: str, enters: Callable[[str], bool] = lambda name: True) -> set[str]:
    """The modules that these import, what those import, and so on."""
    seen: set[str] = set()
    left = set(starts)
    while left:
        name = left.pop()
        seen.add(name)
        left |= {each for each in uses(name) if each not in seen and enters(each)}
    return seen


def core_path() -> set[str]:
    """What one reads to understand a run: the imports of `train` without LEFT_OUT, and READ."""

    def is_read(name: str) -> bool:
        return name in READ or not name.startswith(tuple(LEFT_OUT))

    return closure("training.loop", *READ, enters=is_read)


def names_with_two_meanings() -> dict[str, list[str]]:
    """Public classes of one name in several files."""
    files: dict[str, list[str]] = {}
    for name in modules():
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(name)
    return {name: places for name, places in files.items() if len(places) > 1}


def calls(name: str) -> int:
    return sum(len(re.findall(rf"(?<!def )\b{name}\(", text(module))) for module in modules())


def arguments(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in function.args.args + function.args.kwonlyargs}


def unpacking_calls(name: str) -> list[ast.Call]:
    """The calls of a module that unpack a local name or a tuple among their arguments.

    Not counted: a function that hands on its own `*args`, and `zip(*rows)`, which turns rows into columns.
    """
    functions = [node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef)]
    own = {"args", *(function.args.vararg.arg for function in functions if function.args.vararg)}

    def unpacks(call: ast.Call) -> bool:
        values = [argument.value for argument in call.args if isinstance(argument, ast.Starred)]
        names = [value for value in values if isinstance(value, ast.Name) and value.id not in own]
        return bool(names) or any(isinstance(value, ast.Tuple) for value in values)

    calls = [node for node in ast.walk(tree(name)) if isinstance(node, ast.Call) and unpacks(node)]
    return [call for call in calls if not (isinstance(call.func, ast.Name) and call.func.id == "zip")]


def parallel(assignment: ast.Assign) -> bool:
    """Whether one statement assigns a tuple that is written out to several names."""
    return isinstance(assignment.value, ast.Tuple) and isinstance(assignment.targets[0], ast.Tuple)


def figures() -> dict[str, int]:
    by_name = [name for name in modules() if name.startswith(BY_NAME)]
    signatures = [arguments(function) for function in nodes(ast.FunctionDef)]
    data = [name for name in modules() if name.startswith("data.") and not name.startswith(OWN_PLACES)]
    imports = nodes((ast.Import, ast.ImportFrom))
    return {
        "lines of src": lines(set(modules())),
        "files of src": len(modules()),
        "lines of imports": sum(node.end_lineno - node.lineno + 1 for node in imports),
        "lines of the core path": lines(core_path()),
        "lines that train imports": lines(closure("training.loop", *by_name)),
        "lines of rl that train imports": lines({n for n in closure("training.loop") if n.startswith("rl.")}),
        "lines that rl.policy imports": lines(closure("rl.policy", *by_name)),
        "signatures with hf_config": sum("hf_config" in names for names in signatures),
        "signatures with family and hf_config": sum({"family", "hf_config"} <= names for names in signatures),
        "files of data that name a kind of image": sum(bool(KINDS_OF_IMAGES.search(text(n))) for n in data),
        "calls of build_model": calls("build_model"),
        "calls of import_hf": calls("import_hf"),
        "forward steps": sum(len(NEXT_STREAM.findall(text(name))) for name in modules()),
        "class names with several meanings": len(names_with_two_meanings()),
        "calls that unpack a local tuple": sum(len(unpacking_calls(name)) for name in modules()),
        "parallel tuple assignments": sum(parallel(node) for node in nodes(ast.Assign)),
    }


if __name__ == "__main__":
    for figure, value in figures().items():
        print(f"{value:6,}  {figure}")
    for name, places in names_with_two_meanings().items():
        print(f"        {name}: {', '.join(places)}")
