"""
Pickles as trees: read, changed at random, and written again by any opcodes that say the same.

A node is one value: what pushes it, and what is done to it after that (states, items), in order. Nodes may be shared,
and may hold themselves. Reading knows every opcode but those of extensions and buffers, and looks nothing up.
"""

from __future__ import annotations

import _compat_pickle
import pickletools
import random
from collections.abc import Callable
from struct import pack
from typing import Any

Step = tuple[str, list["Node"]]
"""``b`` and a state, ``a`` and items of a list, ``s`` and keys and values, ``+`` and items of a set."""
NESTED = 40
"""A node below so many is not written, so that no changed tree is too deep for the loaders."""


class Node:
    """
    A value: ``kind``, what it says, the nodes that it is made of, and what is done to it.

    Kinds: ``value`` (None, bool, int, float, str, bytes, bytearray), ``str`` of Python 2 (bytes), ``name`` (a pair),
    ``tuple``, ``list``, ``dict``, ``set``, ``frozenset``, ``pid`` (one node, or a line of text), ``call``, ``new``,
    ``new_ex``, ``inst`` (the function first, then what each takes), ``again`` (a node that is taken from the memo),
    ``drop`` (several, of which the last stays).
    """

    __slots__ = ("kind", "nodes", "said", "steps")

    def __init__(self, kind: str, said: Any = None, nodes: list[Node] | None = None) -> None:
        self.kind, self.said, self.nodes = kind, said, nodes or []
        self.steps: list[Step] = []

    def copy(self, known: dict[int, Node] | None = None) -> Node:
        known = {} if known is None else known
        if id(self) in known:
            return known[id(self)]
        made = known[id(self)] = Node(self.kind, self.said)
        made.nodes = [one.copy(known) for one in self.nodes]
        made.steps = [(kind, [one.copy(known) for one in nodes]) for kind, nodes in self.steps]
        return made


def walk(root: Node) -> list[Node]:
    """Return every node once."""
    seen: dict[int, Node] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            todo += node.nodes
            for _, nodes in node.steps:
                todo += nodes
    return list(seen.values())


# Reading

_VALUES = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
)  # fmt: skip
_FIXED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_TUPLE": "tuple", "EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set"}
_OF_MARK = {"TUPLE": "tuple", "LIST": "list", "DICT": "dict", "FROZENSET": "frozenset", "OBJ": "inst"}
_MADE = {f"TUPLE{count}": ("tuple", count) for count in (1, 2, 3)}
_MADE |= {"REDUCE": ("call", 2), "NEWOBJ": ("new", 2), "NEWOBJ_EX": ("new_ex", 3), "BINPERSID": ("pid", 1)}
_STEPS = {"BUILD": ("b", 1), "APPEND": ("a", 1), "SETITEM": ("s", 2)}
_STEPS_OF_MARK = {"APPENDS": "a", "SETITEMS": "s", "ADDITEMS": "+"}
_MARK: Any = object()


def renamed(module: str, name: str) -> tuple[str, str]:
    """Return a name of Python 2 as Python 3 has it."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def named_before(module: str, name: str) -> tuple[str, str]:
    """Return a name as protocols below 3 have it."""
    module, name = _compat_pickle.REVERSE_NAME_MAPPING.get((module, name), (module, name))
    return _compat_pickle.REVERSE_IMPORT_MAPPING.get(module, module), name


def read(data: bytes) -> Node:
    """Return the tree of a pickle that an honest pickler wrote."""
    is_old = data[:1] != b"\x80" or data[1] < 3
    stack: list[Any] = []
    memo: dict[int, Node] = {}

    def popped() -> list[Node]:
        at = len(stack) - 1 - stack[::-1].index(_MARK)
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def taken(count: int) -> list[Node]:
        found = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return found

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(Node("value", argument))
        elif name in _FIXED:
            stack.append(Node("value", _FIXED[name]))
        elif name in ("STRING", "BINSTRING", "SHORT_BINSTRING"):
            stack.append(Node("str", argument.encode("latin-1")))
        elif name == "GLOBAL":
            said = argument.split(" ", 1)
            stack.append(Node("name", renamed(*said) if is_old else tuple(said)))
        elif name == "STACK_GLOBAL":
            stack.append(Node("name", tuple(one.said for one in taken(2))))
        elif name in _EMPTY:
            stack.append(Node(_EMPTY[name]))
        elif name in _OF_MARK:
            stack.append(Node(_OF_MARK[name], None, popped()))
        elif name in _MADE:
            kind, count = _MADE[name]
            stack.append(Node(kind, None, taken(count)))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _STEPS:
            kind, count = _STEPS[name]
            nodes = taken(count)
            stack[-1].steps.append((kind, nodes))
        elif name in _STEPS_OF_MARK:
            nodes = popped()
            stack[-1].steps.append((_STEPS_OF_MARK[name], nodes))
        elif name == "INST":
            stack.append(Node("inst", None, [Node("name", tuple(argument.split(" ", 1))), *popped()]))
        elif name == "PERSID":
            stack.append(Node("pid", argument))
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            popped()
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "STOP":
            break
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(name)
    found: Node = stack[-1]
    return found


# Writing


class Writer:
    """Writes one tree, by opcodes that ``chance`` chooses; of ``protocol`` is no more than the number at the begin."""

    def __init__(self, chance: random.Random, protocol: int) -> None:
        self.chance = chance
        self.protocol = protocol
        self.memo: dict[int, int] = {}
        self.open: set[int] = set()
        self.shared: set[int] = set()
        self.out = bytearray()
        self.modern = chance.random() < 0.8
        """Whether most opcodes are those of its protocol."""

    def whole(self, root: Node) -> bytes:
        counts: dict[int, int] = {}
        for node in walk(root):
            for one in (*node.nodes, *(one for _, nodes in node.steps for one in nodes)):
                counts[id(one)] = counts.get(id(one), 1 if one is root else 0) + 1
        self.shared = {one for one, count in counts.items() if count > 1}
        self.shared |= {id(node.nodes[0]) for node in walk(root) if node.kind == "again"}
        if self.protocol >= 2:
            self.out += b"\x80" + bytes([self.protocol])
        self.node(root, 0)
        return bytes(self.out) + b"."

    def get(self, index: int) -> None:
        kind = self.chance.randrange(3) if index < 256 else self.chance.randrange(1, 3)
        self.out += (
            (b"h" + bytes([index]) if kind == 0 and self.protocol else b"g%d\n" % index)
            if kind < 2
            else (b"j" + pack("<I", index))
        )

    def put(self, node: Node) -> None:
        if id(node) in self.memo:
            return
        index = self.memo[id(node)] = len(self.memo)
        kind = self.chance.random()
        if self.protocol >= 4 and kind < 0.8:
            self.out += b"\x94"
        elif kind > 0.95:
            self.out += b"p%d\n" % index
        elif index < 256:
            self.out += b"q" + bytes([index])
        else:
            self.out += b"r" + pack("<I", index)

    def node(self, node: Node, depth: int) -> None:
        if id(node) in self.memo:
            self.get(self.memo[id(node)])
            return
        if id(node) in self.open or depth > NESTED:  # it holds itself where it cannot be taken from the memo yet
            self.out += b"N"
            return
        self.open.add(id(node))
        self.base(node, depth + 1)
        if id(node) in self.shared and node.kind != "again":
            self.put(node)
        for kind, nodes in node.steps:
            self.step(kind, nodes, depth + 1)
        self.open.discard(id(node))

    def all(self, nodes: list[Node], depth: int) -> None:
        for one in nodes:
            self.node(one, depth)

    def base(self, node: Node, depth: int) -> None:
        kind, nodes, chance, out = node.kind, node.nodes, self.chance, self.out
        if kind == "value":
            out += self.value(node.said)
        elif kind == "str":
            out += self.old_text(node.said)
        elif kind == "name":
            out += self.name(*node.said)
        elif kind == "tuple":
            self.tuple(nodes, depth)
        elif kind in ("list", "dict", "set") and not nodes:
            out += {"list": b"]", "dict": b"}", "set": b"\x8f"}[kind]
        elif kind in ("list", "dict", "frozenset"):
            out += b"("
            self.all(nodes if kind != "dict" else nodes[: len(nodes) // 2 * 2], depth)
            out += {"list": b"l", "dict": b"d", "frozenset": b"\x91"}[kind]
        elif kind == "pid":
            if nodes:
                self.all(nodes, depth)
                out += b"Q"
            else:
                out += b"P" + str(node.said or "0").encode("ascii", "replace").replace(b"\n", b"") + b"\n"
        elif kind in ("call", "new", "new_ex"):
            self.all(nodes, depth)
            out += {"call": b"R", "new": b"\x81", "new_ex": b"\x92"}[kind]
        elif kind == "inst":
            if nodes[0].kind == "name" and not nodes[0].steps and chance.random() < 0.5 and _is_ascii(nodes[0]):
                out += b"("
                self.all(nodes[1:], depth)
                out += b"i" + self.line(*nodes[0].said)
            else:
                out += b"("
                self.all(nodes, depth)
                out += b"o"
        elif kind == "again":
            self.node(nodes[0], depth)
        elif kind == "drop":
            for one in nodes[:-1]:
                self.node(one, depth)
                out += b"0"
            self.node(nodes[-1], depth)
        else:  # a set that is given items at once, which no opcode makes
            out += b"\x8f("
            self.all(nodes, depth)
            out += b"\x90"

    def tuple(self, nodes: list[Node], depth: int) -> None:
        count = len(nodes)
        if count == 0 and self.protocol:
            self.out += b")"
        elif 0 < count < 4 and self.protocol >= 2 and self.chance.random() < 0.9:
            self.all(nodes, depth)
            self.out += bytes([0x84 + count])
        else:
            self.out += b"("
            self.all(nodes, depth)
            self.out += b"t"

    def step(self, kind: str, nodes: list[Node], depth: int) -> None:
        single = {"b": 1, "a": 1, "s": 2}.get(kind)
        if kind == "b" or (len(nodes) == single and self.chance.random() < 0.5):
            self.all(nodes[:single], depth)
            self.out += {"b": b"b", "a": b"a", "s": b"s"}[kind]
            return
        self.out += b"("
        self.all(nodes if kind != "s" else nodes[: len(nodes) // 2 * 2], depth)
        self.out += {"a": b"e", "s": b"u", "+": b"\x90"}[kind]

    def name(self, module: str, name: str) -> bytes:
        if self.protocol >= 4 and self.chance.random() < 0.9:
            return self.value(module) + self.value(name) + b"\x93"
        return b"N" if "\n" in module + name else b"c" + self.line(module, name)

    def line(self, module: str, name: str) -> bytes:
        if self.protocol < 3 and self.chance.random() < 0.95:
            module, name = named_before(module, name)
        return b"%s\n%s\n" % (module.encode("utf-8", "replace"), name.encode("utf-8", "replace"))

    def old_text(self, data: bytes) -> bytes:
        if data.isalnum() and self.chance.random() < 0.2:
            return b"S'" + data + b"'\n"
        if len(data) < 256 and self.chance.random() < 0.8:
            return b"U" + bytes([len(data)]) + data
        return b"T" + pack("<i", len(data)) + data

    def value(self, value: Any) -> bytes:
        chance = self.chance
        if value is None:
            return b"N"
        if isinstance(value, bool):
            if self.protocol < 2:
                return b"I01\n" if value else b"I00\n"
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            return self.integer(value)
        if isinstance(value, float):
            is_binary = (self.protocol and chance.random() < 0.95) or value != value
            return b"G" + pack(">d", value) if is_binary else b"F%s\n" % repr(value).encode()
        if isinstance(value, bytearray):
            return b"\x96" + pack("<Q", len(value)) + value
        if isinstance(value, bytes):
            if len(value) < 256 and chance.random() < 0.8:
                return b"C" + bytes([len(value)]) + value
            return b"B" + pack("<I", len(value)) + value
        text: bytes = value.encode("utf-8", "surrogatepass")
        if self.protocol >= 4 and len(text) < 256 and chance.random() < 0.9:
            return b"\x8c" + bytes([len(text)]) + text
        if (not self.protocol or chance.random() < 0.03) and "\n" not in value:
            return b"V" + value.replace("\\", "\\u005c").encode("raw-unicode-escape") + b"\n"
        return b"X" + pack("<I", len(text)) + text

    def integer(self, value: int) -> bytes:
        kind = self.chance.random()
        if 0 <= value < 256 and kind < 0.9:
            return b"K" + bytes([value])
        if 0 <= value < 1 << 16 and kind < 0.9:
            return b"M" + pack("<H", value)
        if -(1 << 31) <= value < 1 << 31 and kind < 0.9:
            return b"J" + pack("<i", value)
        if kind > 0.95 and abs(value) < 1 << 80:
            return (b"L%dL\n" if kind > 0.97 else b"I%d\n") % value
        digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return (b"\x8a" + bytes([len(digits)]) if len(digits) < 256 else b"\x8b" + pack("<i", len(digits))) + digits


def _is_ascii(node: Node) -> bool:
    return all(part.isascii() and "\n" not in part for part in node.said)


def written(root: Node, chance: random.Random, protocol: int | None = None) -> bytes:
    """Return a tree as a pickle."""
    return Writer(chance, chance.choice((0, 1, 2, 2, 3, 4, 4, 5)) if protocol is None else protocol).whole(root)


# Changing

NUMBERS = (
    0, 1, 2, 3, 4, 7, 8, 9, 16, 31, 63, 64, 127, 128, 255, 256, 1000, 4096, 65535, 65536, -1, -2, -8, -128,
    1 << 20, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 32, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 64,
    1 << 100, -(1 << 100), 0x4141414141414141,
)  # fmt: skip
TEXTS = (
    "", "a", "0", "cpu", "cuda:0", "meta", "storage", "module", "latin1", "utf-8", "hex", "unicode_escape", "rot13",
    "idna", "zlib", "f8", "<f8", "O", "O8", "|O", "V8", "S4", "U4", "M8", "M8[s]", "f8,O", "<i4", "b1", "T", "=", "<",
    ">", "|", "1e9999", "1/3", "1e400000000", "nan", "inf", "-0", "9" * 40, "__class__", "__dict__", "__array__",
    "__array_interface__", "__array_struct__", "__setstate__", "__reduce__", "__call__", "append", "extend", "add",
    "items", "keys", "get", "_metadata", "shape", "dtype", "ndim", "requires_grad", "data", "grad", "x" * 300,
    "\ud800", "é", "\0", "default_factory", "__len__", "__index__", "__float__", "__int__", "__iter__", "__doc__",
    "2020-01-01", "..", "/", "/etc/passwd", "C:\\x", "a\nb", "MT19937", "PCG64", "UTC", "mode", "copy",
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.5, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
ATTRIBUTES = tuple(text for text in TEXTS if text.startswith("_") or text.isidentifier())


def literal(chance: random.Random) -> Node:
    kind = chance.randrange(9)
    if kind < 3:
        return Node("value", chance.choice(NUMBERS))
    if kind < 6:
        return Node("value", chance.choice(TEXTS))
    if kind == 6:
        return Node("value", chance.choice((None, True, False, *FLOATS)))
    if kind == 7:
        return Node("value", bytes(chance.choice((0, 1, 4, 7, 8, 10, 16, 64))) or chance.randbytes(3))
    return Node("str" if chance.random() < 0.5 else "value", chance.choice((b"", b"a", b"\xff" * 8, b"cos\nsystem\n.")))


class Changer:
    """Changes trees, with the nodes of others and with names."""

    def __init__(self, seeds: list[Node], names: list[tuple[str, str]], others: list[Node] | None = None) -> None:
        self.seeds = seeds
        self.names = names
        self.parts = [node for seed in (*seeds, *(others or ())) for node in walk(seed)]
        self.calls = [node for node in self.parts if node.kind in ("call", "new", "new_ex", "pid")]
        self.objects = [node for node in self.parts if any(kind == "b" for kind, _ in node.steps)]

    def tree(self, chance: random.Random) -> Node:
        """Return a tree of a seed that was changed some times, or one that is made of such."""
        root = chance.choice(self.seeds).copy()
        for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 2, 4))):
            self.change(root, chance)
        kind = chance.randrange(8)
        if kind == 0:
            return Node("list", None, [root, self.tree(chance)])
        if kind == 1:  # a dict that has something again that was made before
            found = Node("dict")
            again = Node("again", None, [chance.choice(walk(root))])
            again.steps.append(self.some_step(chance))
            found.steps.append(("s", [Node("value", "w"), root, Node("value", "x"), again]))
            return found
        filled = [one for one in walk(root) if one.steps] if kind == 2 else []
        if filled:  # what gets its items or its state only after it was used
            node = chance.choice(filled)
            again = Node("again", None, [node])
            again.steps, node.steps = node.steps, []
            return Node("list", None, [root, again])
        return root

    def any(self, chance: random.Random, root: Node | None = None) -> Node:
        """Return any value: plain, of a seed, a name, the call of one, or one that is in the tree already."""
        kind = chance.randrange(12)
        if kind < 3:
            return literal(chance)
        if kind < 6:
            return chance.choice(self.parts).copy()
        if kind < 7:
            return Node("name", chance.choice(self.names))
        if kind < 9:
            return chance.choice(self.calls).copy()
        if kind == 9 and root is not None:
            return chance.choice(walk(root))
        if kind == 10:
            args = Node("tuple", None, [self.any(chance, root) for _ in range(chance.choice((0, 1, 1, 2, 3)))])
            return Node(chance.choice(("call", "new")), None, [Node("name", chance.choice(self.names)), args])
        if kind == 11 and chance.random() < 0.3:
            items = [self.any(chance, root) for _ in range(chance.choice((0, 2, 2, 4)))]
            return Node(chance.choice(("dict", "list", "frozenset", "set")), None, items)
        return self.state(chance)

    def state(self, chance: random.Random) -> Node:
        """Return a dict of attributes, or slots, or any value."""
        pairs: list[Node] = []
        for _ in range(chance.choice((0, 1, 1, 2))):
            pairs += Node("value", chance.choice(ATTRIBUTES)), self.any(chance)
        found = Node("dict")
        found.steps.append(("s", pairs))
        return found if chance.random() < 0.7 else Node("tuple", None, [Node("value"), found])

    def some_step(self, chance: random.Random) -> Step:
        kind = chance.choice("bbbas+")
        if kind == "b":
            if self.objects and chance.random() < 0.4:
                steps = chance.choice(self.objects).steps
                return kind, [next(nodes for one, nodes in steps if one == "b")[0].copy()]
            return kind, [self.state(chance) if chance.random() < 0.7 else self.any(chance)]
        return kind, [self.any(chance) for _ in range(2 if kind == "s" else chance.choice((1, 1, 2)))]

    def change(self, root: Node, chance: random.Random) -> None:
        """Change one node of a tree, in its place."""
        all_nodes = walk(root)
        node = chance.choice(all_nodes)
        chance.choice(CHANGES)(self, node, root, chance)


def _replace(changer: Changer, node: Node, root: Node, chance: random.Random) -> None:
    """Put another value in the place of one that it is made of."""
    places = [node.nodes, *(nodes for _, nodes in node.steps)]
    nodes = chance.choice(places)
    if nodes:
        nodes[chance.randrange(len(nodes))] = changer.any(chance, root)


def _literal(_: Changer, node: Node, __: Node, chance: random.Random) -> None:
    if node.kind == "value":
        if isinstance(node.said, int) and chance.random() < 0.7:
            node.said = chance.choice((*NUMBERS, node.said + 1, node.said - 1, -node.said, node.said * 2))
        elif isinstance(node.said, bytes) and node.said and chance.random() < 0.7:
            at = chance.randrange(len(node.said))
            node.said = node.said[:at] + chance.choice((b"", bytes([chance.randrange(256)]))) + node.said[at + 1 :]
        else:
            node.said = literal(chance).said
    elif node.kind == "str":
        node.said = chance.choice((b"", b"abc", b"cpu", node.said[:-1]))


def _value_below(changer: Changer, _: Node, root: Node, chance: random.Random) -> None:
    """Change a literal of the tree, of which it mostly consists."""
    found = [one for one in walk(root) if one.kind in ("value", "str")]
    if found:
        _literal(changer, chance.choice(found), root, chance)


def _name(changer: Changer, _: Node, root: Node, chance: random.Random) -> None:
    found = [one for one in walk(root) if one.kind == "name"]
    if found:
        chance.choice(found).said = chance.choice(changer.names)


def _step(changer: Changer, node: Node, _: Node, chance: random.Random) -> None:
    node.steps.append(changer.some_step(chance))


def _object_step(changer: Changer, _: Node, root: Node, chance: random.Random) -> None:
    """Give one more state or item to what is called, or what has one already."""
    found = [one for one in walk(root) if one.steps or one.kind in ("call", "new", "name", "pid")]
    if found:
        chance.choice(found).steps.append(changer.some_step(chance))


def _dropped_step(_: Changer, __: Node, root: Node, chance: random.Random) -> None:
    found = [one for one in walk(root) if one.steps]
    if found:
        steps = chance.choice(found).steps
        steps.pop(chance.randrange(len(steps)))


def _doubled(_: Changer, node: Node, __: Node, chance: random.Random) -> None:
    places = [node.nodes, *(nodes for _, nodes in node.steps)]
    nodes = chance.choice(places)
    if nodes and len(nodes) < 40:
        at = chance.randrange(len(nodes))
        nodes.insert(chance.randrange(len(nodes) + 1), nodes[at])


def _removed(_: Changer, node: Node, __: Node, chance: random.Random) -> None:
    if node.kind in ("tuple", "list", "frozenset") and node.nodes:
        node.nodes.pop(chance.randrange(len(node.nodes)))
    elif node.steps:
        nodes = chance.choice(node.steps)[1]
        if len(nodes) > 1:
            nodes.pop(chance.randrange(len(nodes)))


def _wrapped(changer: Changer, node: Node, __: Node, chance: random.Random) -> None:
    """Give a value to a call of a name, in its place."""
    if not node.nodes:
        return
    at = chance.randrange(len(node.nodes))
    inner = node.nodes[at]
    others = [literal(chance) for _ in range(chance.choice((0, 0, 1, 2)))]
    args = Node("tuple", None, [inner, *others])
    kind = chance.choice(("call", "call", "new"))
    node.nodes[at] = Node(kind, None, [Node("name", chance.choice(changer.names)), args])


def _kind(_: Changer, __: Node, root: Node, chance: random.Random) -> None:
    """Call otherwise."""
    found = [one for one in walk(root) if one.kind in ("call", "new", "inst")]
    if not found:
        return
    node = chance.choice(found)
    if node.kind == "inst":
        node.kind, node.nodes = "call", [node.nodes[0], Node("tuple", None, node.nodes[1:])]
    elif node.kind == "call" and chance.random() < 0.3 and node.nodes[1].kind == "tuple":
        node.kind, node.nodes = "inst", [node.nodes[0], *node.nodes[1].nodes]
    elif chance.random() < 0.2:
        node.kind, node.nodes = "new_ex", [*node.nodes[:2], Node("dict")]
    else:
        node.kind = "new" if node.kind == "call" else "call"


def _swapped(_: Changer, __: Node, root: Node, chance: random.Random) -> None:
    found = [nodes for one in walk(root) for nodes in (one.nodes, *(nodes for _, nodes in one.steps)) if nodes]
    if found:
        first, second = chance.choice(found), chance.choice(found)
        at, to = chance.randrange(len(first)), chance.randrange(len(second))
        first[at], second[to] = second[to], first[at]


def _dropped_value(changer: Changer, node: Node, root: Node, chance: random.Random) -> None:
    """Make something before a value, and drop it."""
    if node.nodes:
        at = chance.randrange(len(node.nodes))
        node.nodes[at] = Node("drop", None, [changer.any(chance, root), node.nodes[at]])


CHANGES: tuple[Callable[[Changer, Node, Node, random.Random], None], ...] = (
    _replace, _replace, _value_below, _value_below, _value_below, _name, _step, _object_step, _object_step,
    _dropped_step, _doubled, _removed, _wrapped, _kind, _swapped, _dropped_value,
)  # fmt: skip
