"""
Pickle bytes → inert nodes, for protocols 0 to 5. Looks up no name, calls nothing, hashes no key.

Strategy: one loop over the opcodes. The dozen that make up nearly all of a checkpoint (strings, small ints, memo,
tuples, calls) are handled in the loop itself, in order of frequency; the rest go through the ``_RARE`` table to one
small method each. Bytes come from a window onto the source that is moved on demand, so a pickle at the head of a
file of gigabytes costs what the pickle is long.

Rules:
1. Nothing is read before its length has been compared with what is left.
2. A mark pushes the stack aside and starts a new one, as CPython's unpickler does, so no mark is ever searched for.
3. Whatever a stream does wrong ends in MalformedFile with the offset of the opcode.

See Python's Lib/pickletools.py, which documents every opcode.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from ckptool.errors import MalformedFile, TruncatedFile, UnsafePickle
from ckptool.files import Source
from ckptool.inert import Call, Dict, Global, Inert, PersistentId, Set

_U16 = Struct("<H").unpack_from
_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_U64 = Struct("<Q").unpack_from
_F64 = Struct(">d").unpack_from

_WINDOW: Final = 1 << 16
_LONGEST_FIXED: Final = 9  # an opcode and eight bytes of argument

_INTEGER = re.compile(rb"[+-]?(?:0|[1-9][0-9]*)")  # readers disagree about leading zeros: octal, decimal, refused
_MAX_INT_NBYTES: Final = 1024
_ESCAPES = re.compile(rb"\\(?:([abfnrtv\\'\"\n])|x([0-9a-fA-F]{2})|([0-7]{1,3}))")
_ESCAPED: Final = {
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
    b"\n": b"",
}


class Pickle(NamedTuple):
    """One pickle of a source: ``source[start:end]`` in bytes, and what it says."""

    root: Inert
    start: int
    end: int
    protocol: int
    globals: tuple[Global, ...]
    """Every name the pickle asks for, in order of first use. None was looked up."""
    persistent_ids: tuple[PersistentId, ...]
    """Every reference to something outside, in order."""


def read_pickle(source: Source, start: int = 0) -> Pickle:
    """
    Interpret the pickle that begins at byte ``start`` of ``source``.

    Nothing in it runs, whatever it asks for. Bytes behind its end are not looked at.

    Raises:
        TruncatedFile: The source ends inside the pickle.
        MalformedFile: The bytes are no pickle; ``offset`` is that of the opcode.
        UnsafePickle: An opcode refers to this process's extension registry or to out-of-band buffers.
    """
    return _Interpreter(source, start).run()


class _NeedMore(Exception):
    """The window ends inside the opcode that is being read; ``end`` is the first byte that is not needed."""

    def __init__(self, end: int) -> None:
        self.end = end


class _Interpreter:
    """The machine's registers: a stack, the stacks set aside by marks, a memo, and a window onto the source."""

    def __init__(self, source: Source, start: int) -> None:
        self._source = source
        self._start = start
        self._base = start  # source offset of data[0]
        self.data = b""
        self.pos = 0
        self.opcode = 0  # where the opcode stands that errors are about
        self.stack: list[Inert] = []
        self.marks: list[list[Inert]] = []
        self.memo: dict[int, Inert] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.persistent_ids: list[PersistentId] = []
        self.protocol = 0

    def run(self) -> Pickle:
        try:
            while True:
                try:
                    root = self._loop()
                    break
                except _NeedMore as need:
                    self._move_window(need.end)
        except UnicodeDecodeError as error:
            self.opcode = self.pos
            raise self._malformed("text that is not UTF-8") from error
        except struct.error as error:
            raise self._truncated(len(self.data) + 1) from error
        except (IndexError, KeyError, ValueError) as error:
            if self.pos + 1 >= len(self.data):  # the last byte of the source, and no STOP
                raise self._truncated(len(self.data) + 1) from error
            # Stack underflow, a memo entry that was never put, a number that is none.
            self.opcode = self.pos
            raise self._malformed(f"opcode 0x{self.data[self.pos]:02x} has no valid operand") from error
        return Pickle(
            root,
            self._start,
            self._base + self.pos,
            self.protocol,
            tuple(self.globals.values()),
            tuple(self.persistent_ids),
        )

    def _loop(self) -> Inert:  # noqa: C901 - the hot loop: calls would double its time
        """
        Run until STOP and return the value, or raise _NeedMore with ``pos`` at the opcode to begin again from.

        Every branch reads all of its argument before it touches the stack, so beginning again is safe.
        """
        data, pos, stack, marks, memo = self.data, self.pos, self.stack, self.marks, self.memo
        limit = len(data) - _LONGEST_FIXED
        if self._base + len(data) == self._source.nbytes:
            limit = len(data)  # no more to come: an opcode that needs more is truncated
        rare, persistent_ids = _RARE, self.persistent_ids
        try:
            while True:
                if pos >= limit:
                    raise _NeedMore(pos + 1)
                op = data[pos]
                if op == 0x72:  # LONG_BINPUT
                    memo[_U32(data, pos + 1)[0]] = stack[-1]
                    pos += 5
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos + 1])
                    pos += 2
                elif op == 0x71:  # BINPUT
                    memo[data[pos + 1]] = stack[-1]
                    pos += 2
                elif op == 0x68:  # BINGET
                    stack.append(memo[data[pos + 1]])
                    pos += 2
                elif op == 0x28:  # MARK
                    marks.append(stack)
                    stack = []
                    pos += 1
                elif op == 0x74:  # TUPLE
                    items = tuple(stack)
                    stack = marks.pop()
                    stack.append(items)
                    pos += 1
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = Call(stack[-1], args)
                    pos += 1
                elif op == 0x58:  # BINUNICODE
                    begin = pos + 5
                    end = begin + _U32(data, pos + 1)[0]
                    if end > len(data):
                        raise _NeedMore(end)
                    stack.append(str(data[begin:end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                    pos += 1
                elif op == 0x51:  # BINPERSID
                    stack[-1] = PersistentId(stack[-1])
                    persistent_ids.append(stack[-1])
                    pos += 1
                elif op == 0x6A:  # LONG_BINGET
                    stack.append(memo[_U32(data, pos + 1)[0]])
                    pos += 5
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    pos += 1
                elif op == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                    pos += 1
                elif op == 0x4D:  # BININT2
                    stack.append(_U16(data, pos + 1)[0])
                    pos += 3
                elif op == 0x4A:  # BININT
                    stack.append(_I32(data, pos + 1)[0])
                    pos += 5
                elif op == 0x8C:  # SHORT_BINUNICODE
                    begin = pos + 2
                    end = begin + data[pos + 1]
                    if end > len(data):
                        raise _NeedMore(end)
                    stack.append(str(data[begin:end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x89:  # NEWFALSE
                    stack.append(False)
                    pos += 1
                elif op == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                    pos += 1
                elif op == 0x88:  # NEWTRUE
                    stack.append(True)
                    pos += 1
                elif op == 0x4E:  # NONE
                    stack.append(None)
                    pos += 1
                elif op == 0x47:  # BINFLOAT
                    stack.append(_F64(data, pos + 1)[0])
                    pos += 9
                elif op == 0x2E:  # STOP
                    if len(stack) != 1 or marks:
                        self.opcode = pos
                        raise self._malformed("the pickle stops with an unfinished stack")
                    pos += 1
                    return stack[0]
                else:
                    self.opcode, self.pos, self.stack = pos, pos, stack
                    rare[op](self)
                    pos, stack = self.pos, self.stack
        finally:
            self.pos, self.stack = pos, stack

    def _move_window(self, end: int) -> None:
        """Drop what has been read and fetch bytes so that the window covers ``end``, or raise TruncatedFile."""
        begin = self._base + self.pos
        needed = end - self.pos
        left = self._source.nbytes - begin
        if needed > left:
            raise self._truncated(end)
        # Doubling keeps the number of moves, and so of bytes kept over, logarithmic for one long string.
        span = min(left, max(needed, _WINDOW, min(2 * len(self.data), 1 << 22)))
        self.data = self._source.read(begin, span)
        self._base, self.pos = begin, 0

    def _truncated(self, end: int) -> TruncatedFile:
        begin = self._base + self.pos
        needed, left = end - self.pos, self._source.nbytes - begin
        return TruncatedFile(
            f"truncated: a pickle needs at least {needed:,} bytes at {begin:,}, the file has {left:,} left",
            kind="truncated-pickle",
            hint="Download the file again.",
            offset=begin,
            needed=needed,
            actual=left,
        )

    def _malformed(self, what: str) -> MalformedFile:
        offset = self._base + self.opcode
        return MalformedFile(f"malformed pickle at byte {offset:,}: {what}", kind="malformed-pickle", offset=offset)

    # What follows handles one rare opcode each: it reads its argument from pos + 1 and moves pos behind it.

    def _take(self, begin: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of argument from window position ``begin`` and move behind them."""
        end = begin + nbytes
        if end > len(self.data):
            raise _NeedMore(end)
        self.pos = end
        return self.data[begin:end]

    def _lines(self, count: int) -> list[bytes]:
        """Return the ``count`` lines that follow the opcode, without their ends, and move behind them."""
        begin, lines = self.pos + 1, []
        for _ in range(count):
            end = self.data.find(b"\n", begin)
            if end < 0:
                # No length says how much to fetch: twice as much each time, so that a long line is not searched
                # over and over.
                whole = self._source.nbytes - self._base
                raise _NeedMore(max(len(self.data) + 1, min(whole, 2 * len(self.data))))
            lines.append(self.data[begin:end])
            begin = end + 1
        self.pos = begin
        return lines

    def _pop_mark(self) -> list[Inert]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def _push(self, value: Inert) -> None:
        self.stack.append(value)

    def _global(self, module: str, name: str) -> Global:
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name)
        return found

    def _constant(self, value: Inert) -> None:
        self.pos += 1
        self.stack.append(value)

    def op_proto(self) -> None:
        self.protocol = self.data[self.pos + 1]
        if self.protocol > 5:
            raise MalformedFile(
                f"pickle protocol {self.protocol} at byte {self._base + self.pos:,}; the newest is 5",
                kind="malformed-pickle",
                offset=self._base + self.pos,
            )
        self.pos += 2

    def op_frame(self) -> None:
        nbytes = _U64(self.data, self.pos + 1)[0]
        if nbytes > self._source.nbytes - self._base - self.pos - 9:
            raise self._truncated(self.pos + 9 + nbytes)
        self.pos += 9  # frames only help readers of streams

    def op_int(self) -> None:
        (line,) = self._lines(1)
        self._push(line == b"01" if line in (b"00", b"01") else self._decimal(line))

    def op_long(self) -> None:
        (line,) = self._lines(1)
        self._push(self._decimal(line.removesuffix(b"L")))

    def _decimal(self, digits: bytes) -> Inert:
        digits = digits.strip()
        if not _INTEGER.fullmatch(digits):
            raise self._malformed(f"not a number: {len(digits):,} characters")
        # As in _little_endian; here reading takes quadratic time, too.
        return int(digits) if len(digits) <= _MAX_INT_NBYTES else digits

    def _memo_index(self) -> int:
        (line,) = self._lines(1)
        index = self._decimal(line)
        # Larger ones, which nobody writes, could be chosen to have one hash.
        if not (isinstance(index, int) and 0 <= index < 1 << 32):
            raise self._malformed("a memo index that is none")
        return index

    def op_long1(self) -> None:
        self._push(self._little_endian(self._take(self.pos + 2, self.data[self.pos + 1])))

    def op_long4(self) -> None:
        nbytes = _I32(self.data, self.pos + 1)[0]
        if nbytes < 0:
            raise self._malformed(f"a number of {nbytes:,} bytes")
        self._push(self._little_endian(self._take(self.pos + 5, nbytes)))

    @staticmethod
    def _little_endian(digits: bytes) -> Inert:
        # Huge numbers stay bytes: printing one takes quadratic time, and nothing counts that far.
        return int.from_bytes(digits, "little", signed=True) if len(digits) <= _MAX_INT_NBYTES else digits

    def op_float(self) -> None:
        (line,) = self._lines(1)
        self._push(float(line))

    def op_string(self) -> None:
        (line,) = self._lines(1)
        line = line.strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self._malformed("a string without quotes")
        self._push(_python2_text(_ESCAPES.sub(_unescape, line[1:-1])))

    def op_binstring(self) -> None:
        nbytes = _I32(self.data, self.pos + 1)[0]
        if nbytes < 0:
            raise self._malformed(f"a string of {nbytes:,} bytes")
        self._push(_python2_text(self._take(self.pos + 5, nbytes)))

    def op_short_binstring(self) -> None:
        self._push(_python2_text(self._take(self.pos + 2, self.data[self.pos + 1])))

    def op_unicode(self) -> None:
        (line,) = self._lines(1)
        self._push(str(line, "raw-unicode-escape"))

    def op_binunicode8(self) -> None:
        nbytes = self._long_length()
        self._push(str(self._take(self.pos + 9, nbytes), "utf-8", "surrogatepass"))

    def op_binbytes(self) -> None:
        self._push(self._take(self.pos + 5, _U32(self.data, self.pos + 1)[0]))

    def op_binbytes8(self) -> None:
        self._push(self._take(self.pos + 9, self._long_length()))

    def op_short_binbytes(self) -> None:
        self._push(self._take(self.pos + 2, self.data[self.pos + 1]))

    def op_bytearray8(self) -> None:
        self._push(bytearray(self._take(self.pos + 9, self._long_length())))

    def _long_length(self) -> int:
        nbytes: int = _U64(self.data, self.pos + 1)[0]
        return nbytes

    def op_global(self) -> None:
        module, name = self._lines(2)
        self._push(self._global(str(module, "utf-8"), str(name, "utf-8")))

    def op_stack_global(self) -> None:
        module, name = self.stack[-2:]
        if not (isinstance(module, str) and isinstance(name, str)):
            raise self._malformed("a global whose name is no string")
        self.stack[-2:] = [self._global(module, name)]
        self.pos += 1

    def op_extension(self) -> None:
        raise UnsafePickle(
            f"extension code at byte {self._base + self.pos:,}: only the process that wrote it knows its meaning",
            kind="unsafe-extension",
            offset=self._base + self.pos,
        )

    def op_next_buffer(self) -> None:
        raise UnsafePickle(
            f"out-of-band buffer at byte {self._base + self.pos:,}: the data was never in this file",
            kind="unsafe-buffer",
            offset=self._base + self.pos,
        )

    def op_inst(self) -> None:
        module, name = self._lines(2)
        args = tuple(self._pop_mark())
        self._push(Call(self._global(str(module, "utf-8"), str(name, "utf-8")), args))

    def op_obj(self) -> None:
        self.pos += 1
        cls, *args = self._pop_mark()
        self._push(Call(cls, tuple(args)))

    def op_newobj(self) -> None:
        self.pos += 1
        args = self.stack.pop()
        self.stack[-1] = Call(self.stack[-1], args, "newobj")

    def op_newobj_ex(self) -> None:
        self.pos += 1
        kwargs = self.stack.pop()
        args = self.stack.pop()
        self.stack[-1] = Call(self.stack[-1], args, "newobj_ex", kwargs)

    def op_build(self) -> None:
        self.pos += 1
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Call):
            raise self._malformed("a state for something that is no object")
        if target.state is not None:
            raise self._malformed("a second state for one object")
        target.state = state

    def op_persid(self) -> None:
        (line,) = self._lines(1)
        self._push(PersistentId(str(line, "utf-8")))
        self.persistent_ids.append(self.stack[-1])

    def op_pop(self) -> None:
        self.pos += 1
        if self.stack:
            self.stack.pop()
        else:
            self._pop_mark()  # POP of a mark, as CPython allows

    def op_pop_mark(self) -> None:
        self.pos += 1
        self._pop_mark()

    def op_dup(self) -> None:
        self.pos += 1
        self._push(self.stack[-1])

    def op_get(self) -> None:
        self._push(self.memo[self._memo_index()])

    def op_put(self) -> None:
        self.memo[self._memo_index()] = self.stack[-1]

    def op_tuple3(self) -> None:
        self.pos += 1
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def op_list(self) -> None:
        self.pos += 1
        self._push(self._pop_mark())

    def op_append(self) -> None:
        self.pos += 1
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def op_appends(self) -> None:
        self.pos += 1
        values = self._pop_mark()
        self._extend(self.stack[-1], values)

    def _extend(self, target: Inert, values: list[Inert]) -> None:
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Call):
            if target.items is None:
                target.items = []
            target.items.extend(values)
        else:
            raise self._malformed("items for something that is no list")

    def op_dict(self) -> None:
        self.pos += 1
        self._push(Dict(self._pairs(self._pop_mark())))

    def op_setitem(self) -> None:
        self.pos += 1
        value = self.stack.pop()
        key = self.stack.pop()
        self._update(self.stack[-1], [key, value])

    def op_setitems(self) -> None:
        self.pos += 1
        flat = self._pop_mark()
        self._update(self.stack[-1], flat)

    def _update(self, target: Inert, flat: list[Inert]) -> None:
        if isinstance(target, Dict):
            target.pairs.extend(self._pairs(flat))
        elif isinstance(target, Call):
            if target.pairs is None:
                target.pairs = []
            target.pairs.extend(self._pairs(flat))
        else:
            raise self._malformed("pairs for something that is no dict")

    def _pairs(self, flat: list[Inert]) -> list[tuple[Inert, Inert]]:
        if len(flat) % 2:
            raise self._malformed(f"a dict of {len(flat):,} keys and values")
        return list(zip(flat[::2], flat[1::2], strict=True))

    def op_additems(self) -> None:
        self.pos += 1
        values = self._pop_mark()
        target = self.stack[-1]
        if isinstance(target, Set):
            target.items.extend(values)
        else:
            self._extend(target, values)

    def op_frozenset(self) -> None:
        self.pos += 1
        self._push(Set(self._pop_mark(), frozen=True))

    def op_readonly_buffer(self) -> None:
        self.pos += 1

    def op_unknown(self) -> None:
        raise self._malformed(f"0x{self.data[self.pos]:02x} is no pickle opcode")


def _python2_text(data: bytes) -> str | bytes:
    """Return what a Python 2 ``str`` was: text where it can be, else the bytes (numpy put raw data into them)."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def _unescape(match: re.Match[bytes]) -> bytes:
    simple, hexadecimal, octal = match.groups()
    if simple is not None:
        return _ESCAPED.get(simple, simple)
    return bytes([int(hexadecimal, 16) if hexadecimal is not None else int(octal, 8) & 0xFF])


def _rare_table() -> list[Callable[[_Interpreter], None]]:
    named: dict[int, Callable[[_Interpreter], None]] = {
        0x80: _Interpreter.op_proto,
        0x95: _Interpreter.op_frame,
        ord("I"): _Interpreter.op_int,
        ord("L"): _Interpreter.op_long,
        0x8A: _Interpreter.op_long1,
        0x8B: _Interpreter.op_long4,
        ord("F"): _Interpreter.op_float,
        ord("S"): _Interpreter.op_string,
        ord("T"): _Interpreter.op_binstring,
        ord("U"): _Interpreter.op_short_binstring,
        ord("V"): _Interpreter.op_unicode,
        0x8D: _Interpreter.op_binunicode8,
        ord("B"): _Interpreter.op_binbytes,
        0x8E: _Interpreter.op_binbytes8,
        ord("C"): _Interpreter.op_short_binbytes,
        0x96: _Interpreter.op_bytearray8,
        0x97: _Interpreter.op_next_buffer,
        0x98: _Interpreter.op_readonly_buffer,
        ord("c"): _Interpreter.op_global,
        0x93: _Interpreter.op_stack_global,
        0x82: _Interpreter.op_extension,
        0x83: _Interpreter.op_extension,
        0x84: _Interpreter.op_extension,
        ord("i"): _Interpreter.op_inst,
        ord("o"): _Interpreter.op_obj,
        0x81: _Interpreter.op_newobj,
        0x92: _Interpreter.op_newobj_ex,
        ord("b"): _Interpreter.op_build,
        ord("P"): _Interpreter.op_persid,
        ord("0"): _Interpreter.op_pop,
        ord("1"): _Interpreter.op_pop_mark,
        ord("2"): _Interpreter.op_dup,
        ord("g"): _Interpreter.op_get,
        ord("p"): _Interpreter.op_put,
        0x87: _Interpreter.op_tuple3,
        ord("l"): _Interpreter.op_list,
        ord("]"): lambda machine: machine._constant([]),
        ord("}"): lambda machine: machine._constant(Dict()),
        0x8F: lambda machine: machine._constant(Set([])),
        ord("a"): _Interpreter.op_append,
        ord("e"): _Interpreter.op_appends,
        ord("d"): _Interpreter.op_dict,
        ord("s"): _Interpreter.op_setitem,
        ord("u"): _Interpreter.op_setitems,
        0x90: _Interpreter.op_additems,
        0x91: _Interpreter.op_frozenset,
    }
    return [named.get(op, _Interpreter.op_unknown) for op in range(256)]


_RARE = _rare_table()
