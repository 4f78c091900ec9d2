"""Imports at run time: objects of a user's Python file, and packages that may be missing."""

import contextlib
import importlib.util
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_vlm.config import ConfigError


def load_object(place: str, name: str) -> Any:
    """Run the file of `FILE.py:NAME`, and return what it calls NAME.

    Raises:
        ConfigError: Its text begins with `place` and says what is wrong: the name, the file, or its code.
    """
    path, _, attribute = name.rpartition(":")
    file = Path(path)
    if not (path.endswith(".py") and attribute.isidentifier()):
        raise ConfigError(f"{place} names no object of a Python file; give FILE.py:NAME.")
    if not file.is_file():
        raise ConfigError(f"{place}: {path} does not exist; give the path of a Python file.")
    # `job.errors` tells a user's code by the name of its module
    spec = importlib.util.spec_from_file_location(f"users_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    with calling(place, name):
        spec.loader.exec_module(module)
    return getattr(module, attribute, None)


@contextlib.contextmanager
def calling(place: str, name: str) -> Iterator[None]:
    """Raise ConfigError, with the line of the file, for whatever code of `FILE.py:NAME` raises.

    Our own errors stay as they are.
    """
    file = Path(name.rpartition(":")[0]).absolute()
    try:
        yield
    except (Exception, SystemExit) as error:
        if type(error).__module__.startswith("megatron_vlm."):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" in line {frame.lineno}" for frame in frames if Path(frame.filename) == file]
        line = lines[-1] if lines else ""
        raise ConfigError(f"{place}: {type(error).__name__}: {error}{line}; correct the file.") from error


def optional_package(name: str, needed_by: str) -> ModuleType:
    """Return a package that an extra of the same name installs. Raises ImportError that says so."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fact = f"{needed_by} needs the package {name} ({error})"
        raise ImportError(f"{fact}; run `pip install 'megatron-vlm[{name}]'`.") from error
