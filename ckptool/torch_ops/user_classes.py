"""The class that the *user* names: of a module that is installed or in the current folder, or of a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, invalidate_caches
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple

_TURN = RLock()  # sys.path and sys.modules are every thread's
_IMPORTED: dict[str, dict[str, ModuleType]] = {}
"""The modules that were imported from a folder which is not on Python's path, by that folder."""


class _Place(NamedTuple):
    folder: str
    """What has to be in front of Python's path."""
    module: str
    name: str
    is_file: bool = False


@contextmanager
def user_class(spec: str) -> Iterator[Any]:
    """
    Give a block the class of ``package.module:Class`` or ``path/to/file.py:Class``.

    The current folder, or the file's (its package's), is in front of Python's path in the block, so modules beside it
    are found. After the block, what was imported from there is set aside: another folder may have the same names.

    Raises:
        Exception: There is no such module, file or class; or whatever the module raises while it is imported.
    """
    place = _place(spec)
    with _TURN, _in_front(place):
        found: Any = import_module(place.module)
        for part in place.name.split("."):
            found = getattr(found, part)
        yield found


def _place(spec: str) -> _Place:
    where, colon, name = spec.rpartition(":")
    if not (where and colon and name):
        raise ValueError("it names no class after a ':'")
    if not where.endswith(".py"):
        return _Place(os.getcwd(), where, name)
    path = os.path.abspath(os.path.expanduser(where))
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {where!r}")
    folder, last = os.path.split(path.removesuffix(".py"))
    parts = [] if last == "__init__" else [last]
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    return _Place(folder, ".".join(parts), name, is_file=True)


@contextmanager
def _in_front(place: _Place) -> Iterator[None]:
    """Let a block import from a folder before all others."""
    on_path = {os.path.abspath(entry) for entry in sys.path}
    is_new, known = place.folder not in on_path, set(sys.modules)
    mine = _IMPORTED.setdefault(place.folder, {})
    hidden = _modules_of_another_file(place) | {name: sys.modules[name] for name in mine if name in sys.modules}
    for name in hidden:
        del sys.modules[name]
    sys.path.insert(0, place.folder)
    sys.modules.update(mine)
    invalidate_caches()  # the file may be newer than what Python knows of the folder
    try:
        yield
    finally:
        with suppress(ValueError):  # a module may have taken it away itself
            sys.path.remove(place.folder)
        fresh = [name for name in sys.modules if name not in known or name in hidden]
        for name in fresh if is_new else ():
            if _is_from(sys.modules.get(name.partition(".")[0]), place.folder):
                mine[name] = sys.modules[name]
        for name in mine:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def _modules_of_another_file(place: _Place) -> dict[str, ModuleType]:
    """
    Return the modules that stand where those of a folder are to be: a ``model`` that came from another.

    Raises:
        ImportError: A file has the name of a module that is installed, or Python's own: others may need that.
    """
    files = os.listdir(place.folder)
    packages = [name for name in files if os.path.isfile(os.path.join(place.folder, name, "__init__.py"))]
    tops = {*packages, *(name.removesuffix(".py") for name in files if name.endswith(".py"))} & sys.modules.keys()
    hiding = {top for top in tops if not _is_from(sys.modules[top], place.folder)}
    kept = {top for top in hiding if _is_installed(sys.modules[top])}
    top = place.module.partition(".")[0]
    if place.is_file and top in kept:
        raise ImportError(f"{getattr(sys.modules[top], '__file__', 'Python')} is called {top!r}, too: rename one")
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in hiding - kept}


def _is_installed(module: ModuleType) -> bool:
    """Say whether a module is Python's own, or this package's, or lies where packages are installed."""
    if module.__name__.partition(".")[0] in (*sys.stdlib_module_names, "__main__", __name__.partition(".")[0]):
        return True
    prefixes = tuple(os.path.realpath(prefix) + os.sep for prefix in {sys.prefix, sys.base_prefix})
    return any(os.path.realpath(place).startswith(prefixes) for place in _places(module))


def _is_from(module: ModuleType | None, folder: str) -> bool:
    """Say whether a module, or package, lies directly in a folder."""
    homes = {os.path.dirname(place) for place in _places(module)}
    return folder in homes or os.path.realpath(folder) in {os.path.realpath(home) for home in homes}


def _places(module: ModuleType | None) -> list[str]:
    """Return the file of a module, the folders of a package."""
    packages = [entry for entry in getattr(module, "__path__", ()) or () if isinstance(entry, str)]
    return packages or [file for file in [getattr(module, "__file__", None)] if file]
