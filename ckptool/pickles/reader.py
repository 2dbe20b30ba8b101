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

import struct
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.errors import Failure, LimitExceeded
from ckptool.messages import counted
from ckptool.pickles.machine import RARE, Machine, NeedMore, Oddity, OnBuild
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PersistentId
from ckptool.pickles.scanner import FIRST
from ckptool.sources.source import Source

if TYPE_CHECKING:
    from ckptool.pickles.nodes import FieldNames

_U16 = Struct("<H").unpack_from
_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_U64 = Struct("<Q").unpack_from
_F64 = Struct(">d").unpack_from
_TEXT = frozenset((str,))
_ODD = FIRST + b"\\"
"""What text may begin with that holds pickles."""
_OF_BYTES = frozenset(b"TUBC\x8e\x96")
"""Opcodes of bytes, and of what Python 2 calls strings."""


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
    blocks: tuple[range, ...] = ()
    """Where bytes lie between the opcodes, in order."""
    calls: Sequence[Call] = ()
    """Everything that unpickling calls, in order, with what was done to each result; of dropped ones, too."""
    call_offsets: Sequence[int] = ()
    """Of the opcodes that call, from the start of the source in bytes."""
    memo: Sequence[Inert] | Mapping[int | str, Inert] = ()
    """What it remembers, by index."""
    doubled: Sequence[Inert] = ()
    """What it put on the stack once more, without the memo."""
    left: int = 0
    """Values left under the root: unpicklers drop them, and what they called was called."""
    rare: frozenset[int] = frozenset()
    """Of the opcodes that it has: those of frames, and of strings and long numbers of rare kinds."""
    has_lines: bool = False
    """Whether an argument of it ends with its line, but for names."""
    builds: Sequence[Call] = ()
    """The objects that got a state, in order."""
    build_offsets: Sequence[int] = ()
    """Of the opcodes that gave it."""
    carried: Sequence[tuple[int, str | bytes]] = ()
    """Strings that end with their line and may hold pickles, and where they begin."""
    odd_keys: Sequence[Inert] = ()
    """Keys of dicts and members of sets that are no text."""
    has_protocols: bool = False
    """Whether its protocol changes on the way."""
    has_old_strings: bool = False
    """Whether there are strings of Python 2 in it, which readers give other types;"""
    has_other_text: bool = False
    """whether some are not ASCII, so that each reader may take them for other text."""
    has_far_memo: bool = False
    """Whether an index of its memo takes far more memory than it has."""
    oddities: Sequence[Oddity] = ()
    """What has no place in a tree, of one that was read as far as that goes."""
    broken: str | None = None
    """Why it ends before STOP: what comes after is not known."""
    is_over_limit: bool = False
    """Whether that is for what reading on would cost."""

    @property
    def may_hold_bytes(self) -> bool:
        """Whether there may be bytes in it, or text that a call makes bytes of."""
        has_some = self.has_lines or not _OF_BYTES.isdisjoint(self.rare)
        return has_some or any(one.name == "encode" for one in self.globals)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is odd about it, though nothing in it can be misread."""
        return (f"{counted(self.left, 'value')} left under the one that the pickle gives",) if self.left else ()


def read_pickle(
    source: Source, start: int = 0, *, on_build: "OnBuild | None" = None, field_names: "FieldNames | None" = None
) -> Pickle:
    """
    Interpret the pickle that begins at byte ``start`` of ``source``.

    Nothing in it runs, whatever it asks for. Bytes after its end are not read. ``on_build`` is for what some writers
    put between opcodes: see ``joblib_arrays``. With ``field_names``, small dicts share their keys: for
    pickles of very many objects.

    Raises:
        TruncatedFile: The source ends inside the pickle.
        MalformedFile: The bytes are not a pickle; ``offset`` is that of the opcode.
        UnsafePickle: An opcode refers to this process's extension registry or to out-of-band buffers.
    """
    machine = Machine(source, start, on_build, field_names)
    return _recorded(machine, _run(machine))


def read_as_far(source: Source, start: int = 0, *, on_build: "OnBuild | None" = None) -> Pickle:
    """
    Interpret a pickle as far as Python's unpickler could, which goes on where no tree can be given.

    Where it breaks off is said, and what it called until then was called.
    """
    machine = Machine(source, start, on_build, is_patient=True)
    try:
        return _recorded(machine, _run(machine))
    except Failure as error:
        is_over = isinstance(error, LimitExceeded)
        return _recorded(machine, None)._replace(broken=error.message, is_over_limit=is_over, left=0)


def _run(machine: Machine) -> Inert:
    """Return the value at STOP, through as many windows as that takes."""
    try:
        while True:
            try:
                return _loop(machine)
            except NeedMore as need:
                machine.move_window(need.end)
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


def _recorded(machine: Machine, root: Inert) -> Pickle:
    return Pickle(
        root,
        machine.start,
        machine.base + machine.pos,
        machine.protocol,
        tuple(machine.globals.values()),
        tuple(machine.persistent_ids),
        tuple(machine.blocks),
        machine.calls,
        machine.call_offsets,
        machine.memo,
        machine.doubled,
        len(machine.stack) - 1 + sum(map(len, machine.marks)),
        frozenset(machine.rare),
        machine.has_lines,
        machine.builds,
        machine.build_offsets,
        machine.carried,
        machine.odd_keys,
        machine.has_protocols,
        machine.has_old_strings,
        machine.has_other_text,
        machine.has_far_memo,
        machine.oddities,
    )


def _loop(machine: Machine) -> Inert:  # noqa: C901 - the hot loop: calls would double its time
    """
    Run until STOP and return the value, or raise with ``pos`` at the opcode to begin again from.

    Every branch reads all of its argument before it touches the stack, so beginning again is safe. No branch asks
    whether the window holds its opcode: where it ends too early, IndexError, struct.error or NeedMore say so.
    """
    data, pos, stack, marks = machine.data, machine.pos, machine.stack, machine.marks
    memo: Any = machine.memo
    following = machine.next_index()
    rare, persistent_ids, on_build = RARE, machine.persistent_ids, machine.on_build
    calls, offsets, base = machine.calls, machine.call_offsets, machine.base
    builds, build_offsets, odd_keys = machine.builds, machine.build_offsets, machine.odd_keys
    names = machine.field_names
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
                        if following >= 0:
                            memo.append(stack[-1])
                            following += 1
                        else:
                            machine.pos = pos
                            machine.put(len(memo), stack[-1])
                        pos += 1
                        continue
                    if op == 0x86:  # TUPLE2
                        last = stack.pop()
                        stack[-1] = (stack[-1], last)
                        pos += 1
                        continue
                    if op == 0x89:  # NEWFALSE
                        stack.append(False)
                        pos += 1
                        continue
                    if op == 0x8C:  # SHORT_BINUNICODE
                        begin = pos + 2
                        end = begin + data[pos + 1]
                        if end > len(data):
                            raise NeedMore(end)
                        stack.append(str(data[begin:end], "utf-8", "surrogatepass"))
                        pos = end
                        continue
                    if op == 0x81:  # NEWOBJ
                        args = stack.pop()
                        stack[-1] = made = Call(stack[-1], args, "newobj")
                        calls.append(made)
                        offsets.append(base + pos)
                        pos += 1
                        continue
                    if op == 0x88:  # NEWTRUE
                        stack.append(True)
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
                stack.append(str(data[begin:end], "utf-8", "surrogatepass"))
                pos = end
                continue
            elif op == 0x51:  # BINPERSID
                stack[-1] = PersistentId(stack[-1])
                persistent_ids.append(stack[-1])
                pos += 1
                continue
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
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
            elif op == 0x4E:  # NONE
                stack.append(None)
                pos += 1
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
            elif op == 0x56 and data[pos + 1] not in _ODD and (end := data.find(b"\n", pos)) >= 0:  # UNICODE
                machine.has_lines = True
                stack.append(str(data[pos + 1 : end], "raw-unicode-escape"))
                pos = end + 1
                continue
            elif op == 0x30 and stack:  # POP
                stack.pop()
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
            rare[op](machine)
            pos, stack, memo, following = machine.pos, machine.stack, machine.memo, machine.next_index()
            data, base = machine.data, machine.base  # what is skipped may end behind the window
    finally:
        machine.pos, machine.stack = pos, stack
