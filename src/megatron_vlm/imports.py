"""Imports at run time: objects that a user names, and packages that may be missing."""

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_vlm.config import ConfigError
from megatron_vlm.files import read_file
from megatron_vlm.messages import suggestion

PACKAGES = ("megatron-vlm", "torch", "megatron-core", "transformers", "megatron-energon")


def installed_versions() -> dict[str, str | None]:
    """Return the versions of PACKAGES, without importing them."""
    from importlib.metadata import PackageNotFoundError, version  # a tenth of what --help takes

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def is_users(name: str) -> bool:
    """Return whether a setting names an object of the user's, `FILE.py:NAME` or `package.module:NAME`."""
    return ":" in name


def load_object(place: str, name: str) -> Any:
    """Import the file or module of `FILE.py:NAME` or `package.module:NAME`, and return what it calls NAME.

    A file is run once in a process, and may import files beside it.

    Raises:
        ConfigError: Its text begins with `place` and says what is wrong: the name, the file, or its code.
    """
    path, _, attribute = name.rpartition(":")
    if not (path and attribute.isidentifier()):
        raise ConfigError(f"{place} names no object; give FILE.py:NAME or package.module:NAME.")
    if path.endswith(".py") and not Path(path).is_file():
        raise ConfigError(f"{place}: {path} does not exist; give the path of a Python file.")
    with calling(place, name):
        module = _module_of_file(Path(path).absolute()) if path.endswith(".py") else _importable(path)
    if not hasattr(module, attribute):
        defined_names = [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        raise ConfigError(f"{place}: {path} has no {attribute}{suggestion(attribute, defined_names)}")
    return getattr(module, attribute)


def load_function(place: str, name: str) -> Callable[..., Any]:
    """Return `load_object` of a name, which is a function or another callable. Raises ConfigError."""
    function = load_object(place, name)
    if not callable(function):
        raise ConfigError(f"{place} is a {type(function).__name__}; give the name of a function.")
    return function


def file_digest(name: str) -> str:
    """Return a digest of the file in `FILE.py:NAME`; of a module, nothing."""
    path = name.rpartition(":")[0]
    return sha256(read_file(path)).hexdigest() if path.endswith(".py") else ""


def _importable(module: str) -> ModuleType:
    _add_to_path(os.getcwd())  # an installed program does not look there
    return import_module(module)


def _add_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _module_of_file(file: Path) -> ModuleType:
    # `job.errors` tells a user's code by the name of its module, and states of callbacks have it in theirs
    name = f"users_{file.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ != str(file):
        name = f"{name}_{sha256(str(file).encode()).hexdigest()[:8]}"
        loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    _add_to_path(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def calling(place: str, name: str) -> Iterator[None]:
    """Raise ConfigError, with the line, for whatever the code of `load_object`'s `name` raises.

    Our own errors stay as they are.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if type(error).__module__.startswith("megatron_vlm."):
            raise
        raise ConfigError(f"{place}: {type(error).__name__}: {error}{_line(error, name)}.") from error


def _line(error: BaseException, name: str) -> str:
    """The last line of the user's file that an error passed, and what to do."""
    path = name.rpartition(":")[0]
    if path.endswith(".py"):
        file = str(Path(path).absolute())
    elif path in sys.modules:
        file = sys.modules[path].__file__
    else:
        return "; give a module that Python can import, or FILE.py:NAME"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{f' in line {frames[-1].lineno}' if frames else ''}; correct the file"


def optional_package(name: str, needed_by: str) -> ModuleType:
    """Return a package that an extra of the same name installs. Raises ImportError that says so."""
    try:
        return import_module(name)
    except ImportError as error:
        fact = f"{needed_by} needs the package {name} ({error})"
        raise ImportError(f"{fact}; run `pip install 'megatron-vlm[{name}]'`.") from error
