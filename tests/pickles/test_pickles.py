"""The pickle interpreter: every opcode of protocols 0 to 5, read as data."""

from __future__ import annotations

import pickle
import pickletools
from struct import pack
from types import SimpleNamespace
from typing import Any

import pytest

from ckptool import Global
from ckptool.errors import MalformedFile, TruncatedFile, UnsafePickle
from ckptool.pickles.nodes import Call, Dict, PersistentId, Set
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.source import BytesSource
from tests.build import named, ops, pickled
from tests.each import each
from tests.hostile.cases.pickles import LENGTHS


def read(data: bytes, start: int = 0) -> Pickle:
    return read_pickle(BytesSource(data), start)


def shown(node: Any) -> Any:
    """Return a tree of nodes as plain tuples that can be compared; a type stands for its class of nodes."""
    if isinstance(node, Global):
        return Global, str(node)
    if isinstance(node, Call):
        added = {name: getattr(node, name) for name in ("kwargs", "state", "items", "pairs")}
        added = {name: shown(value) for name, value in added.items() if value is not None}
        return Call, node.how, shown(node.func), shown(node.args), *added.items()
    if isinstance(node, PersistentId):
        return PersistentId, shown(node.pid)
    if isinstance(node, Dict):
        return Dict, [(shown(key), shown(value)) for key, value in node.pairs]
    if isinstance(node, Set):
        return Set, node.frozen, [shown(item) for item in node.items]
    if isinstance(node, list | tuple):
        return type(node)(shown(item) for item in node)
    return node


CLASS = named("m", "C")
C = (Global, "m.C")

# What each opcode does in a pickle that is as small as can be; an error's class where it is refused.
OPCODES: dict[str, tuple[bytes, Any]] = {
    "INT": (b"I-7\n.", -7),
    "BININT": (b"J\xf9\xff\xff\xff.", -7),
    "BININT1": (b"K\xff.", 255),
    "BININT2": (b"M\xff\xff.", 65_535),
    "LONG": (b"L-7L\n.", -7),
    "LONG1": (b"\x8a\x02\xff\x7f.", 32_767),
    "LONG4": (b"\x8b\x02\0\0\0\x00\x80.", -32_768),
    "STRING": (b"S'a\\x62\\143\\n'\n.", "abc\n"),
    "BINSTRING": (b"T\x02\0\0\0ab.", "ab"),
    "SHORT_BINSTRING": (b"U\x02ab.", "ab"),
    "BINBYTES": (b"B\x02\0\0\0a\xff.", b"a\xff"),
    "SHORT_BINBYTES": (b"C\x02a\xff.", b"a\xff"),
    "BINBYTES8": (b"\x8e\x02\0\0\0\0\0\0\0a\xff.", b"a\xff"),
    "BYTEARRAY8": (b"\x96\x02\0\0\0\0\0\0\0a\xff.", bytearray(b"a\xff")),
    "NEXT_BUFFER": (b"\x97.", UnsafePickle),
    "READONLY_BUFFER": (b"C\x01a\x98.", b"a"),
    "NONE": (b"N.", None),
    "NEWTRUE": (b"\x88.", True),
    "NEWFALSE": (b"\x89.", False),
    "UNICODE": (b"Va\\u20ac\xe9\n.", "a€é"),
    "SHORT_BINUNICODE": (b"\x8c\x03\xe2\x82\xac.", "€"),
    "BINUNICODE": (b"X\x03\0\0\0\xe2\x82\xac.", "€"),
    "BINUNICODE8": (b"\x8d\x03\0\0\0\0\0\0\0\xe2\x82\xac.", "€"),
    "FLOAT": (b"F-1.5e3\n.", -1500.0),
    "BINFLOAT": (b"G" + pack(">d", -0.1) + b".", -0.1),
    "EMPTY_LIST": (b"].", []),
    "APPEND": (b"]K\1aK\2a.", [1, 2]),
    "APPENDS": (b"](K\1K\2e(e.", [1, 2]),
    "LIST": (b"(K\1K\2l.", [1, 2]),
    "EMPTY_TUPLE": (b").", ()),
    "TUPLE": (b"(K\1K\2K\3K\4t.", (1, 2, 3, 4)),
    "TUPLE1": (b"K\1\x85.", (1,)),
    "TUPLE2": (b"K\1K\2\x86.", (1, 2)),
    "TUPLE3": (b"K\1K\2K\3\x87.", (1, 2, 3)),
    "EMPTY_DICT": (b"}.", (Dict, [])),
    "DICT": (b"(K\1K\2K\3K\4d.", (Dict, [(1, 2), (3, 4)])),
    "SETITEM": (b"}K\1K\2s.", (Dict, [(1, 2)])),
    "SETITEMS": (b"}(K\1K\2K\3K\4u(u.", (Dict, [(1, 2), (3, 4)])),
    "EMPTY_SET": (b"\x8f.", (Set, False, [])),
    "ADDITEMS": (b"\x8f(K\1K\2\x90.", (Set, False, [1, 2])),
    "FROZENSET": (b"(K\1K\2\x91.", (Set, True, [1, 2])),
    "POP": (b"K\1K\2(00.", 1),
    "DUP": (b"N2\x86.", (None, None)),
    "MARK": (b"((K\1tK\2t.", ((1,), 2)),
    "POP_MARK": (b"K\1(K\2N1.", 1),
    "GET": (b"K\1p300\n0K\2g300\n\x86.", (2, 1)),
    "BINGET": (b"K\1q\xff0K\2h\xff\x86.", (2, 1)),
    "LONG_BINGET": (b"K\1r\0\0\0\xff0K\2j\0\0\0\xff\x86.", (2, 1)),
    "PUT": (b"K\1p0\n0K\2p0\n0g0\n.", 2),
    "BINPUT": (b"Nq\7]q\7\x86h\7\x86.", ((None, []), [])),
    "LONG_BINPUT": (b"Nr\7\0\0\0]r\7\0\0\0\x86h\7\x86.", ((None, []), [])),
    "MEMOIZE": (b"K\1\x94K\2\x940h\1\x86.", (1, 2)),
    "EXT1": (b"\x82\1.", UnsafePickle),
    "EXT2": (b"\x83\1\0.", UnsafePickle),
    "EXT4": (b"\x84\1\0\0\0.", UnsafePickle),
    "GLOBAL": (b"cm\nC.inner\n.", (Global, "m.C.inner")),
    "STACK_GLOBAL": (b"\x8c\1m\x8c\1C\x93.", C),
    "REDUCE": (CLASS + b"K\1\x85R.", (Call, "reduce", C, (1,))),
    "BUILD": (CLASS + b")R}K\1K\2sb.", (Call, "reduce", C, (), ("state", (Dict, [(1, 2)])))),
    "INST": (b"(K\1im\nC\n.", (Call, "reduce", C, (1,))),
    "OBJ": (b"(" + CLASS + b"K\1o.", (Call, "reduce", C, (1,))),
    "NEWOBJ": (CLASS + b"K\1\x85\x81.", (Call, "newobj", C, (1,))),
    "NEWOBJ_EX": (CLASS + b")}K\1K\2s\x92.", (Call, "newobj_ex", C, (), ("kwargs", (Dict, [(1, 2)])))),
    "PROTO": (b"\x80\x05N.", None),
    "STOP": (b"N.", None),
    "FRAME": (b"\x95\2\0\0\0\0\0\0\0N.", None),
    "PERSID": (b"Pa:1\n.", (PersistentId, "a:1")),
    "BINPERSID": (b"K\1\x85Q.", (PersistentId, (1,))),
}
READABLE = {name: case for name, case in OPCODES.items() if case[1] is not UnsafePickle}


def test_no_opcode_is_forgotten() -> None:
    assert set(OPCODES) == {opcode.name for opcode in pickletools.opcodes}
    for name, (data, _) in OPCODES.items():
        assert name in {opcode.name for opcode, _, _ in pickletools.genops(data)}


@each("name", READABLE)
def test_each_opcode_does_what_it_should(name: str) -> None:
    data, expected = READABLE[name]
    found = read(data)

    assert shown(found.root) == expected
    assert type(found.root) is type(expected) or isinstance(found.root, Call | Dict | Global | PersistentId | Set)
    assert found.end == len(data)


@pytest.mark.parametrize("name", sorted(set(OPCODES) - set(READABLE)))
def test_opcodes_that_only_the_writer_understands_are_refused(name: str) -> None:
    with pytest.raises(UnsafePickle) as caught:
        read(b"N0" + OPCODES[name][0])

    assert caught.value.kind == ("unsafe-buffer" if name == "NEXT_BUFFER" else "unsafe-extension")
    assert caught.value.offset == 2


def test_a_byte_that_is_no_opcode_is_refused() -> None:
    known = {opcode.code.encode("latin-1") for opcode in pickletools.opcodes}
    for code in range(256):
        if bytes([code]) not in known:
            with pytest.raises(MalformedFile):
                read(bytes([code]) + b"." * 16)


@each("name", READABLE)
def test_an_opcode_may_stand_across_the_end_of_a_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.pickles.machine._WINDOW", 16)
    data, expected = READABLE[name]
    for shift in range(24):
        assert shown(read(b"K\x000" * (shift % 2) + b"N0" * (shift // 2) + data).root) == expected


@each("name", READABLE)
def test_a_pickle_that_is_cut_anywhere_is_truncated(name: str) -> None:
    data, _ = READABLE[name]
    for length in range(len(data)):
        with pytest.raises(TruncatedFile) as caught:
            read(data[:length])
        assert caught.value.kind == "truncated-pickle"
        assert caught.value.needed > caught.value.actual


@each(
    ("text", "value"),
    [(b"I00", False), (b"I01", True), (b"I0", 0), (b"I1", 1), (b"L0", 0), (b"L0L", 0), (b"I+5", 5), (b"I 5 ", 5)],
)
def test_numbers_in_text(text: bytes, value: object) -> None:
    found = read(text + b"\n.").root

    assert found == value
    assert type(found) is type(value)


@each(
    ("literal", "value"),
    [
        (b"'it\\'s'", "it's"),
        (b'"it\'s"', "it's"),
        (b"'\\\\n'", "\\n"),
        (b"'\\t\\r\\a\\0\\377'", b"\t\r\a\0\xff"),
        (b"'\\q'", "\\q"),
        (b"''", ""),
        (b"'\xc3\xa9' ", "é"),
        (b"'\xe9'", b"\xe9"),
    ],
)
def test_strings_of_python_2_are_text_where_they_can_be(literal: bytes, value: str | bytes) -> None:
    assert read(b"S" + literal + b"\n.").root == value


@each(
    "body",
    [
        b"]q\x00}q\x01h\x00h\x01\x87",
        b"]q\x01}q\x02h\x01h\x02\x87",  # Python 2 counts from one
        b"]r\x07\0\0\0}r\x03\0\0\0j\x07\0\0\0h\x03\x87",
        b"]q\x05}q\x00(K\x01tq\x02h\x05h\x00h\x02\x87\x86\x86",
        b"]q\x00}q\x00h\x00\x87",  # the later one counts
        b"]p1\n}q\x000g1\nh\x00\x86\x86",
        b"]\x94}\x94h\x00h\x01\x87",
        b"]q\x03}\x94)\x94h\x03h\x01h\x02\x87\x87\x86",  # MEMOIZE counts what is there
        b"]\x94}q\x01)q\x09N\x94h\x00h\x01h\x09h\x03\x87\x87\x87",
    ],
)
def test_what_is_remembered_in_any_order_is_what_pickle_remembers(body: bytes) -> None:
    data = b"\x80\x04(" + body + b"t."

    assert shape_of(read(data).root) == shape_of(pickle.loads(data))


def shape_of(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return the kinds of nodes in a tuple, with a number where a list or dict was met before."""
    seen = {} if seen is None else seen
    if isinstance(value, tuple):
        return tuple(shape_of(item, seen) for item in value)
    if isinstance(value, list | dict | Dict):
        return ("list" if isinstance(value, list) else "dict", seen.setdefault(id(value), len(seen)))
    return value


def test_one_name_is_one_node_and_stands_in_the_list_once() -> None:
    found = read(CLASS + named("a", "b") + CLASS + b"\x87.")

    assert found.root[0] is found.root[2]
    assert [str(name) for name in found.globals] == ["m.C", "a.b"]


def test_persistent_ids_are_listed_in_order() -> None:
    found = read(b"Pa\nK\1QPb\n\x87.")

    assert [node.pid for node in found.persistent_ids] == ["a", 1, "b"]
    assert list(found.root) == list(found.persistent_ids)


def test_a_pickle_ends_at_its_stop_and_another_may_follow() -> None:
    data = b"junk" + pickled(1) + pickled(2) + b"more"
    first = read(data, 4)
    second = read(data, first.end)

    assert (first.root, first.start, second.root, second.start) == (1, 4, 2, first.end)
    assert data[second.end :] == b"more"


def test_what_lies_behind_a_pickle_is_not_read() -> None:
    data, reads = pickled(["a" * 1000] * 100), []

    def fetch(offset: int, nbytes: int) -> bytes:
        reads.append(nbytes)
        return data[offset : offset + nbytes].ljust(nbytes, b"\0")

    read_pickle(SimpleNamespace(nbytes=1 << 40, read=fetch, cancellation=None))

    assert sum(reads) < 4 * len(data)


# Each with the offset of the opcode that is wrong.
ERRORS = {
    "nothing to pop": (b"0", 0),
    "a dict of one": (b"(K\1d", 3),
    "a tuple of three of two": (b"NN\x87", 2),
    "a name that is a number": (b"K\1K\2\x93", 4),
    "a call of nothing": (b"NR", 1),
    "a class of nothing": (b"(o", 1),
    "a mark that is not there": (b"t", 0),
    "a memo that is not there": (b"h\7", 0),
    "a text memo that is not there": (b"Ng7\n", 1),
    "a memo below zero": (b"Np-1\n", 1),
    "a memo above all": (b"Np4294967296\n", 1),
    "an item for a number": (b"K\1Na", 3),
    "items for a set": (b"\x8f(Ne", 3),
    "a pair for a list": (b"]NNs", 3),
    "members for a dict": (b"}(N\x90", 3),
    "an odd number of pairs": (b"}(Nu", 3),
    "a state for a list": (b"]}b", 2),
    "a second state": (b"NN\x81}b}b", 6),
    "a remembered nothing": (b"q\0", 0),
    "no value": (b"(", 1),
    "a string without quotes": (b"NSa\n", 1),
    "a number of negative length": (b"N\x8b\xff\xff\xff\xff", 1),
    "a string of negative length": (b"NT\xff\xff\xff\xff", 1),
    "another index of the memo": (b"]q\5h\2", 3),
    "a later index of the memo": (b"]q\0h\1", 3),
    "a far index of the memo": (b"]\x94j\xff\xff\xff\xff", 2),
    **{f"protocol {number}": (bytes([0x80, number]), 0) for number in (6, 255)},
    **{
        f"a number that readers disagree about: {text!r}": (text + b"\n", 0)
        for text in (b"I", b"I007", b"I0x10", b"I1_0", "I٣".encode(), b"L7LL", b"L--7", b"Fone", b"F")
    },
    **{f"no quotes: {text!r}": (b"S" + text + b"\n", 0) for text in (b"abc", b"'abc", b"'", b"'abc\"", b"")},
    **{
        f"no UTF-8: {data!r}": (data, 0)
        for data in (
            b"X\1\0\0\0\xff",
            b"\x8c\1\xff",
            b"\x8d\1\0\0\0\0\0\0\0\xff",
            b"c\xff\nC\n",
            b"V\\ud8\n",
            b"P\xff\n",
        )
    },
}


@each("name", ERRORS)
def test_an_error_tells_the_offset_of_its_opcode(name: str) -> None:
    data, offset = ERRORS[name]
    with pytest.raises(MalformedFile) as caught:
        read(b"N0" + data + b"." * 16)

    assert caught.value.kind == "malformed-pickle"
    assert caught.value.offset == 2 + offset


def test_offsets_are_right_far_behind_the_first_window() -> None:
    data = ops(["a" * 50] * 3000) + b"0" + b"K\1K\2a."
    with pytest.raises(MalformedFile) as caught:
        read(data)

    assert caught.value.offset == len(data) - 2
    for opcode in (b"\x82\1", b"\x97"):
        with pytest.raises(UnsafePickle) as refused:
            read(data[:-2] + opcode)
        assert refused.value.offset == len(data) - 2


@each("name", [name for name in LENGTHS if name.startswith(("BIN", "SHORT", "BYTE", "LONG"))])
def test_a_length_may_reach_to_the_end_and_not_beyond(name: str) -> None:
    code, width = LENGTHS[name][:1], len(LENGTHS[name]) - 1
    head = b"\x80\x04" + code + (40).to_bytes(width, "little")

    read(head + b"." * 41)
    with pytest.raises(TruncatedFile):
        read(head + b"." * 39)
