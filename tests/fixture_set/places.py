"""
Keeps the folders of the machine that writes a fixture out of the fixture.

torch writes down where source lies: of the classes of a whole model in the old format, of each operation of a
TorchScript or exported program, and in the settings of the compiler. Here each place is told from where Python
looks for modules, as ``torch/nn/modules/linear.py``.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_QUOTED = re.compile(r'(?<=File ")[^"]+(?=")')


def relative(place: str) -> str:
    """Tell a place from the nearest folder in which Python looks for modules; by its last name outside them all."""
    if not Path(place).is_absolute():
        return place
    for folder in _folders(tuple(sys.path)):
        if place == folder or place.startswith(folder + os.sep):
            return os.path.relpath(place, folder).replace(os.sep, "/")
    return Path(place).name


@functools.cache
def _folders(entries: tuple[str, ...]) -> list[str]:
    folders = {str(form) for entry in map(Path, entries) for form in (entry.absolute(), entry.resolve())}
    return sorted(folders, key=len, reverse=True)


@contextmanager
def relative_places() -> Iterator[None]:
    """Let ``torch.save`` write relative places of classes, and models that are compiled here hold relative folders."""
    from torch._inductor import config

    find = torch.serialization.get_source_lines_and_file  # type: ignore[attr-defined]
    settings: dict[str, Any] = config.get_config_copy()
    folders = {name: relative(value) for name, value in settings.items() if isinstance(value, str)}

    def found(obj: Any, error_msg: str | None = None) -> tuple[list[str], int, str | None]:
        lines, number, place = find(obj, error_msg)
        return lines, number, place and relative(place)

    torch.serialization.get_source_lines_and_file = found  # type: ignore[attr-defined]
    try:
        with config.patch(folders):
            yield
    finally:
        torch.serialization.get_source_lines_and_file = find  # type: ignore[attr-defined]


@contextmanager
def relative_code() -> Iterator[None]:
    """
    Let all loaded code lie at relative places: a trace holds those of every function that is being called.

    torch asks the code objects themselves, below Python, so these are what has to change. Python's own import
    does this to code that was compiled elsewhere, and by the same function.
    """
    put = importlib.import_module("_imp")._fix_co_filename
    loaded = [(code, code.co_filename) for code in _loaded_code()]
    places = {place: relative(place) for _, place in loaded}
    try:
        for code, place in loaded:
            put(code, places[place])
        yield
    finally:
        for code, place in loaded:
            put(code, place)


def _loaded_code() -> Iterator[CodeType]:
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # what a process has set aside for good is not listed
    functions = [found for found in gc.get_objects() if type(found) is FunctionType]
    if frozen:
        gc.freeze()
    for function in functions:
        yield function.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def relative_program(program: torch.export.ExportedProgram) -> None:
    """Make the places of source relative that an exported program holds for each of its operations."""
    for node in program.graph.nodes:
        trace = node.meta.get("stack_trace")
        if trace is not None:
            node.meta["stack_trace"] = _QUOTED.sub(lambda place: relative(place.group()), trace)
