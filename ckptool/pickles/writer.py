"""
Nodes to pickle bytes.

``substitute`` is called with every call, dict and persistent id before it is written, and returns the node to write
in its place: so a change needs no copy of the tree, and shared or recursive nodes stay so. For a plain tensor, which
most of a checkpoint is made of, it should return a ``PlainTensor``. Nothing recurses into what a file nests.

Protocol 2 is written, as ``torch.save`` does and every torch can read, unless the tree needs something that only
protocol 4 has (nested class names, sets, keyword arguments).
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from io import BytesIO
from itertools import chain
from struct import Struct, pack
from typing import Final, TypeAlias

from ckptool.cancellation import Cancellation
from ckptool.errors import MigrationRefused
from ckptool.pickles.nodes import Call, Dict, DictInBatches, Global, Inert, Pairs, PersistentId, PlainTensor, Set
from ckptool.pickles.reader import Pickle
from ckptool.sources.source import Source

Substitute = Callable[[Inert], Inert]
Ids: TypeAlias = Collection[int] | None

_BATCH: Final = 1000
_ALONE: Final = 0
"""The key of a node that is not put into the memo."""
_U32: Final = Struct("<I").pack
_PYTHON_3_NAMES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_REBUILD_TENSOR: Final = Global("torch._utils", "_rebuild_tensor_v2")
_ORDERED_DICT: Final = Global("collections", "OrderedDict")


def write_pickle(
    root: Inert,
    substitute: Substitute = lambda node: node,
    cancellation: Cancellation | None = None,
    shared: Ids = None,
    nbytes: int = 0,
) -> bytes:
    """
    Return a pickle of the tree under ``root``, with ``substitute`` applied.

    ``shared`` has the ids of all nodes that may occur more than once, or is None if they are not known: only these are
    put into the memo, which costs more than a node itself. A shorter pickle is padded to ``nbytes``, unless exactly one
    or three bytes are missing.
    """
    try:
        return _Writer(substitute, 2, cancellation, shared).write(root, nbytes)
    except _NeedsProtocol4:
        return _Writer(substitute, 4, cancellation, shared).write(root, nbytes)


class _NeedsProtocol4(Exception):
    """Control flow: the tree has something that protocol 2 cannot express."""


class _Writer:
    def __init__(self, substitute: Substitute, protocol: int, cancellation: Cancellation | None, shared: Ids) -> None:
        self._shared = shared
        self._substitute = substitute
        self._protocol = protocol
        self._cancellation = cancellation
        self._out = BytesIO()  # getvalue() makes no copy
        self._add = self._out.write
        self._memo: dict[object, int] = {}
        self._kept: list[Inert] = []  # keeps substitutes alive, so that no other node gets their id

    def write(self, root: Inert, nbytes: int = 0) -> bytes:
        self._add(bytes([0x80, self._protocol]))
        memo, shared, substitute, cancellation = self._memo, self._shared, self._substitute, self._cancellation
        # What is begun, the innermost last: iterators over the nodes of a container, which write the opcodes between
        # them. So nothing recurses, however deep a file nests.
        todo: list[Iterator[Inert]] = [iter((root,))]
        while todo:
            for node in todo[-1]:
                if cancellation is not None:
                    cancellation.check()
                kind = type(node)
                if kind is str:
                    self._str(node, 0)
                    continue  # not elif: Python 3.11 speeds up loops that jump back without a condition
                if kind in _ENCODERS:
                    self._add(_ENCODERS[kind](node))
                    continue
                key = _ALONE
                if shared is None or id(node) in shared:
                    key = id(node)
                    if key in memo:
                        self._get(memo[key])
                        continue
                if kind in _SUBSTITUTED:
                    original, node = node, substitute(node)
                    kind = type(node)
                    if kind is not PlainTensor and node is not original:
                        self._kept.append(node)
                        key = id(node)  # other nodes may have the same substitute
                        if key in memo:
                            self._get(memo[key])
                            continue
                inner = _WRITERS[kind](self, node, key)
                if inner is not None:
                    todo.append(inner)
                    break
            else:
                todo.pop()
        following = len(memo)
        memo.clear()  # frees memory: it may be as large as the pickle
        for part in _encode_padding(nbytes - self._out.tell() - 1, following, self._protocol):
            self._add(part)
        self._add(b".")
        return self._out.getvalue()

    def _remember(self, key: object) -> None:
        if key != _ALONE:
            self._add(self._put(key))

    def _get(self, index: int) -> None:
        self._add(b"h" + bytes([index]) if index < 256 else pack("<cI", b"j", index))

    def _put(self, key: object) -> bytes:
        index = self._memo[key] = len(self._memo)
        return b"q" + bytes([index]) if index < 256 else b"r" + _U32(index)

    def _str(self, value: str, _key: int) -> None:
        known = self._memo.get(value)
        if known is not None:
            self._get(known)
            return
        data = value.encode("utf-8", "surrogatepass")
        self._add(b"".join((b"X", _U32(len(data)), data, self._put(value))))

    def _bytes(self, value: bytes, key: int) -> None:
        if self._protocol >= 4:
            self._add(pack("<cQ", b"\x8e", len(value)) + value)
        else:  # as pickle itself: Latin-1 text to be encoded
            self._global(Global("_codecs", "encode"), 0)
            self._str(str(value, "latin-1"), 0)
            self._str("latin1", 0)
            self._add(b"\x86R")
        self._remember(key)

    def _bytearray(self, value: bytearray, key: int) -> None:
        self._global(Global("builtins", "bytearray"), 0)
        self._bytes(bytes(value), -key)
        self._add(b"\x85R")
        self._remember(key)

    def _global(self, value: Global, _key: int) -> None:
        known = self._memo.get((value.module, value.name))
        if known is not None:
            self._get(known)
            return
        if self._protocol >= 4:
            self._str(_PYTHON_3_NAMES.get(value.module, value.module), 0)
            self._str(value.name, 0)
            self._add(b"\x93")
        elif "." in value.name or "\n" in value.module + value.name:
            raise _NeedsProtocol4
        else:
            try:
                self._add(f"c{value.module}\n{value.name}\n".encode())
            except UnicodeEncodeError:
                raise _NeedsProtocol4 from None
        self._remember((value.module, value.name))

    def _persistent_id(self, value: PersistentId, _key: int) -> Iterator[Inert]:
        yield value.pid
        self._add(b"Q")

    def _tuple(self, value: tuple[Inert, ...], key: int) -> Iterator[Inert]:
        if not value:
            self._add(b")")
            return
        is_long = len(value) > 3
        if is_long:
            self._add(b"(")
        yield from value
        self._close(key, b"t" if is_long else _TUPLES[len(value)], b"1" if is_long else b"0" * len(value))

    def _close(self, key: int, make: bytes, drop: bytes) -> None:
        """Make the container of the items on the stack; or drop them, if an item refers back to it and wrote it."""
        known = self._memo.get(key)
        if known is not None:
            self._add(drop)
            self._get(known)
            return
        self._add(make)
        self._remember(key)

    def _list(self, value: list[Inert], key: int) -> Iterator[Inert]:
        self._add(b"]")
        self._remember(key)
        return self._append(value)  # one iterator for each level: a file may nest as deep as it is long

    def _append(self, items: list[Inert]) -> Iterator[Inert]:
        for start in range(0, len(items), _BATCH):
            self._add(b"(")
            yield from items[start : start + _BATCH]
            self._add(b"e")

    def _dict(self, value: Dict | DictInBatches, key: int) -> Iterator[Inert]:
        self._add(b"}")
        self._remember(key)
        return self._set_items(value.batches() if isinstance(value, DictInBatches) else _in_batches(value.pairs))

    def _set_items(self, batches: Iterator[Pairs]) -> Iterator[Inert]:
        for batch in batches:
            self._add(b"(")
            for pair in batch:
                yield from pair
            self._add(b"u")

    def _set(self, value: Set, key: int) -> Iterator[Inert]:
        if self._protocol < 4:
            raise _NeedsProtocol4
        if not value.frozen:
            self._add(b"\x8f")
            self._remember(key)
        self._add(b"(")
        yield from value.items
        if value.frozen:
            self._close(key, b"\x91", b"1")
        else:
            self._add(b"\x90")

    def _call(self, value: Call, key: int) -> Iterator[Inert]:
        if value.how == "newobj_ex" and self._protocol < 4:
            raise _NeedsProtocol4
        yield value.func
        yield value.args
        if value.how == "newobj_ex":
            yield value.kwargs
        self._add(_CALLS[value.how])
        known = self._memo.get(key)
        if known is not None and _copies_its_items(value):
            raise MigrationRefused(
                "a list or dict of a class of its own leads back to itself, in a way that only protocol 0 or 1 writes",
                kind="unsupported-cycle",
                hint="Take the weights alone: `form='state_dict'` or `form='safetensors'`.",
            )
        if known is not None:  # one of its arguments refers back to it, and wrote it
            self._add(b"0")
            self._get(known)
            return
        self._remember(key)  # before its items and state, which may refer to it
        if value.items:
            yield from self._append(value.items)
        if value.pairs:
            yield from self._set_items(_in_batches(value.pairs))
        if value.state is not None:
            yield value.state
            self._add(b"b")

    def _plain_tensor(self, value: PlainTensor, key: int) -> None:
        """Write the calls that make a tensor; words, names and sizes are remembered by value."""
        cls, name, location, numel, offset, shape, stride, requires_grad = value
        self._global(_REBUILD_TENSOR, 0)
        self._add(b"((")
        self._str("storage", 0)
        self._global(cls, 0)
        data = name.encode("utf-8", "surrogatepass")
        self._add(b"".join((b"X", _U32(len(data)), data)))
        self._str(location, 0)
        self._add(b"%btQ%b" % (_encode_int(numel), _encode_int(offset)))
        self._sizes(shape)
        self._sizes(stride)
        self._add(_BOOLS[requires_grad])
        self._global(_ORDERED_DICT, 0)
        self._add(b")RtR")
        self._remember(key)

    def _sizes(self, values: tuple[int, ...]) -> None:
        """Write a shape or strides, or a reference to the same ones: many tensors share them."""
        encoded = b"".join(map(_encode_int, values))
        if (known := self._memo.get(encoded)) is not None:
            self._get(known)
            return
        self._add(b"(%bt" % encoded if len(values) > 3 else encoded + _TUPLES[len(values)])
        self._remember(encoded)


def _copies_its_items(value: Call) -> bool:
    """Return whether an object copies a list or dict when it is made, and so misses items added later."""
    rebuilt = isinstance(value.func, Global) and value.func.name == "_reconstructor"
    return rebuilt and isinstance(value.args, tuple) and any(isinstance(arg, list | Dict) for arg in value.args)


def _in_batches(items: Sequence[Inert]) -> Iterator[Sequence[Inert]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


_SUBSTITUTED = frozenset({Call, Dict, PersistentId})
"""Types of nodes that may be substituted."""
_CALLS: Final = {"reduce": b"R", "newobj": b"\x81", "newobj_ex": b"\x92"}
"""The opcode of each kind of call."""

_WRITERS: dict[type, Callable[[_Writer, Inert, int], Iterator[Inert] | None]] = {
    str: _Writer._str,
    bytes: _Writer._bytes,
    bytearray: _Writer._bytearray,
    tuple: _Writer._tuple,
    list: _Writer._list,
    Dict: _Writer._dict,
    DictInBatches: _Writer._dict,
    Set: _Writer._set,
    Global: _Writer._global,
    Call: _Writer._call,
    PlainTensor: _Writer._plain_tensor,
    PersistentId: _Writer._persistent_id,
}
"""The method that writes a node of each type; it returns an iterator over the nodes inside, if it may have some."""


def _encode_int(value: int) -> bytes:
    """Return the shortest opcode for an integer, as ``pickle`` itself writes it."""
    if 0 <= value < 1 << 8:
        return _BYTES[value]
    if 0 <= value < 1 << 16:
        return pack("<cH", b"M", value)
    if -(1 << 31) <= value < 1 << 31:
        return pack("<ci", b"J", value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (pack("<cB", b"\x8a", len(digits)) if len(digits) < 256 else pack("<ci", b"\x8b", len(digits))) + digits


_ENCODERS: Final[dict[type, Callable[[Inert], bytes]]] = {
    type(None): lambda _: b"N",
    bool: lambda value: _BOOLS[value],
    int: _encode_int,
    float: lambda value: pack(">cd", b"G", value),
}
"""Types that hold no nodes and are never put into the memo."""


def _encode_padding(nbytes: int, index: int, protocol: int) -> Iterator[bytes]:
    """
    Yield ``nbytes`` bytes of opcodes that do not change the value on the stack; none for a length of 1 or 3.

    PROTO again has two bytes. LONG_BINPUT of the value has five, and is faster to read if the padding is long. Opcodes
    that pop something are refused by torch's own unpickler. Indices start from ``index``, because unpicklers allocate a
    memo up to the largest one.
    """
    if nbytes < 2 or nbytes == 3:
        return
    versions = (nbytes - nbytes % 2 * 5) // 2 if nbytes < _LONG else 3 * nbytes % 5  # the fewest that leave fives
    yield bytes([0x80, protocol]) * versions
    stop = index + (nbytes - 2 * versions) // 5
    for start in range(index, stop, _LONG):
        indices = array("I", range(start, min(start + _LONG, stop)))
        if sys.byteorder == "big":
            indices.byteswap()
        puts, numbers = bytearray(b"r\0\0\0\0") * len(indices), indices.tobytes()
        for place in range(4):
            puts[1 + place :: 5] = numbers[place::4]
        yield bytes(puts)


_LONG: Final = 1 << 12
_BYTES: Final = [b"K" + bytes([value]) for value in range(256)]
_BOOLS: Final[tuple[bytes, bytes]] = (b"\x89", b"\x88")
_TUPLES: Final = (b")", b"\x85", b"\x86", b"\x87")
"""The opcode that makes a tuple of the top 0 to 3 items of the stack, by their number."""


# Nodes that occur in a tree more than once: candidates are those that its pickle got from the memo, or doubled. In a
# long pickle all candidates count, because walking its tree takes longer than putting each into the memo.


_VALUES: Final = frozenset({type(None), bool, int, float, str, Global})
"""Types that hold no nodes and are compared by value."""
_WINDOW: Final = 1 << 18
_LONGEST_GET: Final = 12
"""Bytes of an opcode that gets from the memo, with an index of ten digits."""
# Every byte is tried, as it is not known which are opcodes; a wrong match only adds a candidate.
_GET_SHORT: Final = re.compile(rb"h(?=(.))", re.DOTALL).findall
_GET_LONG: Final = re.compile(rb"j(?=(.{4}))", re.DOTALL).findall
_GET_TEXT: Final = re.compile(rb"g(?=\s*\+?([0-9]{1,10})\s*\n)").findall


def shared_nodes(source: Source, pickled: Pickle) -> set[int]:
    """Return the ids of all nodes that occur in the tree of a pickle more than once; for a long one, of some more."""
    is_long = pickled.end - pickled.start > _WINDOW
    indices = set(range(256)) if is_long else set()  # all that the shortest opcode can get
    for begin in range(pickled.start, pickled.end, _WINDOW):
        data = source.read(begin, min(_WINDOW + _LONGEST_GET, pickled.end - begin))
        if not is_long:
            indices.update(found[0] for found in set(_GET_SHORT(data)))
        indices.update(int.from_bytes(found, "little") for found in set(_GET_LONG(data)))
        indices.update(map(int, set(_GET_TEXT(data))))
    memo = pickled.memo
    got = [memo[index] for index in indices if (index in memo if isinstance(memo, dict) else index < len(memo))]
    candidates = {id(node) for node in (*got, *pickled.doubled) if type(node) not in _VALUES}
    return candidates if is_long else _met_again(pickled.root, candidates)


def _met_again(root: Inert, candidates: set[int]) -> set[int]:
    """Return the candidates that occur in a tree more than once."""
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
            if not _VALUES.issuperset(map(type, node)):  # as those of shapes and strides
                todo += [one for one in node if type(one) not in _VALUES]
        elif isinstance(node, PersistentId):
            todo.append(node.pid)
        elif isinstance(node, Call):
            todo += [one for one in (node.func, node.args, node.kwargs, node.state) if type(one) not in _VALUES]
            todo += node.items or ()
            todo += chain.from_iterable(node.pairs or ())
        elif isinstance(node, Dict):
            todo += chain.from_iterable(node.pairs)
        elif isinstance(node, Set):
            todo += node.items
    return again
