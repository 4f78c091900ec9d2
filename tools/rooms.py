"""The rooms of the package, and which of them each room uses: docs/design/rooms.toml against the code.

python tools/rooms.py            print the arrows that the file lacks, and those that the code no longer has
python tools/rooms.py --write    write them into the file; read the diff, for an arrow may only point down

A room that the file does not name yet gets an empty description and stands after the last room that it uses.
A room without files goes. The order of the other rooms is left as it is.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "megatron_vlm"
FILE = ROOT / "docs" / "design" / "rooms.toml"
HEAD = """\
# The rooms of src/megatron_vlm, from the ground up. A room uses only rooms that stand before it.
# `python tools/rooms.py --write` takes `uses` from the imports of the code, and
# tests/unit/core/test_architecture.py compares them. A room is a folder or a file, one level deeper in data/,
# models/ and extras/; `files` names the files of a room that has no folder of its own.
"""
DEEP = ("data", "models", "extras")  # folders of rooms
Rooms = dict[str, dict]  # name -> what, uses, files


def read() -> Rooms:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def text(rooms: Rooms) -> str:
    """The file that holds these rooms; one use a line, so that two changes seldom touch the same line."""
    return "\n".join([HEAD, *(_section(name, room) for name, room in rooms.items())])


def _section(name: str, room: dict) -> str:
    what = textwrap.fill(room["what"].strip(), 106, break_long_words=False, break_on_hyphens=False)
    lines = [f'["{name}"]', f'what = """\n{what}"""']
    if room.get("files"):
        lines.append(f"files = {_list(room['files'])}")
    lines.append(f"uses = {_list(room['uses'])}")
    return "\n".join(lines) + "\n"


def _list(names: list[str]) -> str:
    return "[" + "".join(f'\n    "{name}",' for name in names) + ("\n]" if names else "]")


@cache
def modules() -> dict[str, Path]:
    """Every file of the package by its dotted name inside the package."""
    by_name = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return by_name


@cache
def uses(name: str) -> frozenset[str]:
    """The modules of the package that one names in an import, wherever in the file."""
    imported = set()
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_vlm"):
            base = node.module.removeprefix("megatron_vlm").removeprefix(".")
            for alias in node.names:
                deeper = f"{base}.{alias.name}" if base else alias.name
                imported.add(deeper if deeper in modules() else base)
    return frozenset(each for each in imported if each) - {name}


def room_of(name: str, rooms: Rooms) -> str:
    """The room of a module; "" or the folder for the `__init__` of the package and of `DEEP`."""
    for room, about in rooms.items():
        if name in about.get("files", ()):
            return room
    first, *rest = name.split(".")
    return ".".join([first, *rest[:1]]) if first in DEEP else first


def used_by_code(rooms: Rooms) -> dict[str, set[str]]:
    """For every room of the code, the rooms that its files import."""
    used: dict[str, set[str]] = {}
    for name in modules():
        room = room_of(name, rooms)
        if room not in ("", *DEEP):
            used.setdefault(room, set()).update(room_of(each, rooms) for each in uses(name))
    return {room: below - {room} for room, below in used.items()}


def updated(rooms: Rooms) -> Rooms:
    """The rooms with what the code has: new ones at the first place that can be right, empty ones gone."""
    used = used_by_code(rooms)
    names = [name for name in rooms if name in used]
    for name in [name for name in used if name not in rooms]:
        after = [position for position, other in enumerate(names, start=1) if other in used[name]]
        names.insert(max(after, default=0), name)
    new = {name: {"what": "", **rooms.get(name, {}), "uses": sorted(used[name])} for name in names}
    for about in new.values():
        about["files"] = [file for file in about.get("files", ()) if file in modules()]
    return new


def main() -> None:
    rooms = read()
    new = updated(rooms)
    if "--write" in sys.argv:
        FILE.write_text(text(new), encoding="utf-8")
        return
    for name in sorted({*rooms, *new}):
        listed, used = (set(table.get(name, {}).get("uses", ())) for table in (rooms, new))
        for sign, others in (("+", used - listed), ("-", listed - used)):
            print(*(f"{sign} {name} uses {other}\n" for other in sorted(others)), sep="", end="")


if __name__ == "__main__":
    main()
