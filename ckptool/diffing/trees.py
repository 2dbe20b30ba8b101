"""
Finds where two inert trees differ: walks them in step, without recursion, and parts that are shared only once.

Two nodes are the same if they mean the same: how a pickle writes it (protocol, shared or repeated, ``dict`` or
``OrderedDict``, the order of keys) makes no difference. Nodes that were found alike, or are being compared further
up, are joined (a union-find, as in Hopcroft and Karp's test of automata). So the walk ends on trees that contain
themselves, and its cost is that of the stored nodes, however often they are shared. Small nodes in which nothing
differs are not noted, and children are taken a few at a time: there may be one for each byte of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final, NamedTuple, TypeAlias

from ckptool.cancellation import Cancellation, check_cancelled, each
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Block, Call, Dict, Global, Inert, Pairs, PersistentId, Set
from ckptool.pickles.numpy_values import array_of, encoded_bytes, numpy_scalar
from ckptool.pickles.values import describe

ABSENT: Final = "nothing"
NOTHING: Final = Global("", ABSENT)
"""Stands for a value that only the other tree has."""

_SHOWN_COMPONENTS: Final = 16
_MOST_MISSING: Final = 16
_LONG: Final = 64
_SHORT: Final = 4
"""Most items of a list of plain values that is compared at sight: arguments of calls and shapes, mostly."""
_AT_ONCE: Final = 64
"""Children that are taken at once; for a node with fewer, no iterator stays on the stack."""
_RENAMED_MODULES: Final = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
}
_VALUES: Final = (int, str, bool, type(None))
_MODULE_DICTS: Final = ("_modules", "_parameters", "_buffers")
"""Attributes between a module and its children, which paths for people do not contain."""
_PLAIN_MAPPINGS: Final = {"dict", "builtins.dict", "collections.OrderedDict"}


class Change(NamedTuple):
    """Something that differs: its name, and a text about it in A and in B."""

    name: str
    a: str
    b: str


Same: TypeAlias = Callable[[Inert, Inert], bool | None]
"""Returns whether two nodes that refer to something outside the tree are the same; None if they do not refer to any."""


class _Pair(NamedTuple):
    """Two nodes and their place: a chain of components, from the innermost to the root's path."""

    place: Any
    a: Inert
    b: Inert


def tree_changes(
    trees: Iterable[tuple[str, Inert, Inert]], same: Same, cancellation: Cancellation | None = None
) -> Iterator[Change]:
    """Yield the places where pairs of trees differ, below the path of each; a shared part differs in one place."""
    joined = _Joined()
    todo: list[_Pair | Iterator[_Pair]] = [iter([_Pair((path,), a, b) for path, a, b in trees])]
    while todo:
        check_cancelled(cancellation)
        pair = todo.pop()
        if not isinstance(pair, _Pair):
            few = list(islice(pair, _AT_ONCE))
            if len(few) == _AT_ONCE:
                todo.append(pair)
            todo.extend(reversed(few))
            continue
        left, right = pair.a, pair.b
        if left is right:
            continue
        is_small = _is_small(left) and _is_small(right)
        is_noted = not is_small and nodes.is_container(left) and nodes.is_container(right)
        if is_noted and not joined.join(left, right):
            continue
        answer = same(left, right)
        if answer:
            continue
        below = _matched(pair, joined, cancellation) if answer is None else None
        first = next(below, None) if below is not None else None
        if is_small and (below is None or first is not None) and not joined.join(left, right):
            continue
        if below is None:
            yield _change(pair)
        elif first is not None:
            todo.append(chain((first,), below))


def _is_small(node: Inert) -> bool:
    """Return whether a node is a container that can be compared over and over: it has few children, and these few."""
    return nodes.is_container(node) and nodes.is_small(node)


class _Joined:
    """The classes of nodes that were joined, by id. The trees outlive it, so ids stay unique."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}

    def join(self, a: Inert, b: Inert) -> bool:
        """Join the classes of two nodes; return False if they are one already."""
        one, other = self._root(id(a)), self._root(id(b))
        self._above[one] = other
        return one != other

    def _root(self, node: int) -> int:
        while (above := self._above.get(node, node)) != node:
            self._above[node] = self._above.get(above, above)
            node = above
        return node


def _matched(pair: _Pair, joined: _Joined, cancellation: Cancellation | None) -> Iterator[_Pair] | None:
    """Return pairs of the children of two nodes that are not alike at sight; None if the nodes themselves differ."""
    a, b = pair.a, pair.b
    same = _same_numpy(a, b, joined) if isinstance(a, Call) and isinstance(b, Call) else None
    if same is None and (encoded_bytes(a) is not None or encoded_bytes(b) is not None):
        # Protocol 2 has no bytes: it writes text, and a call that encodes it.
        alike = isinstance(a, str) == isinstance(b, str)
        same = alike and _same_bytes(encoded_bytes(a), encoded_bytes(b), joined)
    if same is None and not (nodes.is_container(a) and nodes.is_container(b)):
        same = _same_leaf(a, b)
    if same is not None:
        return iter(()) if same else None
    if _is_plain_mapping(a) and _is_plain_mapping(b):
        items = _by_key(pair, nodes.mapping_pairs(a) or [], nodes.mapping_pairs(b) or [], cancellation)
        attributes = _by_key(pair, nodes.attribute_pairs(a), nodes.attribute_pairs(b), cancellation)
        return None if items is None or attributes is None else chain(items, attributes)
    one, other = _as_set(a), _as_set(b)
    if one is not None and other is not None and one.frozen == other.frozen:
        keys, others = ({_key(item) for item in each(node.items, cancellation)} for node in (one, other))
        if None in keys or None in others:
            return _by_index(pair, one.items, other.items, cancellation)
        is_same = len(keys) == len(others) and all(key in others for key in each(keys, cancellation))
        return iter(()) if is_same else None
    if type(a) is not type(b) or isinstance(a, Set):
        return None
    if isinstance(a, PersistentId):
        return iter(() if _is_alike(a.pid, b.pid) else (_Pair(("pid", pair.place), a.pid, b.pid),))
    if not isinstance(a, Call):
        return _by_index(pair, a, b, cancellation)
    items = _by_index(pair, a.items or [], b.items or [], cancellation)
    pairs = _by_key(pair, a.pairs or [], b.pairs or [], cancellation)
    if items is None or pairs is None or _renamed(nodes.class_name(a)) != _renamed(nodes.class_name(b)):
        return None
    fields = [(a.args, b.args), (a.kwargs, b.kwargs), (a.state, b.state)]
    if nodes.class_of(a) is None:
        fields.append((a.func, b.func))
    own = [_Pair(pair.place, left, right) for left, right in fields if not _is_alike(left, right)]
    return chain(own, items, pairs)


def _by_index(pair: _Pair, a: list[Inert], b: list[Inert], cancellation: Cancellation | None) -> Iterator[_Pair] | None:
    if len(a) != len(b):
        return None
    return (
        _Pair((index, pair.place), left, right)
        for index, (left, right) in enumerate(each(zip(a, b, strict=True), cancellation))
        if not _is_alike(left, right)
    )


def _by_key(pair: _Pair, a: Pairs, b: Pairs, cancellation: Cancellation | None) -> Iterator[_Pair] | None:
    """Return pairs of values by key, or by position if keys are not plain values; None if many keys differ."""
    left, right = ({_key(key): value for key, value in each(entries, cancellation)} for entries in (a, b))
    if None in left or None in right:
        flat, others = ([item for entry in each(entries, cancellation) for item in entry] for entries in (a, b))
        return _by_index(pair, flat, others, cancellation)
    new = [key for key in each(right, cancellation) if key not in left]
    if 2 * len(new) + len(left) - len(right) > _MOST_MISSING:  # keys that one side lacks
        return None
    found = ((key, left.get(key, NOTHING), right.get(key, NOTHING)) for key in each(chain(left, new), cancellation))
    return (
        _Pair((_shown(key), pair.place), one, other)
        for key, one, other in found
        if key is not None and not _is_alike(one, other)
    )


def _is_alike(a: Inert, b: Inert) -> bool:
    """Return whether two nodes are equal at sight: plain values, as most in long lists are, or short lists of them."""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _VALUES:
        return bool(a == b)
    if kind is not list and kind is not tuple:
        return kind is Dict and not (a.pairs or b.pairs)
    return len(a) == len(b) <= _SHORT and all(
        type(one) is type(other) and type(one) in _VALUES and one == other for one, other in zip(a, b, strict=True)
    )


def _key(key: Inert) -> str | None:
    """
    Return a text for a plain key, another one for each key; None for any other.

    Text, because Python hashes text with a secret: numbers from a file could all be made to collide.
    """
    if isinstance(key, str):
        return f"str:{key}"
    if isinstance(key, bool):
        return f"bool:{key}"
    if isinstance(key, int):
        return f"int:{key if abs(key) < 1 << 63 else hex(key)}"
    if isinstance(key, float):
        return f"float:{key.hex()}"
    return "None:None" if key is None else None


def _shown(key: str) -> str:
    kind, _, text = key.partition(":")
    return str(float.fromhex(text)) if kind == "float" else text


def _as_set(node: Inert) -> Set | None:
    """Return a node as a set; protocols before 4 write a call with a list. None for other nodes."""
    if isinstance(node, Call) and isinstance(node.args, tuple) and len(node.args) == 1:
        name = _renamed(nodes.class_name(node))
        if name in ("builtins.set", "builtins.frozenset") and isinstance(node.args[0], list):
            return Set(node.args[0], frozen=name == "builtins.frozenset")
    return node if isinstance(node, Set) else None


def _is_plain_mapping(node: Inert) -> bool:
    return nodes.mapping_pairs(node) is not None and nodes.class_name(node) in _PLAIN_MAPPINGS


def _same_numpy(a: Call, b: Call, joined: _Joined) -> bool | None:
    """Return whether two numpy arrays or scalars are the same; None where the bytes of one are not known."""
    # The decoder leaves bytes as they are: many arrays may share them.
    one, other = (array_of(node, encoded_bytes) for node in (a, b))  # type: ignore[arg-type]
    if one and other and one.data is not None and other.data is not None:
        left, right = (data.read() if isinstance(data, Block) else data for data in (one.data, other.data))
        return one._replace(data=None) == other._replace(data=None) and _same_bytes(left, right, joined)
    if one or other or not (_is_short(a) and _is_short(b)):
        return None
    x, y = numpy_scalar(a), numpy_scalar(b)
    if x is None or y is None or x[1] is None or y[1] is None:
        return None
    return x[0] == y[0] and _same_leaf(x[1], y[1])


def _is_short(scalar: Call) -> bool:
    data = encoded_bytes(scalar.args[1]) if isinstance(scalar.args, tuple) and len(scalar.args) == 2 else None
    return data is not None and len(data) <= _LONG


def _same_leaf(a: Inert, b: Inert) -> bool:
    if isinstance(a, Global) and isinstance(b, Global):
        return _renamed(str(a)) == _renamed(str(b))
    if type(a) is not type(b):
        return False
    return bool(a.hex() == b.hex()) if isinstance(a, float) else bool(a == b)


def _same_bytes(a: Inert, b: Inert, joined: _Joined) -> bool:
    """Return whether two strings encode the same bytes; those that many nodes share are compared once."""
    if a is None or b is None or len(a) != len(b):
        return False
    if a is b or (len(a) > _LONG and not joined.join(a, b)):
        return True
    if isinstance(a, str) and isinstance(b, str):
        return a == b
    try:
        left, right = (text.encode("latin-1") if isinstance(text, str) else text for text in (a, b))
    except UnicodeEncodeError:
        return False
    return bool(left == right)


def _renamed(name: str) -> str:
    """Return a name as Python 3 and numpy 2 spell it."""
    module, _, last = name.rpartition(".")
    return f"{_RENAMED_MODULES.get(module, module)}.{last}" if module else last


def _change(pair: _Pair) -> Change:
    shown = [ABSENT if node is NOTHING else describe(node) for node in (pair.a, pair.b)]
    if shown[0] == shown[1]:
        shown = [f"{shown[0]}, of one value", "of another"]
    components: list[str] = []
    place = pair.place
    while len(place) == 2:
        component, place = place
        if component not in _MODULE_DICTS:
            components.append(str(component))
    if len(components) > _SHOWN_COMPONENTS:
        half = _SHOWN_COMPONENTS // 2
        components = [*components[:half], "…", *components[-half:]]
    return Change(".".join(filter(None, (place[0], *reversed(components)))), *shown)
