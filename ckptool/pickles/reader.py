"""
Pickle bytes to inert nodes: the interpreter, for protocols 0 to 5. Looks up no name, calls nothing, hashes no key.

Strategy: one loop over the opcodes. The dozen that make up nearly all of a checkpoint (strings, small ints, memo,
tuples, calls) are handled in the loop itself, in order of frequency; the rest are functions in the table ``_RARE``.
Bytes come from a window onto the source that is moved on demand, so the cost depends on the length of the pickle, not
of the file.

Rules:
1. Nothing is read before its length has been compared with what is left.
2. A mark pushes the stack aside and starts a new one, as CPython's unpickler does, so no mark is ever searched for.
3. Whatever is wrong in a stream ends in MalformedFile with the offset of the opcode.
4. All of an argument is read before the stack is touched: an opcode that needs more bytes than the window has raises
   ``NeedMore``, and is started again. A function of the table is called with ``pos`` after the opcode, and leaves it
   after the argument.

See Python's Lib/pickletools.py, which documents every opcode.
"""

from __future__ import annotations

import gc
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from ckptool.errors import Failure, LimitExceeded, MalformedFile, UnsafePickle
from ckptool.pickles.machine import FIRST, Machine, NeedMore, OnBuild
from ckptool.pickles.machine import Pickle as Pickle
from ckptool.pickles.nodes import NO_ITEMS, Call, Dict, Global, Inert, Pairs, PersistentId, Set, Unknown, state_parts
from ckptool.sources.source import Source

if TYPE_CHECKING:
    from ckptool.pickles.nodes import FieldNames

_U16 = Struct("<H").unpack_from
_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_U64 = Struct("<Q").unpack_from
_F64 = Struct(">d").unpack_from
_TEXT = frozenset((str,))
_PLAIN = {0x29: (), 0x4E: None, 0x88: True, 0x89: False}
"""Values of opcodes without an argument."""
_ODD = frozenset(FIRST)
"""First bytes of text that may hold pickles."""


def read_pickle(
    source: Source, start: int = 0, *, on_build: OnBuild | None = None, field_names: FieldNames | None = None
) -> Pickle:
    """
    Interpret the pickle that begins at byte ``start`` of ``source``.

    Nothing in it runs, whatever it refers to. Bytes after its end are not interpreted. ``on_build`` is for bytes that
    some writers put between opcodes: see ``numpy_values.take_elements``. With ``field_names``, small dicts share their
    keys: for pickles of very many objects.

    Raises:
        TruncatedFile: The source ends inside the pickle.
        MalformedFile: The bytes are not a pickle; ``offset`` is that of the opcode.
        UnsafePickle: An opcode refers to this process's extension registry or to out-of-band buffers.
        LimitExceeded: Reading it would cost far more memory or time than its size.
    """
    machine = Machine(source, start, on_build, field_names)
    machine.stop(_run(machine))
    return machine


def read_as_far(source: Source, start: int = 0, *, on_build: OnBuild | None = None) -> Pickle:
    """
    Interpret a pickle as far as Python's unpickler would, also beyond what a tree can show.

    It raises nothing: ``broken`` is the reason if it ends before STOP, and what was recorded until then is kept.
    """
    machine = Machine(source, start, on_build, follows_python=True)
    root = None
    try:
        root = _run(machine)
    except Failure as error:
        machine.broken, machine.is_over_limit = error.message, isinstance(error, LimitExceeded)
    machine.stop(root)
    return machine


def _run(machine: Machine) -> Inert:
    """Return the value at STOP; move the window as often as needed."""
    try:
        while True:
            try:
                return _loop(machine)
            except NeedMore as need:
                machine.move_window(need.args[0])
            except (IndexError, struct.error):
                if not machine.is_at_window_end():
                    raise
                machine.move_window(machine.pos + 1)
    except UnicodeDecodeError as error:
        machine.opcode = machine.pos
        raise machine.malformed("text that is not UTF-8") from error
    except struct.error as error:
        raise machine.truncated(len(machine.data) + 1) from error
    except (IndexError, KeyError, ValueError) as error:
        if machine.pos + 1 >= len(machine.data):  # the source ends without STOP
            raise machine.truncated(len(machine.data) + 1) from error
        # Stack underflow, a memo entry that was never put, text that is not a number.
        machine.opcode = machine.pos
        raise machine.malformed(f"opcode 0x{machine.data[machine.pos]:02x} has no valid operand") from error


def _loop(machine: Machine) -> Inert:  # noqa: C901 - the hot loop: calls would double its time
    """
    Run until STOP and return the value, or raise with ``pos`` at the opcode to start again.

    Every branch reads all of its argument before it touches the stack, so starting again is safe. No branch checks
    whether the window covers its argument: if it does not, IndexError, struct.error or NeedMore is raised.
    """
    data, pos, stack, marks = machine.data, machine.pos, machine.stack, machine.marks
    memo: Any = machine.memo
    following = machine.next_index()
    rare, plain, odd, persistent_ids, on_build = _RARE, _PLAIN, _ODD, machine.persistent_ids, machine.on_build
    calls, offsets, base = machine.calls, machine.call_offsets, machine.base
    builds, build_offsets, odd_keys = machine.builds, machine.build_offsets, machine.odd_keys
    names, opcodes = machine.field_names, machine.opcodes
    is_memoized, has_short = 0x94 in opcodes, 0x8C in opcodes
    try:
        while True:  # not ``while pos < …``: Python 3.11 speeds up loops that jump back without a condition
            op = data[pos]
            if op >= 0x68:  # a first split in halves, for fewer comparisons
                if op == 0x72:  # LONG_BINPUT
                    index = _U32(data, pos + 1)[0]
                    if index == following:
                        memo.append(stack[-1])
                        following += 1
                    else:
                        machine.pos = pos
                        machine.put(index, stack[-1])
                        memo, following = machine.memo, machine.next_index()
                    pos += 5
                    continue
                if op == 0x68:  # BINGET
                    stack.append(memo[data[pos + 1]])
                    pos += 2
                    continue
                if op == 0x74:  # TUPLE
                    items = tuple(stack)
                    stack = marks.pop()
                    stack.append(items)
                    pos += 1
                    continue
                if op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    pos += 1
                    continue
                if op >= 0x80:
                    if op == 0x94:  # MEMOIZE
                        if is_memoized and following >= 0:
                            memo.append(stack[-1])
                            following += 1
                        else:
                            machine.pos = pos
                            machine.put(len(memo), stack[-1])
                            opcodes.setdefault(op, base + pos)
                            is_memoized, following = True, machine.next_index()
                        pos += 1
                        continue
                    if op == 0x86:  # TUPLE2
                        last = stack.pop()
                        stack[-1] = (stack[-1], last)
                        pos += 1
                        continue
                    if op in plain:
                        stack.append(plain[op])
                        pos += 1
                        continue
                    if op == 0x8C:  # SHORT_BINUNICODE
                        begin = pos + 2
                        end = begin + data[pos + 1]
                        if end > len(data):
                            raise NeedMore(end)
                        text = str(data[begin:end], "utf-8", "surrogatepass")
                        if begin < end and data[begin] in odd and (text[0] not in "c(" or "\n" in text):
                            machine.carry(base + begin, text)
                        if not has_short:
                            opcodes[op], has_short = base + pos, True
                        stack.append(text)
                        pos = end
                        continue
                    if op == 0x81:  # NEWOBJ
                        args = stack.pop()
                        stack[-1] = made = Call(stack[-1], args, "newobj")
                        calls.append(made)
                        offsets.append(base + pos)
                        pos += 1
                        continue
                else:
                    if op == 0x71:  # BINPUT
                        machine.put(data[pos + 1], stack[-1])
                        memo, following = machine.memo, machine.next_index()
                        pos += 2
                        continue
                    if op == 0x6A:  # LONG_BINGET
                        stack.append(memo[_U32(data, pos + 1)[0]])
                        pos += 5
                        continue
                    if op == 0x7D:  # EMPTY_DICT
                        machine.empty += 1
                        stack.append(Dict())
                        pos += 1
                        continue
                    if op == 0x75 and type(marks[-1][-1]) is Dict and not len(stack) & 1:  # SETITEMS
                        own = names.pairs(stack) if names is not None else None
                        if own is None:
                            keys = stack[::2]
                            if not _TEXT.issuperset(map(type, keys)):
                                odd_keys += keys
                            pairs = iter(stack)
                            own = list(zip(pairs, pairs, strict=True))[:]  # a copy has no spare capacity
                        stack = marks.pop()
                        stack[-1].update(own)
                        pos += 1
                        continue
                    if op == 0x73 and type(stack[-3]) is Dict:  # SETITEM
                        value, key = stack.pop(), stack.pop()
                        if type(key) is not str:
                            odd_keys.append(key)
                        stack[-1].update(((key, value),))
                        pos += 1
                        continue
            elif op == 0x4B:  # BININT1
                stack.append(data[pos + 1])
                pos += 2
                continue
            elif op == 0x28:  # MARK
                marks.append(stack)
                stack = []
                pos += 1
                continue
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                stack[-1] = made = Call(stack[-1], args)
                calls.append(made)
                offsets.append(base + pos)
                pos += 1
                continue
            elif op == 0x58:  # BINUNICODE
                begin = pos + 5
                end = begin + _U32(data, pos + 1)[0]
                if end > len(data):
                    raise NeedMore(end)
                text = str(data[begin:end], "utf-8", "surrogatepass")
                if begin < end and data[begin] in odd and (text[0] not in "c(" or "\n" in text):
                    machine.carry(base + begin, text)
                stack.append(text)
                pos = end
                continue
            elif op == 0x51:  # BINPERSID
                stack[-1] = PersistentId(stack[-1])
                persistent_ids.append(stack[-1])
                pos += 1
                continue
            elif op in plain:
                stack.append(plain[op])
                pos += 1
                continue
            elif op == 0x4D:  # BININT2
                stack.append(_U16(data, pos + 1)[0])
                pos += 3
                continue
            elif op == 0x4A:  # BININT
                stack.append(_I32(data, pos + 1)[0])
                pos += 5
                continue
            elif op == 0x62 and on_build is None and type(stack[-2]) is Call and stack[-2].state is None:  # BUILD
                state = stack.pop()
                made = stack[-1]
                made.state = state
                builds.append(made)
                build_offsets.append(base + pos)
                pos += 1
                continue
            elif op == 0x47:  # BINFLOAT
                stack.append(_F64(data, pos + 1)[0])
                pos += 9
                continue
            elif op == 0x5D:  # EMPTY_LIST
                machine.empty += 1
                stack.append([])
                pos += 1
                continue
            elif op == 0x2E:  # STOP
                if not stack:
                    machine.opcode = pos
                    raise machine.malformed("the pickle stops without a value")
                pos += 1
                return stack[-1]
            machine.opcode, machine.pos, machine.stack = pos, pos, stack
            if machine.is_at_window_end():  # the function may touch the stack before it misses bytes
                raise NeedMore(pos + 1)
            if op not in opcodes:
                opcodes[op] = base + pos
            machine.pos = pos + 1
            rare[op](machine)
            pos, stack, memo, following = machine.pos, machine.stack, machine.memo, machine.next_index()
            data, base = machine.data, machine.base  # skip() may have moved the window
    finally:
        machine.pos, machine.stack = pos, stack


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, which walks a growing tree again and again: a third of the time at 20,000 tensors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# The opcodes that checkpoints rarely have, one function each


_INTEGER: Final = rb"[+-]?(?:0|[1-9][0-9]*)"  # readers disagree about leading zeros: octal, decimal, refused
_INDEX: Final = rb"\s*(\+?[0-9][0-9_]*|-[0_]+)\s*(?:\0|\Z)"
"""Matches what Python accepts as an index of the memo: C ends a text at its first zero byte."""
_MAX_INT_NBYTES: Final = 1024
_ESCAPES: Final = rb"\\(?:[abfnrtv\\'\"\n]|x[0-9a-fA-F]{2}|[0-7]{1,3})"
_OUTSIDE: Final = (Global, PersistentId, Unknown)
"""Nodes for values that come from the process, not from the pickle."""
_ESCAPED: Final = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))


def op_proto(machine: Machine) -> None:
    before, machine.protocol = machine.protocol, machine.data[machine.pos]
    if machine.base + machine.opcode != machine.start and before != machine.protocol:
        machine.has_protocols = True
    if machine.protocol > 5:
        raise machine.malformed(f"protocol {machine.protocol}; the newest is 5")
    machine.pos += 1


def op_frame(machine: Machine) -> None:
    nbytes = _U64(machine.data, machine.pos)[0]
    end = machine.pos + 8 + nbytes
    if machine.base + end > machine.source.nbytes and not machine.follows_python:
        machine.pos = machine.opcode
        raise machine.truncated(end)
    if machine.frame_end is not None:
        machine.note_split(machine.base + machine.opcode)
    machine.pos += 8
    machine.begin_frame(machine.base + end)


def op_int(machine: Machine) -> None:
    line = machine.line()
    machine.push(line == b"01" if line in (b"00", b"01") else _decimal(machine, line))


def _decimal(machine: Machine, digits: bytes) -> Inert:
    digits = digits.strip()
    if not re.fullmatch(_INTEGER, digits):
        raise machine.malformed(f"not a number: {len(digits):,} characters")
    return int(digits) if len(digits) <= _MAX_INT_NBYTES else _huge(machine, len(digits), "digits")


def _memo_index(machine: Machine) -> Inert:
    line = machine.line()
    if machine.follows_python and (found := re.match(_INDEX, line)):
        index = int(found[1])
        return index if index < 1 << 32 else f"{index:x}"  # a file could choose larger numbers with equal hashes
    index = _decimal(machine, line)
    if not (isinstance(index, int) and 0 <= index < 1 << 32):
        raise machine.malformed("a memo index that is not a number from 0 to 4,294,967,295")
    return index


def op_long4(machine: Machine) -> None:
    nbytes = _I32(machine.data, machine.pos)[0]
    if nbytes < 0:
        raise machine.malformed(f"a number of {nbytes:,} bytes")
    if nbytes > _MAX_INT_NBYTES and not machine.follows_python:
        _huge(machine, nbytes, "bytes")
    digits = machine.take(machine.pos + 4, nbytes)
    is_huge = nbytes > _MAX_INT_NBYTES
    machine.push(_huge(machine, nbytes, "bytes") if is_huge else int.from_bytes(digits, "little", signed=True))


def _huge(machine: Machine, count: int, unit: str) -> Inert:
    """
    Raise LimitExceeded for a number of more than 1,024 bytes; a patient machine gets an Unknown.

    Reading it from text, or printing it, takes quadratic time.
    """
    what, offset = f"a number of {count:,} {unit}", machine.base + machine.opcode
    if machine.follows_python:  # Python goes on
        return _unknown(machine, what)
    fact = f"{what} at byte {offset:,}; {_MAX_INT_NBYTES:,} are allowed"
    raise LimitExceeded(fact, offset=offset, needed=count, actual=_MAX_INT_NBYTES)


def op_string(machine: Machine) -> None:
    line = machine.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise machine.malformed("a string without quotes")
    machine.push_line(_python2_text(machine, re.sub(_ESCAPES, lambda found: _meaning(found[0]), line[1:-1])))


def op_binstring(machine: Machine) -> None:
    nbytes = _I32(machine.data, machine.pos)[0]
    if nbytes < 0:
        raise machine.malformed(f"a string of {nbytes:,} bytes")
    machine.push(_python2_text(machine, machine.string(4)))


def op_binunicode8(machine: Machine) -> None:
    begin = machine.pos + 8
    text = str(machine.take(begin, _U64(machine.data, machine.pos)[0]), "utf-8", "surrogatepass")
    machine.carry(machine.base + begin, text)
    machine.push(text)


def _named(machine: Machine) -> Global:
    """Return the Global for a name in two lines."""
    module, name = machine.lines(2)
    return machine.intern(str(module, "utf-8"), str(name, "utf-8"))


def op_stack_global(machine: Machine) -> None:
    module, name = machine.stack[-2:]
    if isinstance(module, str) and isinstance(name, str):
        found: Inert = machine.intern(module, name)
    elif machine.follows_python:
        found = _unknown(machine, "a name that is computed")
    else:
        raise machine.malformed("a global whose name is not a string")
    machine.stack[-2:] = [found]


def _unknown(machine: Machine, why: str) -> Unknown:
    found = Unknown(why)
    machine.note("refers", found)
    return found


def _extension(width: int) -> Callable[[Machine], None]:
    def op_extension(machine: Machine) -> None:
        code = int.from_bytes(machine.data[machine.pos : machine.pos + width], "little")
        what = f"extension code {code:,}"
        _outside(machine, what, "only the process that wrote it knows its meaning", "unsafe-extension")
        machine.pos += width

    return op_extension


def _outside(machine: Machine, what: str, why: str, kind: str) -> None:
    """Push an Unknown for a value that only the unpickling process knows; raise UnsafePickle if not patient."""
    if not machine.follows_python:
        offset = machine.base + machine.opcode
        raise UnsafePickle(f"{what} at byte {offset:,}: {why}", kind=kind, offset=offset)
    machine.push(_unknown(machine, what))


def op_obj(machine: Machine) -> None:
    cls, *args = machine.pop_mark()
    machine.push_call(Call(cls, tuple(args)))


def op_newobj_ex(machine: Machine) -> None:
    kwargs, args, cls = (machine.stack.pop() for _ in range(3))
    machine.push_call(Call(cls, args, "newobj_ex", kwargs))


def op_build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, Call) and target.state is None:
        target.state = state
        machine.builds.append(target)
        machine.build_offsets.append(machine.base + machine.opcode)
        if machine.on_build is not None:
            machine.stack[-1] = machine.on_build(machine, target)
    elif isinstance(target, (Call, *_OUTSIDE)) or not (machine.follows_python and _sets_nothing(state)):
        what = "a second state for one object" if isinstance(target, Call) else "a state for what is not an object"
        machine.odd("sets", target, state, what, (Call, *_OUTSIDE))


def _sets_nothing(state: Inert) -> bool:
    """Return whether a state is empty for Python whatever object gets it: itself, or both parts of a pair."""
    for part in state_parts(state):
        held = part.pairs if type(part) is Dict else part.items if type(part) is Set else part
        if isinstance(held, (Call, *_OUTSIDE)) or held:
            return False
    return True


def op_persid(machine: Machine) -> None:
    machine.push(PersistentId(str(machine.line(), "utf-8")))
    machine.persistent_ids.append(machine.stack[-1])


def op_pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()  # POP of a mark, as CPython allows


def op_dup(machine: Machine) -> None:
    machine.push(machine.stack[-1])
    machine.doubled.append(machine.stack[-1])


def op_get(machine: Machine) -> None:
    index: Inert = _memo_index(machine)
    memo: Inert = machine.memo
    if type(index) is str and type(memo) is list:
        raise KeyError(index)
    machine.push(memo[index])


def op_tuple3(machine: Machine) -> None:
    machine.stack[-3:] = [(machine.stack[-3], machine.stack[-2], machine.stack[-1])]


def _extend(machine: Machine, values: list[Inert]) -> None:
    """Append values to the list, or the object, on top of the stack."""
    target = machine.stack[-1]
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Call):
        target.items = target.items or []
        target.items.extend(values)
    elif values or not machine.follows_python or isinstance(target, _OUTSIDE):
        machine.odd("adds", target, values, "items for something that is not a list", (bytearray, *_OUTSIDE))


def op_setitem(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine, machine.stack[-1], _pairs(machine, [key, value]))


def op_setitems(machine: Machine) -> None:
    flat = machine.pop_mark()
    if machine.follows_python and len(flat) % 2:  # Python sets the complete pairs before it fails
        _update(machine, machine.stack[-1], _pairs(machine, flat[:-1]))
    _update(machine, machine.stack[-1], _pairs(machine, flat))


def _update(machine: Machine, target: Inert, pairs: Inert) -> None:
    if isinstance(target, Dict):
        target.update(pairs)
    elif isinstance(target, Call):
        target.pairs = target.pairs or []
        target.pairs.extend(pairs)
    elif pairs or not machine.follows_python or isinstance(target, _OUTSIDE):
        machine.odd("adds", target, pairs, "pairs for something that is not a dict", (list, bytearray, *_OUTSIDE))


def _pairs(machine: Machine, flat: list[Inert]) -> Pairs:
    if len(flat) % 2:
        raise machine.malformed(f"a dict of {len(flat):,} keys and values")
    machine.odd_keys += (key for key in flat[::2] if type(key) is not str)
    return list(zip(flat[::2], flat[1::2], strict=True))[:]  # a copy has no spare capacity


def op_empty_set(machine: Machine) -> None:
    machine.empty += 1
    machine.push(Set(NO_ITEMS))


def op_additems(machine: Machine) -> None:
    values, target = machine.pop_mark(), machine.stack[-1]
    machine.odd_keys += (one for one in values if type(one) is not str)
    if isinstance(target, Set):
        target.update(values)
    else:
        _extend(machine, values)


def op_frozenset(machine: Machine) -> None:
    values = machine.pop_mark()
    machine.odd_keys += (one for one in values if type(one) is not str)
    machine.push(Set(values or NO_ITEMS, frozen=True))


def op_unknown(machine: Machine) -> None:
    raise machine.malformed(f"0x{machine.data[machine.opcode]:02x} is not a pickle opcode")


def _python2_text(machine: Machine, data: bytes) -> str | bytes:
    """Return a Python 2 ``str`` as text if it is UTF-8, else as bytes (numpy put raw data into them)."""
    machine.has_old_strings = True
    machine.has_other_text = machine.has_other_text or not data.isascii()
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


@cache  # there are about a thousand
def _meaning(escape: bytes) -> bytes:
    """Return the byte that an escape means in a string of Python 2."""
    kind = escape[1]
    if kind == ord("\n"):  # a line that goes on
        return b""
    if kind == ord("x"):
        return bytes.fromhex(str(escape[2:], "ascii"))
    if kind in b"01234567":
        return bytes([int(escape[1:], 8) & 0xFF])
    return bytes([_ESCAPED.get(kind, kind)])


def _patiently(step: Callable[[Machine], None], sound: bytes) -> Callable[[Machine], None]:
    """
    Let a patient machine go on after a line that Python may accept although ``step`` does not: push an Unknown.

    Only a line that matches ``sound`` can be valid for Python.
    """

    def run(machine: Machine) -> None:
        begin = machine.pos
        try:
            step(machine)
        except (MalformedFile, ValueError):
            line = machine.data[begin : machine.pos].removesuffix(b"\n")
            if (
                not machine.follows_python
                or machine.pos == begin
                or not re.match(sound, line, re.DOTALL | re.IGNORECASE)
            ):
                raise
            machine.push(Unknown("a malformed value"))

    return run


_OPCODES: Final[dict[int, Callable[[Machine], object]]] = {
    0x80: op_proto,
    0x95: op_frame,
    ord("I"): _patiently(op_int, rb"\s*[+-]?[0-9]|\0|\Z"),
    ord("L"): _patiently(
        lambda machine: machine.push(_decimal(machine, machine.line().removesuffix(b"L"))), rb"\s*[+-]?[0-9]"
    ),
    0x8A: lambda machine: machine.push(
        int.from_bytes(machine.take(machine.pos + 1, machine.data[machine.pos]), "little", signed=True)
    ),
    0x8B: op_long4,
    ord("F"): _patiently(lambda machine: machine.push(float(machine.line())), rb"\s*[+-]?(?:[0-9.]|inf|nan)"),
    ord("S"): _patiently(op_string, rb"\s*([\'\"]).*\1\s*\Z"),
    ord("T"): op_binstring,
    ord("U"): lambda machine: machine.push(_python2_text(machine, machine.string(1))),
    ord("V"): lambda machine: machine.push_line(str(machine.line(), "raw-unicode-escape")),
    0x8D: op_binunicode8,
    ord("B"): lambda machine: machine.push(machine.string(4)),
    0x8E: lambda machine: machine.push(machine.string(8)),
    ord("C"): lambda machine: machine.push(machine.string(1)),
    0x96: lambda machine: machine.push(bytearray(machine.string(8))),
    0x97: lambda machine: _outside(
        machine, "an out-of-band buffer", "the data was never in this file", "unsafe-buffer"
    ),
    0x98: lambda _: None,
    ord("c"): lambda machine: machine.push(_named(machine)),
    0x93: op_stack_global,
    0x82: _extension(1),
    0x83: _extension(2),
    0x84: _extension(4),
    ord("i"): lambda machine: machine.push_call(Call(_named(machine), tuple(machine.pop_mark()))),
    ord("o"): op_obj,
    0x92: op_newobj_ex,
    ord("b"): op_build,
    ord("P"): op_persid,
    ord("0"): op_pop,
    ord("1"): lambda machine: machine.pop_mark(),
    ord("2"): op_dup,
    ord("g"): op_get,
    ord("p"): lambda machine: machine.put(_memo_index(machine), machine.stack[-1]),
    0x87: op_tuple3,
    ord("l"): lambda machine: machine.push(machine.pop_mark()),
    0x8F: op_empty_set,
    ord("a"): lambda machine: _extend(machine, [machine.stack.pop()]),
    ord("e"): lambda machine: _extend(machine, machine.pop_mark()),
    ord("d"): lambda machine: machine.push(Dict(_pairs(machine, machine.pop_mark()) or None)),
    ord("s"): op_setitem,
    ord("u"): op_setitems,
    0x90: op_additems,
    0x91: op_frozenset,
}

_RARE: Final = [_OPCODES.get(op, op_unknown) for op in range(256)]
"""The function for each opcode, by its byte."""
