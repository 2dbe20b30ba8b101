"""
The places in the code that make something wait for a device, as its source has them, and the code without one of them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

ROOT = Path(__file__).parents[2]
PACKAGES = ("loading", "torch_ops")
CALLS = {"synchronize", "wait_stream", "wait_event", "record_stream", "set_stream"}  # torch's
CALLS |= {"wait_for_all", "wait_for_own"}  # those of ours that come to them
PINNED = "pin_memory"
"""A copy from memory that is not pinned is waited for at once."""

WAITS = {
    "device._StreamSender.__init__: wait_stream": "load_into",
    "device._StreamSender.buffer: pin_memory": "load, which",
    "device._StreamSender.wait: synchronize": "load, used",
    "device._StreamSender.finish: synchronize": "load, used",
    "threads.in_own_thread: set_stream": "load_into",
    "threads.wait_for_all: wait_for_all": "LiveModel in_place, an answer that",
    "threads.wait_for_own: wait_for_own": "LiveModel swap, called",
    "commit.overwrite: wait_for_all": "LiveModel in_place, an answer that",
    "commit.fill_in_place: wait_for_all": "LiveModel in_place, an answer of",
    "commit.fill_in_place: wait_for_all, 2": "LiveModel in_place, called after it",
    "commit.ready: wait_for_own": "LiveModel swap, called",
    "commit._let_go: wait_for_all": "LiveModel swap, an answer",
    "accelerators.Accelerator.on: set_stream": "load, used",
    "accelerators.Accelerator.on: set_stream, 2": "load, which",
    "accelerators.Accelerator.wait_for_all: synchronize": "LiveModel in_place, the only",
    "accelerators.Accelerator.wait_for_all: synchronize, 2": "LiveModel in_place, an answer that",
    "accelerators.Accelerator.wait_for_own: synchronize": "LiveModel swap, called",
    "accelerators.Accelerator.wait_for_own: wait_for_all": "LiveModel swap, without",
}
"""Each of the places, and how the cases begin of which one goes wrong without it."""


class Place(NamedTuple):
    """One call, or one argument: its module, the function around it, and how many others of the module come before."""

    path: Path
    function: tuple[str, ...]
    number: int


Wait: TypeAlias = tuple[tuple[str, ...], str, ast.expr]


def places() -> dict[str, Place]:
    """Return all of them, by module, function and call."""
    found: dict[str, Place] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / "ckptool" / package).rglob("*.py")):
            met: Counter[str] = Counter()
            for number, (function, call, _) in enumerate(_waits(ast.parse(path.read_text("utf-8")))):
                name = f"{path.stem}.{'.'.join(function)}: {call}"
                met[name] += 1
                found[name if met[name] == 1 else f"{name}, {met[name]}"] = Place(path, function, number)
    return found


@contextmanager
def without(place: Place) -> Iterator[None]:
    """Let the code do without one wait."""
    tree = ast.parse(place.path.read_text("utf-8"))
    _, _, node = list(_waits(tree))[place.number]
    tree = ast.fix_missing_locations(_Leaving(node).visit(tree))
    code = compile(tree, str(place.path), "exec", dont_inherit=True)
    inside: Any = importlib.import_module(".".join(place.path.relative_to(ROOT).with_suffix("").parts))
    for name in place.function:
        (code,) = (one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
        inside = getattr(inside, name)
    function: Any = inspect.unwrap(inside)
    kept, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = kept


def _waits(
    tree: ast.AST, outer: tuple[str, ...] = (), *, is_inside: bool = False
) -> Iterator[tuple[Any, str, ast.expr]]:
    """Yield the function, the name and the node of each, in the order of the source."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.keyword) and node.arg == PINNED:
            yield outer, PINNED, node.value
        elif isinstance(node, ast.Call) and (name := _name(node.func)) in CALLS:
            yield outer, name, node
        named = isinstance(node, ast.ClassDef | ast.FunctionDef) and not is_inside
        here = (*outer, node.name) if named else outer  # type: ignore[attr-defined]
        yield from _waits(node, here, is_inside=is_inside or isinstance(node, ast.FunctionDef))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _Leaving(ast.NodeTransformer):
    """Puts None in the place of one node."""

    def __init__(self, node: ast.expr) -> None:
        self.left_out = node

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(ast.Constant(None), node) if node is self.left_out else super().visit(node)
