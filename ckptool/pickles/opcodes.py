"""
The pickle opcodes that checkpoints rarely use, one method each.

``pickles`` handles the frequent ones itself. Each method finds ``pos`` at its opcode, reads all of
its argument before it touches the stack, and leaves ``pos`` behind the argument: so one that needs more bytes than the
window holds can raise ``NeedMore`` and be begun again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Final

from ckptool.errors import MalformedFile, UnsafePickle
from ckptool.pickles.machine import Machine, NeedMore
from ckptool.pickles.nodes import Call, Dict, Inert, PersistentId, Set

_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_U64 = Struct("<Q").unpack_from

_INTEGER = re.compile(rb"[+-]?(?:0|[1-9][0-9]*)")  # readers disagree about leading zeros: octal, decimal, refused
_MAX_INT_NBYTES: Final = 1024
_ESCAPES = re.compile(rb"\\(?:[abfnrtv\\'\"\n]|x[0-9a-fA-F]{2}|[0-7]{1,3})")
_ESCAPED: Final = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))


class Opcodes(Machine):
    """The rare opcodes. ``pickles`` adds the frequent ones, and the loop that reads them all."""

    def take(self, begin: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of argument from window position ``begin`` and move behind them."""
        end = begin + nbytes
        if end > len(self.data):
            raise NeedMore(end)
        self.pos = end
        return self.data[begin:end]

    def lines(self, count: int) -> list[bytes]:
        """Return the ``count`` lines that follow the opcode, without their ends, and move behind them."""
        begin, lines = self.pos + 1, []
        for _ in range(count):
            end = self.data.find(b"\n", begin)
            if end < 0:
                # Twice as much each time: a long line would be searched over and over.
                whole = self.source.nbytes - self.base
                raise NeedMore(max(len(self.data) + 1, min(whole, 2 * len(self.data))))
            lines.append(self.data[begin:end])
            begin = end + 1
        self.pos = begin
        return lines

    def pop_mark(self) -> list[Inert]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def push(self, value: Inert) -> None:
        self.stack.append(value)

    def constant(self, value: Inert) -> None:
        self.pos += 1
        self.stack.append(value)

    def op_proto(self) -> None:
        self.protocol = self.data[self.pos + 1]
        if self.protocol > 5:
            raise MalformedFile(
                f"pickle protocol {self.protocol} at byte {self.base + self.pos:,}; the newest is 5",
                kind="malformed-pickle",
                offset=self.base + self.pos,
            )
        self.pos += 2

    def op_frame(self) -> None:
        nbytes = _U64(self.data, self.pos + 1)[0]
        if nbytes > self.source.nbytes - self.base - self.pos - 9:
            raise self.truncated(self.pos + 9 + nbytes)
        self.pos += 9  # frames only help readers of streams

    def op_int(self) -> None:
        (line,) = self.lines(1)
        self.push(line == b"01" if line in (b"00", b"01") else self.decimal(line))

    def op_long(self) -> None:
        (line,) = self.lines(1)
        self.push(self.decimal(line.removesuffix(b"L")))

    def decimal(self, digits: bytes) -> Inert:
        digits = digits.strip()
        if not _INTEGER.fullmatch(digits):
            raise self.malformed(f"not a number: {len(digits):,} characters")
        # As in _little_endian; here reading takes quadratic time, too.
        return int(digits) if len(digits) <= _MAX_INT_NBYTES else digits

    def _memo_index(self) -> int:
        (line,) = self.lines(1)
        index = self.decimal(line)
        # Larger ones, which nobody writes, could be chosen to have one hash.
        if not (isinstance(index, int) and 0 <= index < 1 << 32):
            raise self.malformed("a memo index that is none")
        return index

    def op_long1(self) -> None:
        self.push(self.little_endian(self.take(self.pos + 2, self.data[self.pos + 1])))

    def op_long4(self) -> None:
        nbytes = _I32(self.data, self.pos + 1)[0]
        if nbytes < 0:
            raise self.malformed(f"a number of {nbytes:,} bytes")
        self.push(self.little_endian(self.take(self.pos + 5, nbytes)))

    @staticmethod
    def little_endian(digits: bytes) -> Inert:
        # Huge numbers stay bytes: printing one takes quadratic time, and nothing counts that far.
        return int.from_bytes(digits, "little", signed=True) if len(digits) <= _MAX_INT_NBYTES else digits

    def op_float(self) -> None:
        (line,) = self.lines(1)
        self.push(float(line))

    def op_string(self) -> None:
        (line,) = self.lines(1)
        line = line.strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self.malformed("a string without quotes")
        self.push(_python2_text(_ESCAPES.sub(lambda found: _meaning(found[0]), line[1:-1])))

    def op_binstring(self) -> None:
        nbytes = _I32(self.data, self.pos + 1)[0]
        if nbytes < 0:
            raise self.malformed(f"a string of {nbytes:,} bytes")
        self.push(_python2_text(self.take(self.pos + 5, nbytes)))

    def op_short_binstring(self) -> None:
        self.push(_python2_text(self.take(self.pos + 2, self.data[self.pos + 1])))

    def op_unicode(self) -> None:
        (line,) = self.lines(1)
        self.push(str(line, "raw-unicode-escape"))

    def op_binunicode8(self) -> None:
        nbytes = self.long_length()
        self.push(str(self.take(self.pos + 9, nbytes), "utf-8", "surrogatepass"))

    def op_binbytes(self) -> None:
        self.push(self.take(self.pos + 5, _U32(self.data, self.pos + 1)[0]))

    def op_binbytes8(self) -> None:
        self.push(self.take(self.pos + 9, self.long_length()))

    def op_short_binbytes(self) -> None:
        self.push(self.take(self.pos + 2, self.data[self.pos + 1]))

    def op_bytearray8(self) -> None:
        self.push(bytearray(self.take(self.pos + 9, self.long_length())))

    def long_length(self) -> int:
        nbytes: int = _U64(self.data, self.pos + 1)[0]
        return nbytes

    def op_global(self) -> None:
        module, name = self.lines(2)
        self.push(self.intern(str(module, "utf-8"), str(name, "utf-8")))

    def op_stack_global(self) -> None:
        module, name = self.stack[-2:]
        if not (isinstance(module, str) and isinstance(name, str)):
            raise self.malformed("a global whose name is no string")
        self.stack[-2:] = [self.intern(module, name)]
        self.pos += 1

    def op_extension(self) -> None:
        raise UnsafePickle(
            f"extension code at byte {self.base + self.pos:,}: only the process that wrote it knows its meaning",
            kind="unsafe-extension",
            offset=self.base + self.pos,
        )

    def op_next_buffer(self) -> None:
        raise UnsafePickle(
            f"out-of-band buffer at byte {self.base + self.pos:,}: the data was never in this file",
            kind="unsafe-buffer",
            offset=self.base + self.pos,
        )

    def op_inst(self) -> None:
        module, name = self.lines(2)
        args = tuple(self.pop_mark())
        self.push(Call(self.intern(str(module, "utf-8"), str(name, "utf-8")), args))

    def op_obj(self) -> None:
        self.pos += 1
        cls, *args = self.pop_mark()
        self.push(Call(cls, tuple(args)))

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
            raise self.malformed("a state for something that is no object")
        if target.state is not None:
            raise self.malformed("a second state for one object")
        target.state = state

    def op_persid(self) -> None:
        (line,) = self.lines(1)
        self.push(PersistentId(str(line, "utf-8")))
        self.persistent_ids.append(self.stack[-1])

    def op_pop(self) -> None:
        self.pos += 1
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()  # POP of a mark, as CPython allows

    def op_pop_mark(self) -> None:
        self.pos += 1
        self.pop_mark()

    def op_dup(self) -> None:
        self.pos += 1
        self.push(self.stack[-1])

    def op_get(self) -> None:
        self.push(self.memo[self._memo_index()])

    def op_put(self) -> None:
        self.put(self._memo_index(), self.stack[-1])

    def op_tuple3(self) -> None:
        self.pos += 1
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def op_list(self) -> None:
        self.pos += 1
        self.push(self.pop_mark())

    def op_append(self) -> None:
        self.pos += 1
        value = self.stack.pop()
        self.extend(self.stack[-1], [value])

    def op_appends(self) -> None:
        self.pos += 1
        values = self.pop_mark()
        self.extend(self.stack[-1], values)

    def extend(self, target: Inert, values: list[Inert]) -> None:
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Call):
            if target.items is None:
                target.items = []
            target.items.extend(values)
        else:
            raise self.malformed("items for something that is no list")

    def op_dict(self) -> None:
        self.pos += 1
        self.push(Dict(self.pairs(self.pop_mark())))

    def op_setitem(self) -> None:
        self.pos += 1
        value = self.stack.pop()
        key = self.stack.pop()
        self.update(self.stack[-1], [key, value])

    def op_setitems(self) -> None:
        self.pos += 1
        flat = self.pop_mark()
        self.update(self.stack[-1], flat)

    def update(self, target: Inert, flat: list[Inert]) -> None:
        if isinstance(target, Dict):
            target.pairs.extend(self.pairs(flat))
        elif isinstance(target, Call):
            if target.pairs is None:
                target.pairs = []
            target.pairs.extend(self.pairs(flat))
        else:
            raise self.malformed("pairs for something that is no dict")

    def pairs(self, flat: list[Inert]) -> list[tuple[Inert, Inert]]:
        if len(flat) % 2:
            raise self.malformed(f"a dict of {len(flat):,} keys and values")
        return list(zip(flat[::2], flat[1::2], strict=True))

    def op_additems(self) -> None:
        self.pos += 1
        values = self.pop_mark()
        target = self.stack[-1]
        if isinstance(target, Set):
            target.items.extend(values)
        else:
            self.extend(target, values)

    def op_frozenset(self) -> None:
        self.pos += 1
        self.push(Set(self.pop_mark(), frozen=True))

    def op_readonly_buffer(self) -> None:
        self.pos += 1

    def op_unknown(self) -> None:
        raise self.malformed(f"0x{self.data[self.pos]:02x} is no pickle opcode")


def _python2_text(data: bytes) -> str | bytes:
    """Return what a Python 2 ``str`` was: text where it can be, else the bytes (numpy put raw data into them)."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


@cache  # of the thousand or so that there are
def _meaning(escape: bytes) -> bytes:
    """Return what an escape stands for in a string of Python 2."""
    kind = escape[1]
    if kind == ord("\n"):  # a line that goes on
        return b""
    if kind == ord("x"):
        return bytes.fromhex(str(escape[2:], "ascii"))
    if kind in b"01234567":
        return bytes([int(escape[1:], 8) & 0xFF])
    return bytes([_ESCAPED.get(kind, kind)])


def _rare_table() -> list[Callable[[Opcodes], None]]:
    named: dict[int, Callable[[Opcodes], None]] = {
        0x80: Opcodes.op_proto,
        0x95: Opcodes.op_frame,
        ord("I"): Opcodes.op_int,
        ord("L"): Opcodes.op_long,
        0x8A: Opcodes.op_long1,
        0x8B: Opcodes.op_long4,
        ord("F"): Opcodes.op_float,
        ord("S"): Opcodes.op_string,
        ord("T"): Opcodes.op_binstring,
        ord("U"): Opcodes.op_short_binstring,
        ord("V"): Opcodes.op_unicode,
        0x8D: Opcodes.op_binunicode8,
        ord("B"): Opcodes.op_binbytes,
        0x8E: Opcodes.op_binbytes8,
        ord("C"): Opcodes.op_short_binbytes,
        0x96: Opcodes.op_bytearray8,
        0x97: Opcodes.op_next_buffer,
        0x98: Opcodes.op_readonly_buffer,
        ord("c"): Opcodes.op_global,
        0x93: Opcodes.op_stack_global,
        0x82: Opcodes.op_extension,
        0x83: Opcodes.op_extension,
        0x84: Opcodes.op_extension,
        ord("i"): Opcodes.op_inst,
        ord("o"): Opcodes.op_obj,
        0x81: Opcodes.op_newobj,
        0x92: Opcodes.op_newobj_ex,
        ord("b"): Opcodes.op_build,
        ord("P"): Opcodes.op_persid,
        ord("0"): Opcodes.op_pop,
        ord("1"): Opcodes.op_pop_mark,
        ord("2"): Opcodes.op_dup,
        ord("g"): Opcodes.op_get,
        ord("p"): Opcodes.op_put,
        0x87: Opcodes.op_tuple3,
        ord("l"): Opcodes.op_list,
        ord("]"): lambda machine: machine.constant([]),
        ord("}"): lambda machine: machine.constant(Dict()),
        0x8F: lambda machine: machine.constant(Set([])),
        ord("a"): Opcodes.op_append,
        ord("e"): Opcodes.op_appends,
        ord("d"): Opcodes.op_dict,
        ord("s"): Opcodes.op_setitem,
        ord("u"): Opcodes.op_setitems,
        0x90: Opcodes.op_additems,
        0x91: Opcodes.op_frozenset,
    }
    return [named.get(op, Opcodes.op_unknown) for op in range(256)]


RARE: Final = _rare_table()
"""The method for each opcode, by its byte."""
