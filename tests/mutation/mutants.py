"""The bounds checks in a module's source, and each of them made wrong in one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_SHIFTS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq, ast.Lt, ast.Gt),
}
"""Each comparison moved by one, and turned round."""

_QUANTITY = re.compile(
    r"nbytes|numel|n(dim|umbers?)$|_n$|count|len|siz|shape|stri?de|step|offset|pos(ition)?$|begin|start|stop|end$|at$"
    r"|limit|left|behind|gap|most|max|members|index|total|done|whole|span|room|depth|following|value|wide|short"
)
"""Names of what is counted: sizes, offsets, lengths. Only between these is an equality a bounds check."""


class Mutant(NamedTuple):
    """One wrong source of a module."""

    lines: range
    """From the beginning of the statement to the end of the check: tests that reach one may see the change."""
    where: int
    function: str
    before: str
    after: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Yield each mutant of a module in the order of its source, always the same ones."""
    for number, (line, function, node) in enumerate(_sites(ast.parse(source))):
        for change in range(len(_changes(node))):
            tree = ast.parse(source)  # anew, so that one mutant never has the change of another
            same = list(_sites(tree))[number][-1]
            before = ast.unparse(same)
            _changes(same)[change]()
            yield Mutant(
                range(line, (node.end_lineno or line) + 1), node.lineno, function, before, ast.unparse(same), tree
            )


def checks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the function and the text of each bounds check."""
    return ((function, ast.unparse(node)) for _, function, node in _sites(tree))


def _sites(tree: ast.Module) -> Iterator[tuple[int, str, ast.Compare | ast.Call]]:
    """Yield each bounds check, with its statement and function. What a message says of a number is no check."""
    todo: list[tuple[ast.AST, int, str]] = [(tree, 0, "")]
    while todo:
        node, line, function = todo.pop()
        if isinstance(node, ast.JoinedStr | ast.Assert):
            continue
        line = node.lineno if isinstance(node, ast.stmt) else line
        function = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Compare | ast.Call) and _changes(node):
            yield line, function, node
        todo.extend((child, line, function) for child in reversed(list(ast.iter_child_nodes(node))))


def _changes(node: ast.Compare | ast.Call) -> list[Callable[[], None]]:
    """Return what would make a check wrong, each as a call that does it."""
    if isinstance(node, ast.Call):
        return _clamp_changes(node)
    changes: list[Callable[[], None]] = []
    operands = [node.left, *node.comparators]
    for place, op in enumerate(node.ops):
        left, right = operands[place : place + 2]
        if isinstance(op, ast.Eq | ast.NotEq) and not (_is_quantity(left) and _is_quantity(right)):
            continue
        changes += [_swap(node, place, other) for other in _SHIFTS.get(type(op), ())]
        if type(op) in _SHIFTS:
            changes += _constant_changes(left) + _constant_changes(right)
    return changes


def _clamp_changes(call: ast.Call) -> list[Callable[[], None]]:
    if not (isinstance(call.func, ast.Name) and call.func.id in ("min", "max") and len(call.args) > 1):
        return []
    changes: list[Callable[[], None]] = []
    for place in range(len(call.args)):
        changes.append(_drop(call, place))
        changes += _constant_changes(call.args[place])
    return changes


def _constant_changes(node: ast.expr) -> list[Callable[[], None]]:
    """One more and one less, for each number in a sum, a product or a shift."""
    if isinstance(node, ast.BinOp):
        return _constant_changes(node.left) + _constant_changes(node.right)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [_add(node, 1), _add(node, -1)]
    return []


def _is_quantity(node: ast.expr) -> bool:
    """Say whether an operand is a size, an offset or a count, or is made of some."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.BinOp):
        return _is_quantity(node.left) and _is_quantity(node.right)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("len", "sum", "min", "max", "prod")
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return bool(_QUANTITY.search(name))


def _swap(node: ast.Compare, place: int, other: type[ast.cmpop]) -> Callable[[], None]:
    return lambda: node.ops.__setitem__(place, other())


def _drop(call: ast.Call, place: int) -> Callable[[], None]:
    """A clamp without one of its sides; ``min`` of a single one is that one."""
    return lambda: call.args.__setitem__(slice(None), _doubled(call.args[:place] + call.args[place + 1 :]))


def _doubled(args: list[ast.expr]) -> list[ast.expr]:
    return args * 2 if len(args) == 1 else args


def _add(node: ast.Constant, change: int) -> Callable[[], None]:
    value = node.value
    assert isinstance(value, int)
    return lambda: setattr(node, "value", value + change)
