"""
Inert nodes → pickle bytes: the way back from ``pickles``, for trees in which something was changed.

``substitute`` is asked about every call, dict and persistent id before it is written, and answers with the node to
write in its place: so a change needs no copy of the tree, and what is shared or recursive stays so. Nothing recurses
on what a file nests.

Protocol 2 is written, as ``torch.save`` does and every torch can read, unless the tree needs what only protocol 4 can
say (nested class names, sets, keyword arguments).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import Final

from ckptool.errors import MigrationRefused
from ckptool.inert import Call, Dict, Global, Inert, Pairs, PersistentId, Set

Substitute = Callable[[Inert], Inert]

_BATCH: Final = 1000
_PYTHON_3_NAMES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def write_pickle(root: Inert, substitute: Substitute = lambda node: node) -> bytes:
    """Return a pickle that unpickles to what ``root`` stands for, with ``substitute`` applied."""
    try:
        return _Writer(substitute, 2).write(root)
    except _NeedsProtocol4:
        return _Writer(substitute, 4).write(root)


class _NeedsProtocol4(Exception):
    """Control flow: the tree has something that protocol 2 has no words for."""


class _Writer:
    def __init__(self, substitute: Substitute, protocol: int) -> None:
        self._substitute = substitute
        self._protocol = protocol
        self._out = bytearray()
        self._memo: dict[object, int] = {}
        self._kept: list[Inert] = []  # keeps substitutes alive, so that an id stays one node's
        # What is left to do, last first: a node to write, or a step that needs no more nodes.
        self._todo: list[tuple[Callable[[Inert], None], Inert]] = []

    def write(self, root: Inert) -> bytes:
        self._out += bytes([0x80, self._protocol])
        self._todo.append((self._node, root))
        while self._todo:
            step, argument = self._todo.pop()
            step(argument)
        self._out += b"."
        return bytes(self._out)

    def _then(self, *steps: tuple[Callable[[Inert], None], Inert]) -> None:
        self._todo.extend(reversed(steps))

    def _raw(self, data: Inert) -> None:
        self._out += data

    def _node(self, original: Inert) -> None:
        kind = type(original)
        if kind in _ATOMS:
            _WRITERS[kind](self, original, 0)
            return
        node = self._substitute(original) if kind in _SUBSTITUTED else original
        known = self._memo.get(id(node))
        if known is not None:
            self._get(known)
            return
        if node is not original:
            self._kept.append(node)
        _WRITERS[type(node)](self, node, id(node))

    def _remember(self, key: object) -> None:
        index = self._memo[key] = len(self._memo)
        self._out += b"q" + bytes([index]) if index < 256 else pack("<cI", b"r", index)

    def _get(self, index: int) -> None:
        self._out += b"h" + bytes([index]) if index < 256 else pack("<cI", b"j", index)

    def _none(self, _: None, _key: int) -> None:
        self._out += b"N"

    def _bool(self, value: bool, _key: int) -> None:
        self._out += b"\x88" if value else b"\x89"

    def _int(self, value: int, _key: int) -> None:
        if 0 <= value < 1 << 8:
            self._out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self._out += pack("<cH", b"M", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._out += pack("<ci", b"J", value)
        else:
            digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            head = pack("<cB", b"\x8a", len(digits)) if len(digits) < 256 else pack("<ci", b"\x8b", len(digits))
            self._out += head + digits

    def _float(self, value: float, _key: int) -> None:
        self._out += pack(">cd", b"G", value)

    def _str(self, value: str, _key: int) -> None:
        known = self._memo.get(value)
        if known is not None:
            self._get(known)
            return
        data = value.encode("utf-8", "surrogatepass")
        self._out += pack("<cI", b"X", len(data)) + data
        self._remember(value)

    def _bytes(self, value: bytes, key: int) -> None:
        if self._protocol >= 4:
            self._out += pack("<cQ", b"\x8e", len(value)) + value
        else:  # as pickle itself has it: Latin-1 text, to be encoded
            self._global(Global("_codecs", "encode"), 0)
            self._str(str(value, "latin-1"), 0)
            self._str("latin1", 0)
            self._out += b"\x86R"
        self._remember(key)

    def _bytearray(self, value: bytearray, key: int) -> None:
        self._global(Global("builtins", "bytearray"), 0)
        self._bytes(bytes(value), -key)
        self._out += b"\x85R"
        self._remember(key)

    def _global(self, value: Global, _key: int) -> None:
        known = self._memo.get((value.module, value.name))
        if known is not None:
            self._get(known)
            return
        if self._protocol >= 4:
            self._str(_PYTHON_3_NAMES.get(value.module, value.module), 0)
            self._str(value.name, 0)
            self._out += b"\x93"
        elif "." in value.name or "\n" in value.module + value.name:
            raise _NeedsProtocol4
        else:
            try:
                self._out += f"c{value.module}\n{value.name}\n".encode()
            except UnicodeEncodeError:
                raise _NeedsProtocol4 from None
        self._remember((value.module, value.name))

    def _persistent_id(self, value: PersistentId, _key: int) -> None:
        self._then((self._node, value.pid), (self._raw, b"Q"))

    def _tuple(self, value: tuple[Inert, ...], key: int) -> None:
        if not value:
            self._out += b")"
            return
        if len(value) > 3:
            self._out += b"("
        if all(type(item) in _ATOMS for item in value):  # shapes and strides, mostly
            for item in value:
                _WRITERS[type(item)](self, item, 0)
            self._close_tuple((key, len(value)))
            return
        todo = self._todo
        todo.append((self._close_tuple, (key, len(value))))
        todo.extend([(self._node, item) for item in reversed(value)])

    def _close_tuple(self, closing: tuple[int, int]) -> None:
        key, count = closing
        known = self._memo.get(key)
        if known is not None:  # one of its items led back to it, and wrote it whole
            self._out += b"0" * count if count <= 3 else b"1"
            self._get(known)
            return
        self._out += (b"", b"\x85", b"\x86", b"\x87")[count] if count <= 3 else b"t"
        self._remember(key)

    def _list(self, value: list[Inert], key: int) -> None:
        self._out += b"]"
        self._remember(key)
        self._append(value)

    def _append(self, items: list[Inert]) -> None:
        steps: list[tuple[Callable[[Inert], None], Inert]] = []
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            steps += [(self._raw, b"("), *((self._node, item) for item in batch), (self._raw, b"e")]
        self._then(*steps)

    def _dict(self, value: Dict, key: int) -> None:
        self._out += b"}"
        self._remember(key)
        self._set_items(value.pairs)

    def _set_items(self, pairs: Pairs) -> None:
        steps: list[tuple[Callable[[Inert], None], Inert]] = []
        for start in range(0, len(pairs), _BATCH):
            batch = pairs[start : start + _BATCH]
            flat = ((self._node, side) for pair in batch for side in pair)
            steps += [(self._raw, b"("), *flat, (self._raw, b"u")]
        self._then(*steps)

    def _set(self, value: Set, key: int) -> None:
        if self._protocol < 4:
            raise _NeedsProtocol4
        items = [(self._node, item) for item in value.items]
        if value.frozen:
            self._out += b"("
            self._then(*items, (self._close_frozenset, key))
        else:
            self._out += b"\x8f"
            self._remember(key)
            self._then((self._raw, b"("), *items, (self._raw, b"\x90"))

    def _close_frozenset(self, key: int) -> None:
        known = self._memo.get(key)
        if known is not None:  # one of its items led back to it, and wrote it whole
            self._out += b"1"
            self._get(known)
            return
        self._out += b"\x91"
        self._remember(key)

    def _call(self, value: Call, key: int) -> None:
        steps: list[tuple[Callable[[Inert], None], Inert]] = [(self._node, value.func), (self._node, value.args)]
        if value.how == "newobj_ex":
            if self._protocol < 4:
                raise _NeedsProtocol4
            steps += [(self._node, value.kwargs), (self._raw, b"\x92")]
        else:
            steps.append((self._raw, b"R" if value.how == "reduce" else b"\x81"))
        self._then(*steps, (self._made, (key, value)))

    def _made(self, made: tuple[int, Call]) -> None:
        """The object is on the stack: it can be referred to from now on, also by what is put into it."""
        key, value = made
        known = self._memo.get(key)
        if known is not None and _copies_its_items(value):
            raise MigrationRefused(
                "a list or dict of a class of its own leads back to itself, in a way that only protocol 0 or 1 writes",
                kind="unsupported-cycle",
                hint="Take the weights alone: --form state_dict or --form safetensors.",
            )
        if known is not None:  # one of its arguments led back to it, and wrote it whole
            self._out += b"0"
            self._get(known)
            return
        self._remember(key)
        steps: list[tuple[Callable[[Inert], None], Inert]] = []
        if value.items:
            steps.append((self._append, value.items))
        if value.pairs:
            steps.append((self._set_items, value.pairs))
        if value.state is not None:
            steps += [(self._node, value.state), (self._raw, b"b")]
        self._then(*steps)


def _copies_its_items(value: Call) -> bool:
    """Say whether an object is made of the items that a list or dict has when it is made, not of those it gets."""
    rebuilt = isinstance(value.func, Global) and value.func.name == "_reconstructor"
    return rebuilt and isinstance(value.args, tuple) and any(isinstance(arg, list | Dict) for arg in value.args)


_ATOMS = frozenset({type(None), bool, int, float, str})
"""Types that hold nothing else; text is remembered by its value, the others are never referred to."""
_SUBSTITUTED = frozenset({Call, Dict, PersistentId})
"""Types of nodes that may have another in their place."""

_WRITERS: dict[type, Callable[[_Writer, Inert, int], None]] = {
    type(None): _Writer._none,
    bool: _Writer._bool,
    int: _Writer._int,
    float: _Writer._float,
    str: _Writer._str,
    bytes: _Writer._bytes,
    bytearray: _Writer._bytearray,
    tuple: _Writer._tuple,
    list: _Writer._list,
    Dict: _Writer._dict,
    Set: _Writer._set,
    Global: _Writer._global,
    Call: _Writer._call,
    PersistentId: _Writer._persistent_id,
}
