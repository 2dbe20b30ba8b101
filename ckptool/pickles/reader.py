"""
Pickle bytes → inert nodes, for protocols 0 to 5. Looks up no name, calls nothing, hashes no key.

Strategy: one loop over the opcodes. The dozen that make up nearly all of a checkpoint (strings, small ints, memo,
tuples, calls) are handled in the loop itself, in order of frequency; the rest are functions in the table ``RARE``.
Bytes come from a window onto the source that is moved on demand, so a pickle at the head of a file of gigabytes costs
what the pickle is long.

Rules:
1. Nothing is read before its length has been compared with what is left.
2. A mark pushes the stack aside and starts a new one, as CPython's unpickler does, so no mark is ever searched for.
3. Whatever a stream does wrong ends in MalformedFile with the offset of the opcode.

See Python's Lib/pickletools.py, which documents every opcode.
"""

import gc
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import TYPE_CHECKING, Any

from ckptool.errors import Failure, LimitExceeded
from ckptool.pickles.machine import FIRST, Machine, NeedMore, OnBuild
from ckptool.pickles.machine import Pickle as Pickle
from ckptool.pickles.nodes import Call, Dict, Inert, PersistentId
from ckptool.pickles.rare_opcodes import RARE
from ckptool.sources.source import Source

if TYPE_CHECKING:
    from ckptool.pickles.nodes import FieldNames

_U16 = Struct("<H").unpack_from
_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_F64 = Struct(">d").unpack_from
_TEXT = frozenset((str,))
_PLAIN = {0x29: (), 0x4E: None, 0x88: True, 0x89: False}
"""Values that an opcode alone says."""
_ODD = frozenset(FIRST)
"""What text begins with that may hold pickles;"""
_ODD_LINE = _ODD | {ord("\\")}
"""what a line of text does."""


def read_pickle(
    source: Source, start: int = 0, *, on_build: "OnBuild | None" = None, field_names: "FieldNames | None" = None
) -> Pickle:
    """
    Interpret the pickle that begins at byte ``start`` of ``source``.

    Nothing in it runs, whatever it asks for. Bytes after its end are not read. ``on_build`` is for what some writers
    put between opcodes: see ``numpy_values``. With ``field_names``, small dicts share their keys: for
    pickles of very many objects.

    Raises:
        TruncatedFile: The source ends inside the pickle.
        MalformedFile: The bytes are not a pickle; ``offset`` is that of the opcode.
        UnsafePickle: An opcode refers to this process's extension registry or to out-of-band buffers.
    """
    machine = Machine(source, start, on_build, field_names)
    machine.stop(_run(machine))
    return machine


def read_as_far(source: Source, start: int = 0, *, on_build: "OnBuild | None" = None) -> Pickle:
    """
    Interpret a pickle as far as Python's unpickler could, which goes on where no tree can be given.

    Where it breaks off is said, and what it called until then was called.
    """
    machine = Machine(source, start, on_build, is_patient=True)
    root = None
    try:
        root = _run(machine)
    except Failure as error:
        machine.broken, machine.is_over_limit = error.message, isinstance(error, LimitExceeded)
    machine.stop(root)
    return machine


def _run(machine: Machine) -> Inert:
    """Return the value at STOP, through as many windows as that takes."""
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
        if machine.pos + 1 >= len(machine.data):  # the last byte of the source, and no STOP
            raise machine.truncated(len(machine.data) + 1) from error
        # Stack underflow, a memo entry that was never put, text that is not a number.
        machine.opcode = machine.pos
        raise machine.malformed(f"opcode 0x{machine.data[machine.pos]:02x} has no valid operand") from error


def _loop(machine: Machine) -> Inert:  # noqa: C901 - the hot loop: calls would double its time
    """
    Run until STOP and return the value, or raise with ``pos`` at the opcode to begin again from.

    Every branch reads all of its argument before it touches the stack, so beginning again is safe. No branch asks
    whether the window holds its opcode: where it ends too early, IndexError, struct.error or NeedMore say so.
    """
    data, pos, stack, marks = machine.data, machine.pos, machine.stack, machine.marks
    memo: Any = machine.memo
    following = machine.next_index()
    rare, plain, odd, persistent_ids, on_build = RARE, _PLAIN, _ODD, machine.persistent_ids, machine.on_build
    calls, offsets, base = machine.calls, machine.call_offsets, machine.base
    builds, build_offsets, odd_keys = machine.builds, machine.build_offsets, machine.odd_keys
    names, opcodes = machine.field_names, machine.opcodes
    is_memoized, has_short = 0x94 in opcodes, 0x8C in opcodes
    try:
        while True:  # not ``while pos < …``: Python 3.11 speeds up what jumps back without a condition
            op = data[pos]
            if op >= 0x68:  # half of them, for fewer comparisons on the way to each
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
                            own = list(zip(pairs, pairs, strict=True))[:]  # a copy has no room to spare
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
            elif op == 0x56 and data[pos + 1] not in _ODD_LINE and (end := data.find(b"\n", pos)) >= 0:  # UNICODE
                machine.has_lines = True
                opcodes.setdefault(op, base + pos)
                stack.append(str(data[pos + 1 : end], "raw-unicode-escape"))
                pos = end + 1
                continue
            elif op == 0x30 and stack:  # POP
                stack.pop()
                opcodes.setdefault(op, base + pos)
                pos += 1
                continue
            elif op == 0x2E:  # STOP
                if not stack:
                    machine.opcode = pos
                    raise machine.malformed("the pickle stops without a value")
                pos += 1
                return stack[-1]
            machine.opcode, machine.pos, machine.stack = pos, pos, stack
            if machine.is_at_window_end():  # they may touch the stack first
                raise NeedMore(pos + 1)
            if op not in opcodes:
                opcodes[op] = base + pos
            machine.pos = pos + 1
            rare[op](machine)
            pos, stack, memo, following = machine.pos, machine.stack, machine.memo, machine.next_index()
            data, base = machine.data, machine.base  # what is skipped may end behind the window
    finally:
        machine.pos, machine.stack = pos, stack


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: it would walk a growing tree again and again, a third of the time at 20,000 tensors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
