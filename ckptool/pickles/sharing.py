"""
Which nodes stand in a tree more than once, among those that its pickle took from the memo, or doubled.

In a long pickle, all of these count: to walk through its tree takes longer than to write a note of each.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Final

from ckptool.pickles.nodes import Call, Dict, Global, Inert, PersistentId, Set
from ckptool.pickles.reader import Pickle
from ckptool.sources.source import Source

_ATOMS: Final = frozenset({type(None), bool, int, float, str, Global})
"""Types that hold nothing else, and that a writer knows by their value."""
_WINDOW: Final = 1 << 18
_LONGEST: Final = 12
"""An opcode that gets from the memo, with an index of ten digits."""
# At every byte, for it is not known which of them are opcodes: what is wrongly taken for one is sorted out later.
_SHORT: Final = re.compile(rb"h(?=(.))", re.DOTALL).findall
_LONG: Final = re.compile(rb"j(?=(.{4}))", re.DOTALL).findall
_TEXT: Final = re.compile(rb"g(?=\s*\+?([0-9]{1,10})\s*\n)").findall


def shared_nodes(source: Source, pickled: Pickle) -> set[int]:
    """Return the ids of all nodes that stand in the tree of a pickle more than once; of a long one, of some others."""
    is_long = pickled.end - pickled.start > _WINDOW
    indices = set(range(256)) if is_long else set()  # as many as the shortest opcode can get
    for begin in range(pickled.start, pickled.end, _WINDOW):
        data = source.read(begin, min(_WINDOW + _LONGEST, pickled.end - begin))
        if not is_long:
            indices.update(found[0] for found in set(_SHORT(data)))
        indices.update(int.from_bytes(found, "little") for found in set(_LONG(data)))
        indices.update(map(int, set(_TEXT(data))))
    memo = pickled.memo
    got = [memo[index] for index in indices if (index in memo if isinstance(memo, dict) else index < len(memo))]
    candidates = {id(node) for node in (*got, *pickled.doubled) if type(node) not in _ATOMS}
    return candidates if is_long else _met_again(pickled.root, candidates)


def _met_again(root: Inert, candidates: set[int]) -> set[int]:
    """Return those of the candidates that stand in a tree more than once; nothing else can."""
    met: set[int] = set()
    again: set[int] = set()
    todo: list[Inert] = [root] if candidates else []
    while todo:
        node = todo.pop()
        key = id(node)
        if key in candidates:
            if key in met:
                again.add(key)
                continue
            met.add(key)
        if isinstance(node, (tuple, list)):
            if not _ATOMS.issuperset(map(type, node)):  # as those of shapes and strides
                todo += [one for one in node if type(one) not in _ATOMS]
        elif isinstance(node, PersistentId):
            todo.append(node.pid)
        elif isinstance(node, Call):
            todo += [one for one in (node.func, node.args, node.kwargs, node.state) if type(one) not in _ATOMS]
            todo += node.items or ()
            todo += chain.from_iterable(node.pairs or ())
        elif isinstance(node, Dict):
            todo += chain.from_iterable(node.pairs)
        elif isinstance(node, Set):
            todo += node.items
    return again
