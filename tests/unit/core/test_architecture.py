"""The rooms of docs/design/rooms.toml hold, and nothing becomes too large."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

import check_house
import rooms
from rooms import SOURCE, modules, uses

MOST_LINES_OF_A_FUNCTION = 50
# Figures of `tools/check_house.py`: each may only fall. Lower it with what was won.
HOUSE = {
    "lines of rl that train imports": 0,
    "signatures with hf_config": 21,
    "signatures with family and hf_config": 0,
    "files of data that name a kind of image": 1,
    "calls of build_model": 2,
    "calls of import_hf": 1,
    "forward steps": 1,
    "class names with several meanings": 0,
    "calls that unpack a local tuple": 18,
    "parallel tuple assignments": 306,
}
ROOMS = rooms.read()  # from the ground up
# at module level, and with them what they import; each line after what the lines above it imported
WITHOUT = {
    "torch": [
        *("cli", "config", "commands.arguments", "recipes", "validate", "checks"),
        *("run_folder", "supported"),
    ],
    "megatron.core": ["data.run_data", "data.load.hf", "data.load.energon", "data.prepare"],
    # torch's compiler, which Megatron imports unless `parallel.cpu` is there first: half of a process's start
    "torch._inductor.compile_fx": ["training.loop", "commands.runs", "commands.verify"],
}
# files of `tests/unit` of which one test, of `make test-long` or `make test-soak`, starts ranks or a command
ALSO_IN_PROCESSES = {"test_fast.py", "test_hub.py", "test_proposal.py", "test_videos.py"}


def test_rooms_are_what_the_file_says():
    """`python tools/rooms.py --write` mends this; what it writes is for a person to read."""
    code = {name: sorted(below) for name, below in rooms.used_by_code(ROOMS).items()}
    assert {name: about["uses"] for name, about in ROOMS.items()} == code
    assert [name for name, about in ROOMS.items() if not about["what"]] == []


def test_arrows_between_rooms_point_down():
    names = list(ROOMS)
    for position, (name, about) in enumerate(ROOMS.items()):
        assert not set(about["uses"]) - set(names[:position]), f"{name} would use what stands above it"


def test_the_core_does_without_extras():
    """`cli` and `api` start their commands, and `callbacks.built_in` opens their callbacks by name."""
    named = {
        f"{name} -> {used}"
        for name in modules()
        for used in uses(name)
        if used.startswith("extras.") and name not in ("cli", "api") and not name.startswith("extras.")
    }
    assert named == set()


def test_no_file_uses_itself_by_a_way_round():
    reached: dict[str, set[str]] = {}
    for name in modules():
        seen, left = set(), [name]
        while left:
            for each in uses(left.pop()) - seen:
                seen.add(each)
                left.append(each)
        reached[name] = seen
    assert [name for name, seen in reached.items() if name in seen] == []


@pytest.mark.long
def test_what_is_light_imports_nothing_heavy():
    """In one process, from the lightest to the heaviest."""
    code = "import sys, importlib\n" + "\n".join(
        f"importlib.import_module('megatron_vlm.{name}')\n"
        f"assert {heavy!r} not in sys.modules, '{name} imports {heavy}'"
        for heavy, names in WITHOUT.items()
        for name in names
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_test_imports_a_test():
    files = SOURCE.parent.parent.joinpath("tests").rglob("*.py")
    assert [file for file in files if re.search(r"^ *(?:from|import) test_", file.read_text(), re.M)] == []


def test_unit_tests_start_no_ranks_and_no_commands():
    starts = re.compile(r"\b(run_distributed|run_program|run_anew|start_ranks|Popen)\(")
    files = SOURCE.parent.parent.joinpath("tests/unit").rglob("test_*.py")
    assert {file.name for file in files if starts.search(file.read_text())} == ALSO_IN_PROCESSES


def test_no_function_is_long():
    """By lines of code: docstrings, comments and blank lines are free."""
    long = {}
    for name, path in modules().items():
        text = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(text))):
            if isinstance(node, ast.FunctionDef):
                begin = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
                lines = map(str.strip, text[begin - 1 : node.end_lineno])
                code = [line for line in lines if line and not line.startswith("#")]
                if len(code) > MOST_LINES_OF_A_FUNCTION:
                    long[f"{name}.{node.name}"] = len(code)
    assert long == {}


def test_no_figure_of_the_house_rises():
    counted = check_house.figures()
    assert {name: counted[name] for name in HOUSE if counted[name] > HOUSE[name]} == {}


def test_the_core_path_goes_from_train_to_gradients():
    """The guard of its figure: what is left out is there, and what a step cannot do without is in."""
    core = check_house.core_path()
    needed = {"feed", "batch", "data.encode.encoder", "models.vlm", "models.weights.rules", "training.step"}
    assert needed <= core
    unknown = [
        name
        for name in {*check_house.LEFT_OUT, *check_house.READ}
        if not SOURCE.joinpath(*name.split(".")).exists() and name not in modules()
    ]
    assert unknown == []


def test_every_letter_of_a_shape_is_in_the_legend():
    """A suffix of capitals is a shape, but for A and B of low-rank adapters and the ends of UTF-16."""
    legend = modules()["batch"].read_text().split("Shape legend")[1].split('"""')[0]
    explained = set(re.findall(r"\b([A-Z])\b", legend))
    unknown = {
        f"{name}: {found[0]}"
        for name, path in modules().items()
        for found in re.finditer(r"\b[a-z0-9_]+_([A-Z]{1,4})\b", path.read_text())
        if not set(found[1]) <= explained and not found[0].endswith(("_A", "_BE", "_LE"))
    }
    assert unknown == set()
