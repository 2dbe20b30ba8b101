"""
What the words for arguments in ``constructions`` stand for: a test of each form.

A value is a literal of the pickle (numbers, text, bytes, lists, tuples, dicts, sets: see ``nodes``), or the result of a
listed construction, for which ``Values`` has the word. An object that got other attributes, is used before it gets its
state, or was made in another form, has no word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from math import prod
from operator import mul
from typing import Final, TypeAlias

from ckptool.pickles.alarms import words
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Set, lookup, state_pairs

LONGEST_NUMBER: Final = 1000
"""Digits of a number that is given as text."""
LARGEST_ELEMENT: Final = 1 << 16
"""Bytes of an element of an array."""
_LONGEST_TEXT: Final = 2 * LONGEST_NUMBER + 32
_COST_OF_KEY: Final = 16
"""A key with parts, or with more bits than a hash, counts as this many numbers: comparing it takes longer."""
_DEEPEST_KEY: Final = 4
_LONGEST_KEY: Final = 64
_KEY_BITS: Final = 61
_USUAL_KEYS: Final = range(1 << 18)
"""Numbers that do not count: indices of parameters and words, too few to have many equal hashes."""
_MAX_RANK: Final = 64
_FLAGS: Final = ("conj", "neg")
_LAYOUTS: Final = frozenset(
    f"torch.{name}" for name in words("strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc")
)


@lru_cache(maxsize=256)
def _element(cls: str) -> str:
    """Return the type of the elements of a storage, by the full name of its class."""
    return cls.rpartition(".")[2].removesuffix("Storage").replace("Untyped", "Byte")


class Budget:
    """How much of something is left for one pickle."""

    def __init__(self, left: int) -> None:
        self._left = left

    def takes(self, count: int = 1) -> bool:
        """Take some, and return whether there was enough."""
        self._left -= count
        return self._left >= 0


class Values:
    """What is known of the values of one pickle: names, words for results of calls, storages, and costs so far."""

    def __init__(self, names: Mapping[int, str], nbytes: int) -> None:
        self.names = names
        """The full name of each Global, by the node's id, as Python maps it."""
        self.made: dict[int, str] = {}
        """The word for the result of each listed call, by the node's id."""
        self.state_at: dict[int, int] = {}
        """The offset of the opcode that gives an object its state, by the id of its call."""
        self.at = 0
        """The offset of the opcode that is judged now."""
        self.storages: dict[int, int] = {}
        """The number of elements of each storage, by the id of its node."""
        self.quantised: set[int] = set()
        """Storages whose type has scales: a tensor on them without scales would crash the process at its first use."""
        self.has_old_strings = False
        """Whether there are strings of Python 2, whose type depends on the reader."""
        self.copies = Budget(16 * nbytes + 65_536)
        """Bytes that calls may still copy; one value may be an argument of many calls."""
        self.memory = Budget(64 * nbytes + (1 << 20))
        """Bytes of memory that results of calls may still take: a call takes few bytes of the pickle."""
        self.keys = Budget(1 << 14)
        """Numbers as keys. A file can choose them to have one hash, and then each takes longer than the one before."""
        self.nested = Budget(1000)
        """Containers that hold others and are freed recursively, which takes from the stack of the process."""
        self._stored: dict[str | int, tuple[Inert, ...]] = {}
        self._alike: dict[tuple[Inert, ...], tuple[Inert, ...]] = {}
        self._offsets: dict[str, Inert] = {}

    def has_storage(self, node: Inert, cls: str, numel: int) -> None:
        self.storages[id(node)] = numel
        if _element(cls).startswith("Q"):
            self.quantised.add(id(node))

    def is_one_storage(self, pid: tuple[Inert, ...], cls: str) -> bool:
        """
        Return whether all persistent ids of a storage's key agree in type and size: torch takes those of the first.

        On the device ``meta``, a key may have only one: torch would read its record again for each.
        """
        _, _, key, location, numel, *view = pid
        if location == "meta" and numel and key in self._stored:
            return False
        kind = (numel and _element(cls), numel)
        held: tuple[Inert, ...] = self._alike.setdefault(kind, kind)  # one tuple for all storages of a kind
        is_one = self._stored.setdefault(key, held) == held
        for name, *part in filter(None, view):
            held = (*held, key, *part)
            is_one &= self._stored.setdefault(name, held) == held
        return is_one

    def name(self, node: Inert) -> str:
        return self.names.get(id(node), "") if type(node) is Global else ""

    def kind(self, node: Inert) -> str:
        """Return the word for the result of a call, if it has its state by now; an empty text for anything else."""
        made = self.made.get(id(node), "")
        return made if made and self.state_at.get(id(node), 0) <= self.at else ""

    def takes_index(self, index: Call) -> bool:
        """Return whether an index may be a key; it is counted if others with its hash have another offset."""
        offset = lookup(state_pairs(index.state), "offset")
        numbers = offset.args[0] if type(offset) is Call else ()
        return self._offsets.setdefault(str(hash(numbers)), numbers) == numbers or self.keys.takes(_COST_OF_KEY)


Form: TypeAlias = Callable[[Inert, Values], bool]


def _is(*kinds: type) -> Form:
    return lambda node, _: type(node) in kinds


def _made(*words: str) -> Form:
    return lambda node, values: type(node) is Call and values.kind(node) in words


def _named(*names: str) -> Form:
    known = frozenset(names)
    return lambda node, values: values.name(node) in known


def _matching(pattern: str) -> Form:
    # The pattern is compiled on use: few files need it.
    def form(node: Inert, values: Values) -> bool:
        is_short = type(node) is str and len(node) <= _LONGEST_TEXT and values.copies.takes(8 * len(node))
        return is_short and re.fullmatch(pattern, node) is not None

    return form


def _list(node: Inert, values: Values) -> bool:
    return type(node) is list and _row(node, values)


def _row(node: Inert, values: Values) -> bool:
    return type(node) in (list, tuple) and values.copies.takes(8 * len(node))


def _keys(node: Inert, values: Values) -> bool:
    return _list(node, values) and values.memory.takes(64 * len(node)) and all(is_key(one, values) for one in node)


def _pairs(node: Inert, values: Values) -> bool:
    if not _list(node, values) or not values.memory.takes(128 * len(node)):
        return False
    return all(type(one) in (list, tuple) and len(one) == 2 and is_key(one[0], values) for one in node)


def _counts(node: Inert, values: Values) -> bool:
    return type(node) is Dict and values.memory.takes(64 * len(node.pairs))


def _tuple_of_ints(node: Inert, _: Values) -> bool:
    return type(node) is tuple and len(node) <= _MAX_RANK and all(type(one) is int for one in node)


def _ints(node: Inert, values: Values) -> bool:
    return _tuple_of_ints(node, values) or (type(node) is Call and values.kind(node) == "size")


def _bytes(node: Inert, values: Values) -> bool:
    if type(node) in (bytes, bytearray):
        return values.copies.takes(len(node))
    return type(node) is Call and values.kind(node) == "bytes" and values.copies.takes(bytes_of(node))


def _some_bytes(count: int) -> Form:
    return lambda node, values: _bytes(node, values) and bytes_of(node) == count


def content(node: Inert) -> bytes | None:
    """Return bytes that are a literal, or that a call makes from text; None if the text is not Latin-1."""
    if type(node) in (bytes, bytearray):
        return bytes(node)
    try:
        return node.args[0].encode("latin-1") if node.args else b""
    except UnicodeEncodeError:
        return None


def bytes_of(node: Inert) -> int:
    """Return the length of bytes that are a literal, or that a call makes from text."""
    return len(node) if type(node) in (bytes, bytearray) else len(node.args[0]) if node.args else 0


def _array(node: Inert, values: Values) -> bool:
    """Test for an array that another is made from, and count the copy at 16 bytes for each byte."""
    if type(node) is not Call or values.kind(node) != "array":
        return False
    data = node.args[0] if len(node.args) > 3 else node.state[4] if node.state is not None else b""
    return values.copies.takes(16 * bytes_of(data))


def _hooks(node: Inert, values: Values) -> bool:
    if node is None:
        return True
    is_dict = type(node) is Call and values.kind(node) == "ordered dict"
    return is_dict and not (node.args or node.pairs or node.state is not None)


def _flags(node: Inert, _: Values) -> bool:
    if type(node) is not Dict or len(node.pairs) > len(_FLAGS):
        return False
    return all(key in _FLAGS and type(value) is bool for key, value in node.pairs)


def _attributes(node: Inert, values: Values) -> bool:
    """Test for attributes of a tensor that are set by name: simple values, and no names for which torch has setters."""
    if type(node) is not Dict:
        return node is None
    return values.copies.takes(16 * len(node.pairs)) and all(
        type(key) is str
        and key not in _SETTERS
        and (key == "_is_buffer" or not key.startswith("_"))
        and (_is_simple(value) or (_row(value, values) and all(map(_is_simple, value))))
        for key, value in node.pairs
    )


def _is_simple(value: Inert) -> bool:
    return type(value) in (bool, int, float, str, type(None))


_SETTERS: Final = words("data grad requires_grad names real imag grad_fn device dtype layout shape")


def _fields(node: Inert, values: Values) -> bool:
    return _counts(node, values) and all(type(key) is str and not key.startswith("_") for key, _ in node.pairs)


def _metadata(node: Inert, values: Values) -> bool:
    if type(node) is not Dict or len(node.pairs) != 1 or node.pairs[0][0] != "_metadata":
        return False
    held = node.pairs[0][1]
    return type(held) is Dict or (type(held) is Call and values.made.get(id(held)) == "ordered dict")


def _index_fields(node: Inert, values: Values) -> bool:
    """Test for the fields of an index, which may be a key: its name's hash is random, and its number small."""
    if type(node) is not Dict or len(node.pairs) > len(_OF_INDEX):
        return False
    return all(type(key) is str and key in _OF_INDEX and _OF_INDEX[key](one, values) for key, one in node.pairs)


_OF_INDEX: Final[dict[str, Form]] = {
    "fqn": lambda node, _: type(node) is str and node != "",
    "offset": lambda node, values: node is None or (type(node) is Call and values.kind(node) == "size"),
    "index": lambda node, _: node is None or (type(node) is int and node in _USUAL_KEYS),
}


def elements_of(node: Inert, values: Values) -> int | None:
    """Return how many elements a dense tensor has; None for other nodes, or if its storage has fewer."""
    while type(node) is Call and values.kind(node) == "tensor":
        if values.name(node.func) != "torch._utils._rebuild_parameter":
            return dense(node.args, values)
        node = node.args[0]
    return None


def dense(args: tuple[Inert, ...], values: Values) -> int | None:
    """Return how many elements a view of a storage has; None if the storage is not known or has fewer."""
    count, sizes = values.storages.get(id(args[0])), args[2]
    if count is None or type(sizes) is not tuple:
        return None
    found = prod(sizes)
    return found if all(one >= 0 for one in sizes) and found <= count else None


def extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """Return how many elements of the storage a view spans from its offset on; None if size and stride are invalid."""
    if len(size) != len(stride) or len(size) > _MAX_RANK or (size and min(*size, *stride) < 0):
        return None
    return 0 if 0 in size else sum(map(mul, size, stride)) - sum(stride) + 1


def _solid(node: Inert, values: Values) -> bool:
    """Test for a dense tensor that another is made from, and count the copy of its elements."""
    count = elements_of(node, values)
    return count is not None and values.copies.takes(16 * count)


def _sparse_parts(node: Inert, values: Values) -> bool:
    if type(node) is not tuple or not 3 <= len(node) <= 4:
        return False
    *tensors, last = node
    if type(last) in (bool, type(None)):
        *tensors, last = tensors
    return _ints(last, values) and len(tensors) >= 2 and all(_solid(one, values) for one in tensors)


def _quantizer(node: Inert, values: Values) -> bool:
    if type(node) is not tuple or not 3 <= len(node) <= 4:
        return False
    if len(node) == 3:
        return values.name(node[0]) == "torch.per_tensor_affine" and type(node[1]) is float and type(node[2]) is int
    is_scheme = values.name(node[0]) in ("torch.per_channel_affine", "torch.per_channel_affine_float_qparams")
    return is_scheme and _solid(node[1], values) and _solid(node[2], values) and type(node[3]) is int


def _properties(node: Inert, values: Values) -> bool:
    words = ("dtype of torch", "layout", "bool", "memory format", "bool")
    return (
        type(node) is tuple
        and len(node) == 5
        and all(FORMS[w](one, values) for w, one in zip(words, node, strict=True))
    )


# numpy's dtypes


_CODE: Final = r"[<>=|]?(b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[mM]8|[SU]0|[SUV][1-9][0-9]{0,5})"
_INHERITED: Final = 0x1B
_OF_FIELDS: Final = 0x10
_ALIGNED: Final = 0x80


def element_size(node: Inert, values: Values) -> int | None:
    """Return the bytes of an element of a dtype; None if the node is not a complete, listed dtype."""
    if type(node) is not Call or values.kind(node) != "dtype":
        return None
    return _size_of_code(node.args[0])


def _size_of_code(code: str) -> int | None:
    found = re.fullmatch(_CODE, code, re.ASCII)
    if found is None:
        return None
    return int(found[1][1:]) * (4 if found[1][0] == "U" else 1)


def _code(node: Inert, _: Values) -> bool:
    size = _size_of_code(node) if type(node) is str and len(node) < 10 else None
    return size is not None and size <= LARGEST_ELEMENT


def is_state_of_dtype(call: Call, values: Values) -> bool:
    """Return whether the state of a dtype fits its code, and its fields are within the element."""
    code = call.args[0]
    state = _without_unit(call.state, code, values)
    if type(state) is not tuple or len(state) != 8 or state[0] != 3 or state[1] not in ("<", ">", "|", "="):
        return False
    _, _, subarray, names, fields, size, alignment, flags = state
    if subarray is not None or not all(type(one) is int for one in (state[0], size, alignment, flags)):
        return False
    kind = code.lstrip("<>=|")[0]
    if kind not in "SUV":
        return (names, fields, size, alignment, flags) == (None, None, -1, -1, 0)
    if size != _size_of_code(code):
        return False
    if names is None:
        return fields is None and (alignment, flags) == ((4, 8) if kind == "U" else (1, 0))
    if (
        kind != "V"
        or state[1] != "|"  # else numpy swaps bytes by fields that may still be missing
        or values.has_old_strings
        or type(names) is not tuple
        or type(fields) is not Dict
        or alignment not in (1, 2, 4, 8, 16)
    ):
        return False
    if not values.copies.takes(64 * len(names)) or [key for key, _ in fields.pairs] != list(names):
        return False
    if not all(type(one) is str for one in names):
        return False
    inherited = _OF_FIELDS
    for _, field in fields.pairs:
        if type(field) is not tuple or len(field) != 2 or type(field[1]) is not int or field[1] < 0:
            return False
        nbytes = element_size(field[0], values)
        if not nbytes or field[1] + nbytes > size:
            return False
        inner = field[0].state
        if type(inner) is tuple:
            if inner[3] is not None and not values.nested.takes():
                return False  # numpy recurses into fields of fields
            inherited |= inner[7] & _INHERITED
    return flags & ~_ALIGNED == inherited and len(set(names)) == len(names)


def _without_unit(state: Inert, code: str, values: Values) -> Inert:
    """Return a dtype's state; of datetime64 and timedelta64, without the unit, which must be valid, else None."""
    if code.lstrip("<>=|")[0] not in "mM":
        return state
    is_time = type(state) is tuple and len(state) == 9 and type(state[0]) is int and state[0] == 4
    return (3, *state[1:8]) if is_time and _is_unit(state[8], values) else None


def _is_unit(node: Inert, values: Values) -> bool:
    """Test for the unit of a numpy time: an optional empty dict, then the unit's name, a count, and 1, 1."""
    if type(node) is not tuple or len(node) != 2 or type(node[1]) is not tuple or len(node[1]) != 4:
        return False
    if node[0] is not None and (type(node[0]) is not Dict or node[0].pairs):  # it is empty before numpy 2
        return False
    unit, *counts = node[1]
    is_known = _bytes(unit, values) and content(unit) in _UNITS
    return is_known and [type(one) for one in counts] == [int] * 3 and 0 < counts[0] < 1 << 31 and counts[1:] == [1, 1]


_UNITS: Final = tuple(word.encode() for word in words("Y M W D h m s ms us ns ps fs as generic"))


def _array_state(node: Inert, values: Values) -> bool:
    if type(node) is not tuple or len(node) != 5 or node[0] != 1 or type(node[0]) is not int:
        return False
    _, shape, dtype, is_fortran, data = node
    return type(is_fortran) in (bool, int) and _bytes(data, values) and fits(shape, dtype, data, values)


def fits(shape: Inert, dtype: Inert, data: Inert, values: Values) -> bool:
    """Return whether bytes have exactly the size of an array of this shape and dtype."""
    nbytes = element_size(dtype, values)
    if not nbytes or type(shape) is not tuple or len(shape) > _MAX_RANK:
        return False
    if not all(type(one) is int and 0 <= one < 1 << 62 for one in shape):
        return False
    return prod(shape) * nbytes == bytes_of(data)


def is_key(node: Inert, values: Values, depth: int = 0) -> bool:
    """Return whether a value may be a key: hashing it is fast, and few keys have hashes that a file can choose."""
    kind = type(node)
    if kind is str or kind is bool or node is None or kind is bytes or kind is Global:
        return True
    if kind is float or (kind is int and node.bit_length() <= _KEY_BITS):
        return (kind is int and node in _USUAL_KEYS) or values.keys.takes()
    if kind is Call and values.made.get(id(node)) == "index":
        return values.takes_index(node)
    if not values.keys.takes(_COST_OF_KEY):
        return False
    if kind is tuple or (kind is Set and node.frozen):
        held = node if kind is tuple else node.items
        return (
            depth < _DEEPEST_KEY and len(held) <= _LONGEST_KEY and all(is_key(one, values, depth + 1) for one in held)
        )
    return kind is Call and values.made.get(id(node), "") in _HASHED


_HASHED: Final = frozenset(("size", "device", "date", "time", "duration", "time zone", "path", "number", "scalar"))
"""Words of results that can be hashed quickly."""

REBUILDERS: Final = tuple(f"torch._utils.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"))
_FACTORIES: Final = (
    *(f"builtins.{name}" for name in words("list dict set frozenset tuple int float str bool bytes")),
    *(f"collections.{name}" for name in words("OrderedDict defaultdict Counter deque")),
)
NBYTES: Final = {
    f"torch.{name}": nbytes
    for nbytes, names in {
        1: "bool int1 int2 int3 int4 int5 int6 int7 int8 uint1 uint2 uint3 uint4 uint5 uint6 uint7 uint8 float8_e5m2"
        " float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2 bits8 bits1x8 bits2x4 bits4x2"
        " qint8 quint8 quint4x2 quint2x4",
        2: "uint16 int16 float16 bfloat16 half short bits16",
        4: "uint32 int32 float32 complex32 bcomplex32 float int chalf qint32",
        8: "uint64 int64 float64 complex64 double long cfloat",
        16: "complex128 cdouble",
    }.items()
    for name in names.split()
}
"""torch's dtypes, and the bytes of an element of each."""

FORMS: Final[dict[str, Form]] = {
    "None": lambda node, _: node is None,
    "bool": _is(bool),
    "int": _is(int),
    "int?": _is(int, type(None)),
    "number": lambda node, _: type(node) is int and node.bit_length() <= 512,
    "float": _is(float, int),
    "str": _is(str),
    "list": _list,
    "()": lambda node, _: node == () and type(node) is tuple,
    "the shape of nothing": lambda node, _: type(node) is tuple and node == (0,) and type(node[0]) is int,
    "'latin1'": lambda node, _: node in ("latin1", "latin-1") and type(node) is str,
    "0": lambda node, _: type(node) in (bool, int) and node == 0,
    "1": lambda node, _: type(node) in (bool, int) and node == 1,
    "list of keys": _keys,
    "list of pairs": _pairs,
    "dict": _counts,
    "ints": _ints,
    "tuple of ints": _tuple_of_ints,
    "bytes": _bytes,
    "b": lambda node, values: _bytes(node, values) and content(node) == b"b",
    "4 bytes": _some_bytes(4),
    "6 bytes": _some_bytes(6),
    "10 bytes": _some_bytes(10),
    "text": lambda node, values: type(node) is str and values.copies.takes(len(node)),
    "decimal": _matching(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:E[+-]?[0-9]{1,18})?|s?NaN|Infinity)"),
    "ratio": _matching(r"-?[0-9]+(?:/[0-9]+)?"),
    "part of a path": lambda node, values: (
        type(node) is str and "\0" not in node and values.copies.takes(16 * len(node))
    ),
    "factory": _named(*_FACTORIES),
    "the class object": _named("builtins.object"),
    "the class Namespace": _named("argparse.Namespace"),
    "the class ndarray": _named("numpy.ndarray"),
    "code of a type": _code,
    "storage": lambda node, values: id(node) in values.storages,
    "hooks": _hooks,
    "flags": _flags,
    "dtype of torch": lambda node, values: values.name(node) in NBYTES,
    "name of a device": _matching(r"[a-z][a-z0-9_]{0,30}(?::[0-9]{1,4})?"),
    "device to copy to": _matching(r"(?:cpu|cuda|xpu|mps|xla|meta|npu)(?::[0-9]{1,4})?"),
    "name of a layout": lambda node, _: type(node) is str and node in _LAYOUTS,
    "class of tensors": _named(
        "torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"
    ),
    "attributes": _attributes,
    "quantizer": _quantizer,
    "parts": _sparse_parts,
    "dense tensor": _solid,
    "fields": _fields,
    "fields of an index": _index_fields,
    "_metadata": _metadata,
    "properties": _properties,
    "state of an array": _array_state,
    "number to 2": lambda node, _: type(node) is int and 0 <= node <= 2,
    "number from 1 to 3": lambda node, _: type(node) is int and 1 <= node <= 3,
    "array": _array,
    "anything": lambda _node, _values: True,
    "any tensor": _made("tensor", "tensor with attributes"),
    "name of a row for tensors": _named(*REBUILDERS),
    "its arguments": _is(tuple),
    "bytes of a storage": lambda node, values: _bytes(node, values) and content(node) is not None,
    **{word: _made(word) for word in ("dtype", "layout", "duration", "time zone", "memory format")},
}
"""The test for each word of a form."""


def storage_size(pid: Inert, classes: Collection[int]) -> int | None:
    """
    Return the number of elements of the storage that a persistent id names; None if it has another form.

    ``classes`` are the ids of the nodes that name classes of storages.
    """
    if type(pid) is not tuple or not 5 <= len(pid) <= 6:
        return None
    word, cls, key, location, numel = pid[:5]
    if word != "storage" or id(cls) not in classes or type(location) is not str or type(key) not in (str, int):
        return None
    if type(numel) is not int or not 0 <= numel < 1 << 62:
        return None
    if len(pid) == 6 and pid[5] is not None:
        view = pid[5] if type(pid[5]) is tuple else ()
        if [type(one) for one in view] != [str, int, int]:
            return None
        _, begin, count = view
        return count if 0 <= begin <= begin + count <= numel else None
    return numel
