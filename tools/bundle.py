"""Make a folder that a machine without a network needs for this package, beside an image with torch.

python tools/bundle.py FOLDER [--have FILE]          wheels, what gpu_check reads, and run.sh; at most 60 MiB
python tools/bundle.py --rehearse FOLDER --torch DIR [--have FILE] [--out RESULTS] [ARGUMENTS OF gpu_check]

FILE lists the packages that the machine has, as `pip list --format=freeze` does; tools/gpu_image.txt is one.
The wheels are of the versions of requirements.lock and, for the extra `gpu`, of requirements-gpu.lock, with
their hashes. There,

    sh FOLDER/run.sh --out results

installs them with `pip --target` into FOLDER/site and starts tools/gpu_check. A rehearsal does that here, in
a new folder, without CUDA, with a Python that sees nothing but the bundle, the packages of FILE, and DIR, the
torch of the image with what it needs: `make test-oldest` makes .venv/torch-2.11. reports/bundle.json has what
the last bundle held, and what its rehearsal showed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCK, IMAGE, REPORT = ROOT / "requirements.lock", ROOT / "tools/gpu_image.txt", ROOT / "reports/bundle.json"
GPU_LOCK = ROOT / "requirements-gpu.lock"  # what the extra `gpu` brings; it is not installed here
PACKAGE = "megatron-vlm"
MOST_BYTES = 60 * 2**20
# Object stores of Energon, which imports them where a path names one
LEFT_OUT = {"s3fs", "aiobotocore", "botocore"}
# What gpu_check reads besides the package
CHECK = ("tiny", "tests/helpers", "tools/gpu_check", "examples/digits", "docs/reference/gpu.md")
RUN = """#!/bin/sh
# sh run.sh [ARGUMENTS OF gpu_check]: installs the wheels beside this file, once, and starts the check
here=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
[ -e "$here/site" ] || "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$here/site" \\
    "$here"/wheels/*.whl || exit
PYTHONPATH="$here/site${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" "$here/check/tools/gpu_check" "$@"
"""


def named(name: str) -> str:
    """The name as the lock and metadata spell it, in one way."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names_in(file: Path) -> set[str]:
    """The packages of a list: names, or lines of `pip list --format=freeze`."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return {named(word.split("==")[0]) for line in lines for word in line.split()}


def locked(lock: Path = LOCK) -> dict[str, str]:
    """Name -> its entry in the lock, with its version and hashes."""
    entries = re.split(r"\n(?=\S)", lock.read_text().strip())
    return {named(entry.split("==")[0]): entry for entry in entries}


def missing(have: set[str]) -> list[str]:
    """What the package with its extra `gpu` needs, directly or not, of what a machine with these packages
    lacks."""
    found = set(locked(GPU_LOCK)) - have
    left = [PACKAGE]
    while left:
        for need in needs(left.pop()):
            if need not in have | LEFT_OUT | found:
                found.add(need)
                left.append(need)
    return sorted(found)


def needs(name: str, extra: str = "") -> Iterator[str]:
    """What an installed package requires here, with one extra or without."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield named(requirement.name)


def build(folder: Path, have: set[str]) -> dict[str, int]:
    """Makes the bundle; file -> bytes. Raises ValueError if it is larger than 60 MiB."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    entries = locked() | locked(GPU_LOCK)
    with tempfile.TemporaryDirectory() as made:
        wanted = Path(made, "wanted.txt")
        wanted.write_text("\n".join(entries[name] for name in missing(have)) + "\n")
        pip("wheel", "--no-deps", "--require-hashes", "--wheel-dir", wheels, "--requirement", wanted)
        sources = Path(made, "sources")  # where setuptools leaves what it makes
        shutil.copytree(
            ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, sources)
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, sources)
    for name in CHECK:
        copy(ROOT / name, folder / "check" / name)
    (folder / "run.sh").write_text(RUN)
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files_in(folder)}
    check_size(sizes)
    return sizes


def check_size(sizes: dict[str, int]) -> None:
    """Raises ValueError for files that are larger than what can be carried."""
    if (total := sum(sizes.values())) > MOST_BYTES:
        largest = ", ".join(sorted(sizes, key=sizes.get)[-3:])
        raise ValueError(f"the bundle has {total:,} bytes, over {MOST_BYTES:,}; the largest files: {largest}")


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "--quiet", "--disable-pip-version-check"]
    subprocess.run(command, check=True)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        shutil.copy(source, target)


def files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def report(sizes: dict[str, int]) -> dict:
    wheels = [{"wheel": Path(n).name, "bytes": size} for n, size in sizes.items() if n.startswith("wheels/")]
    total = sum(sizes.values())
    return {"date": datetime.date.today().isoformat(), "bytes": total, "wheels": wheels}


# --- a rehearsal ------------------------------------------------------------------------------------------


def rehearse(bundle: Path, torch: Path, have: set[str], arguments: list[str]) -> int:
    """Installs the bundle in a new folder and runs its check there; its exit code."""
    with tempfile.TemporaryDirectory(prefix="bundle_") as made:
        image, here = Path(made, "image"), Path(made, "bundle")
        link_packages(image, have)
        shutil.copytree(bundle, here, ignore=shutil.ignore_patterns("site"))
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": made,
            "PYTHON": sys._base_executable,  # not the virtual environment's
            "PYTHONPATH": f"{torch.resolve()}:{image}",
            "PYTHONNOUSERSITE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        command = ["sh", str(here / "run.sh"), *arguments]
        return subprocess.run(command, env=environment).returncode


def rehearsed(found: dict, arguments: list[str]) -> dict:
    """What reports/bundle.json keeps of a check's table: the number of values by part, and wrong ones."""
    about, rows = found["about"], found["rows"]
    return {
        **{name: about[name] for name in ("date", "python", "torch", "transformers")},
        "arguments": arguments,
        "parts": Counter(row["part"] for row in rows),
        "wrong": [row for row in rows if row["verdict"] == "WRONG"],
    }


def link_packages(folder: Path, names: set[str]) -> None:
    """A folder with those packages of this environment that are in `names`, and no others."""
    folder.mkdir()
    for package in importlib.metadata.distributions():
        if named(package.metadata["Name"]) not in names:
            continue
        for file in package.files or ():
            if ".." not in file.parts:
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    target.symlink_to(Path(package.locate_file(file)).resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--have", type=Path, default=IMAGE)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--torch", type=Path, help="a folder with the image's torch, for a rehearsal")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check"), help="the check's table, for a rehearsal"
    )
    arguments, rest = parser.parse_known_args()
    have = names_in(arguments.have)
    if arguments.rehearse:
        code = rehearse(arguments.folder, arguments.torch, have, [f"--out={arguments.out}", *rest])
        table = json.loads((arguments.out / "gpu_check.json").read_text())
        found = json.loads(REPORT.read_text()) | {"rehearsal": rehearsed(table, rest)}
    else:
        code = 0
        found = report(build(arguments.folder, have))
        print(f"{arguments.folder}: {len(found['wheels'])} wheels, {found['bytes'] / 2**20:.1f} MiB")
    REPORT.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
