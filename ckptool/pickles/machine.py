"""
The machine that interprets a pickle: its registers, its window onto the source, and the opcodes that are rare.

The window covers the bytes around the opcode that is being read. An opcode that needs more raises ``NeedMore`` before
it has changed anything; then the window is moved and the opcode started again.

It also notes, on the way, what nobody is to look for again: opcodes that not all loaders know, strings that may be
pickles themselves, frames that end inside an opcode. For the last, the window never reaches beyond the frame that is
being read.

The opcodes here are those that checkpoints rarely use, one function each; the loop in ``reader`` has the frequent ones.

Each function finds ``pos`` at its opcode, reads all of its argument before it touches the stack, and leaves ``pos``
after the argument: so one that needs more bytes than the window holds can raise ``NeedMore`` and be started again.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from functools import cache
from math import inf
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from ckptool.errors import LimitExceeded, MalformedFile, TruncatedFile, UnsafePickle
from ckptool.limits import refuse_long
from ckptool.messages import counted
from ckptool.pickles.nodes import NO_ITEMS, Call, CallKind, Dict, Global, Inert, Pairs, PersistentId, Set, Unknown
from ckptool.sources.source import BytesSource, SliceSource, Source

if TYPE_CHECKING:
    from ckptool.pickles.nodes import FieldNames


_WINDOW: Final = 1 << 16
_WIDEST: Final = 1 << 18
_MOST_NAMES: Final = 100_000
_MOST_EMPTY: Final = 450_000
"""Containers that any pickle may begin, and one more for each two bytes: a pickler writes two opcodes for each.
An empty list takes 80 bytes while it is read, and two trees of them 150: more would break what we promise."""
_MOST_AHEAD: Final = 1024
_OF_BYTES: Final = frozenset(b"TUBC\x8e\x96")
"""Opcodes of bytes, and of what Python 2 calls strings."""
_LONGEST_FIXED: Final = 9  # an opcode and eight bytes of argument

# What a compressed pickle may have in opcodes, whichever is more: a state dict takes some hundred bytes for a tensor.
_INFLATED_NBYTES: Final = 1 << 20
_INFLATED_RATIO: Final = 4


def packed_nbytes(source: Source) -> int | None:
    """Return of how many bytes a source was unpacked, if it was."""
    while isinstance(source, SliceSource):
        source = source.whole
    return source.packed_nbytes if isinstance(source, BytesSource) else None


def _most_read(source: Source) -> float:
    """Return how many bytes of opcodes may be read: each can be an object."""
    packed = packed_nbytes(source)
    return inf if packed is None else max(_INFLATED_NBYTES, _INFLATED_RATIO * packed)


class NeedMore(Exception):
    """The window ends inside the opcode that is being read; ``end`` is the first byte that is not needed."""

    def __init__(self, end: int) -> None:
        self.end = end


Deed: TypeAlias = Literal["refers", "sets", "adds"]


class Oddity(NamedTuple):
    """Something that Python would do, and that no tree can show: a name gets a state, say."""

    how: Deed
    target: Inert
    given: Inert
    offset: int
    """Of the opcode, from the start of the source in bytes."""


OnBuild: TypeAlias = "Callable[[Machine, Call], Inert]"


class Pickle:
    """One pickle of a source: ``source[start:end]`` in bytes, and what it says. Nothing of it was looked up."""

    root: Inert = None
    end = 0
    protocol = 0
    memo: list[Inert] | dict[int | str, Inert]
    """What it remembers, by index: a list as long as they come in order, which is how nearly everybody writes them."""
    left = 0
    """Values left under the root: unpicklers drop them, and what they called was called."""
    split_frame: int | None = None
    """Where a frame ends inside an opcode, or goes on after the pickle: loaders disagree about what follows."""
    has_lines = False
    """Whether an argument of it ends with its line, but for names."""
    has_protocols = False
    """Whether its protocol changes on the way, and with it what names mean."""
    has_old_strings = False
    """Whether there are strings of Python 2 in it, which readers give other types;"""
    has_other_text = False
    """whether some are not ASCII, so that each reader may take them for other text."""
    has_far_memo = False
    """Whether an index of its memo is so large that Python needs far more memory for it than the pickle has."""
    broken: str | None = None
    """Why it ends before STOP: what comes after is not known."""
    is_over_limit = False
    """Whether that is for what reading on would cost."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.names: dict[tuple[str, str], Global] = {}
        """Every name that it asks for, in order of first use."""
        self.persistent_ids: list[PersistentId] = []
        """Every reference to something outside, in order."""
        self.blocks: list[range] = []
        """Where bytes lie that are no opcodes, in order."""
        self.calls: list[Call] = []
        """Everything that unpickling calls, in order, with what was done to each result; of dropped ones, too."""
        self.call_offsets = array("Q")  # an int each in the calls takes as much as a third of them
        """Of the opcodes that call, from the start of the source in bytes."""
        self.builds: list[Call] = []
        """The objects that got a state, in order."""
        self.build_offsets = array("Q")
        """Of the opcodes that gave it."""
        self.memo = []
        self.doubled: list[Inert] = []
        """What it put on the stack once more without the memo, or had in the memo before something else."""
        self.opcodes: dict[int, int] = {}
        """Opcodes that it has, but for the frequent ones of protocol 2, and the offset of the first of each."""
        self.carried: list[tuple[int, str | bytes]] = []
        """Strings that may hold pickles, and where they begin."""
        self.odd_keys: list[Inert] = []
        """Keys of dicts and members of sets that are no text: Python takes their hash."""
        self.oddities: list[Oddity] = []
        """What has no place in a tree, of one that was read as far as that goes."""

    @property
    def globals(self) -> tuple[Global, ...]:
        """Every name that it asks for, in order of first use."""
        return tuple(self.names.values())

    @property
    def may_hold_bytes(self) -> bool:
        """Whether there may be bytes in it, or text that a call makes bytes of."""
        has_some = self.has_lines or not _OF_BYTES.isdisjoint(self.opcodes)
        return has_some or any(one.name == "encode" for one in self.globals)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is odd about it, though nothing in it can be misread."""
        return (f"{counted(self.left, 'value')} left under the one that the pickle gives",) if self.left else ()

    def add(self, inner: Pickle) -> None:
        """Take what another pickle says that lies between the opcodes of this one, but for its root."""
        for key, found in inner.names.items():
            self.names.setdefault(key, found)
        memo = inner.memo
        self.doubled += (*inner.doubled, *(memo.values() if isinstance(memo, dict) else memo))
        self.opcodes = {**inner.opcodes, **self.opcodes}
        for name in ("persistent_ids", "calls", "builds", "carried", "odd_keys", "oddities"):
            getattr(self, name).extend(getattr(inner, name))
        self.call_offsets += inner.call_offsets
        self.build_offsets += inner.build_offsets
        self.has_protocols |= inner.has_protocols or self.protocol < 3 <= inner.protocol
        for name in ("has_lines", "has_old_strings", "has_other_text", "has_far_memo"):
            setattr(self, name, getattr(self, name) or getattr(inner, name))
        self.split_frame = inner.split_frame if self.split_frame is None else self.split_frame


class Machine(Pickle):
    """
    A pickle that is being read, and the machine's registers: a stack, the stacks set aside by marks, and a window.
    """

    data = b""
    pos = 0
    opcode = 0  # position of the opcode that errors are about
    frame_end: int | None = None
    """Of the frame that is being read."""
    empty = 0
    """Lists, dicts and sets that were begun, by an opcode of one byte each."""
    _argument_nbytes = 0
    _uncut = b""
    """The window, with what comes after the frame."""
    _whole = -1
    """Where an opcode begins that is known to end in its frame."""

    def __init__(
        self,
        source: Source,
        start: int,
        on_build: OnBuild | None = None,
        field_names: FieldNames | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        super().__init__(start)
        self.source = source
        self.is_patient = is_patient
        """Whether it goes on as long as Python's unpickler could, and notes what has no place in a tree."""
        self.on_build = on_build
        """Returns what an object is that has got its state; bytes that are no opcodes may follow it."""
        self.field_names = field_names
        """Where small dicts share their keys; None where they do not."""
        self.base = start  # source offset of data[0]
        self.stack: list[Inert] = []
        self.marks: list[list[Inert]] = []
        self.left_nbytes = _most_read(source)
        """Bytes of opcodes that may still be read, long arguments apart."""
        # Each window is a read, which may be cancelled: then none is to hold too many opcodes.
        self._widest = _WIDEST if self.left_nbytes == inf and source.cancellation is None else _WINDOW

    def stop(self, root: Inert) -> None:
        """Let go of the registers: what is left is what the pickle said."""
        self.root, self.end = root, self.base + self.pos
        if self.broken is None:
            self.left = len(self.stack) - 1 + (sum(map(len, self.marks)) if self.marks else 0)
            if self.frame_end is not None and self.frame_end != self.end:
                self.note_split(self.end - 1)
        self.data = self._uncut = b""
        del self.stack, self.marks, self.on_build, self.field_names

    def take(self, begin: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of argument from window position ``begin`` and move past them."""
        end = begin + nbytes
        if end > len(self.data):
            raise NeedMore(end)
        self.pos = end
        return self.data[begin:end]

    def string(self, width: int) -> bytes:
        """Return the string after the opcode and a count of so many bytes, and move past it."""
        begin = self.pos + 1 + width
        count = int.from_bytes(self.data[self.pos + 1 : begin], "little")
        if begin > len(self.data):
            raise NeedMore(begin)
        data = self.take(begin, count)
        self.carry(self.base + begin, data)
        return data

    def carry(self, offset: int, value: str | bytes) -> None:
        """Keep a string if it may hold pickles."""
        if may_hold_pickles(value):
            self.carried.append((offset, value))

    def lines(self, count: int) -> list[bytes]:
        """Return the ``count`` lines that follow the opcode, without their ends, and move past them."""
        begin, lines = self.pos + 1, []
        for _ in range(count):
            end = self.data.find(b"\n", begin)
            if end < 0 and self.is_patient and self.base + len(self.data) >= self.source.nbytes:
                # Python takes the last line for one without its end, and what it has without its last character.
                rest = self.data[self.pos + 1 :].split(b"\n")
                self.pos = len(self.data)
                return [*rest[:-1], rest[-1][:-1], b""][:count]
            if end < 0:
                # Twice as much each time: a long line would be searched over and over.
                whole = self.source.nbytes - self.base
                raise NeedMore(max(len(self.data) + 1, min(whole, 2 * len(self.data))))
            lines.append(self.data[begin:end])
            begin = end + 1
        self.pos = begin
        return lines

    def line(self) -> bytes:
        self.has_lines = True
        begin = self.pos + 1
        end = self.data.find(b"\n", begin)
        if end < 0:
            return self.lines(1)[0]
        self.pos = end + 1
        return self.data[begin:end]

    @property
    def position(self) -> int:
        """The offset in the source of the byte that is next."""
        return self.base + self.pos

    def peek(self) -> int:
        """Return the byte that is next; raise TruncatedFile if there is none."""
        if self.position >= self.source.nbytes:
            raise self.truncated(self.pos + 1)
        return self.source.read(self.position, 1)[0]

    def skip(self, nbytes: int, *, opcodes: bool = False) -> None:
        """Move past bytes of the source that the loop is not to see; ``opcodes`` says that they were a pickle."""
        end = self.pos + nbytes
        if self.base + end > self.source.nbytes:
            raise self.truncated(end)
        self._leave_frame()
        if not opcodes:
            self.blocks.append(range(self.position, self.base + end))
        if end <= len(self.data):
            self.pos = end
            self._argument_nbytes += 0 if opcodes else nbytes
            return
        self.left_nbytes -= self.pos - self._argument_nbytes + (nbytes if opcodes else 0)
        self._argument_nbytes = 0
        self.base += end
        self.data, self.pos = self.source.read(self.base, min(_WINDOW, self.source.nbytes - self.base)), 0

    def pop_mark(self) -> list[Inert]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def push(self, value: Inert) -> None:
        self.stack.append(value)

    def push_call(self, made: Call) -> None:
        self.push(made)
        self.calls.append(made)
        self.call_offsets.append(self.base + self.opcode)

    def note(self, how: Deed, target: Inert, given: Inert = None) -> None:
        """Note what Python would do to a target that is no object of the pickle, or for a second time."""
        self.oddities.append(Oddity(how, target, given, self.base + self.opcode))

    def push_line(self, value: str | bytes) -> None:
        """Put a string on the stack that ended with its line."""
        self.carry(self.base + self.opcode + 1, value)
        self.push(value)

    def put(self, index: int | str, value: Inert) -> None:
        """Remember a value under an index, in whatever order they come. Text is that of an index far out."""
        if isinstance(index, str) or index > _MOST_AHEAD + self.position - self.start:
            self.has_far_memo = True
        memo: Any = self.memo
        if type(memo) is list and (isinstance(index, str) or index >= len(memo)):
            if index == len(memo):
                memo.append(value)
                return
            memo = self.memo = dict(enumerate(memo))
        is_there = type(memo) is list or index in memo
        if is_there:
            self.doubled.append(memo[index])  # it may have been taken from there before
        memo[index] = value

    def next_index(self) -> int:
        """Return the index that the memo has next if they come in order; -1 once one did not."""
        return len(self.memo) if isinstance(self.memo, list) else -1

    def intern(self, module: str, name: str) -> Global:
        found = self.names.get((module, name))
        if found is None:
            self.refuse_more_names()
            if not self.is_patient:
                refuse_long("a name that the pickle asks for", module, name)
            found = self.names[module, name] = Global(module, name, self.base + self.opcode)
        return found

    def refuse_more_names(self) -> None:
        """Refuse more names than any program has: each costs hundreds of bytes, and a few in the file."""
        if len(self.names) >= _MOST_NAMES:
            raise LimitExceeded(f"a pickle that asks for more than {_MOST_NAMES:,} names", kind="too-many-names")

    def is_at_window_end(self) -> bool:
        """Say whether the opcode at ``pos`` may reach over the end of the window, and the source goes on."""
        window = len(self.data)
        is_near = self.pos + _LONGEST_FIXED > window and self.base + window < self.source.nbytes
        return is_near and self.base + self.pos != self._whole

    def truncated(self, end: int) -> TruncatedFile:
        begin = self.base + self.pos
        needed, left = end - self.pos, self.source.nbytes - begin
        return TruncatedFile(
            f"truncated: a pickle needs at least {needed:,} bytes at {begin:,}, the file has {left:,} left",
            kind="truncated-pickle",
            hint="Download the file again.",
            offset=begin,
            needed=needed,
            actual=left,
        )

    def malformed(self, what: str) -> MalformedFile:
        offset = self.base + self.opcode
        return MalformedFile(f"malformed pickle at byte {offset:,}: {what}", kind="malformed-pickle", offset=offset)

    def move_window(self, end: int) -> None:
        """Drop what has been read and fetch bytes so that the window covers ``end``, or raise TruncatedFile."""
        begin = self.base + self.pos
        window = self.base + len(self.data)
        if self.frame_end is not None and window >= min(self.frame_end, self.source.nbytes):
            if begin < self.frame_end and begin != self._whole:
                if end_of_opcode(self.source, begin) <= self.frame_end:
                    self._whole = begin
                    return
                self.note_split(self.frame_end)
            self._leave_frame()
            if end <= len(self.data) and not self.is_at_window_end():
                return
        needed = end - self.pos
        left = self.source.nbytes - begin
        if needed > left:
            raise self.truncated(end)
        self.left_nbytes -= self.pos - self._argument_nbytes
        self._argument_nbytes = needed if needed > _WINDOW else 0
        most = _MOST_EMPTY + (begin - self.start) // 2
        scattered = len(self.memo) if isinstance(self.memo, dict) else 0
        if max(self.empty, len(self.marks), 3 * scattered) > most:  # to name an index takes five bytes more
            raise LimitExceeded(
                f"a pickle of more than {most:,} empty objects in {begin - self.start:,} bytes",
                kind="pickle-bomb",
                offset=begin,
            )
        if self.left_nbytes < 0:
            raise LimitExceeded(
                "a compressed pickle of far more objects than the file has bytes",
                kind="pickle-bomb",
                hint="If you trust it, unpack it first.",
                offset=begin,
            )
        # Doubling keeps the number of moves, and so of bytes kept over, logarithmic for one long string.
        span = min(left, max(needed, _WINDOW, min(2 * len(self.data), self._widest)))
        self.data = self.source.read(begin, span)
        self.base, self.pos = begin, 0
        if self.frame_end is not None:
            self._cut()

    def begin_frame(self, end: int) -> None:
        """Let no window reach beyond ``end``, so that an opcode does not go unnoticed which does."""
        self.frame_end = end
        self._cut()

    def _cut(self) -> None:
        self._uncut = self.data
        if self.frame_end is not None and self.base + len(self.data) > self.frame_end:
            self.data = self.data[: self.frame_end - self.base]

    def _leave_frame(self) -> None:
        if self.frame_end is not None:
            self.frame_end, self.data = None, self._uncut

    def note_split(self, offset: int) -> None:
        self.split_frame = offset if self.split_frame is None else self.split_frame


_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_U64 = Struct("<Q").unpack_from

_INTEGER: Final = rb"[+-]?(?:0|[1-9][0-9]*)"  # readers disagree about leading zeros: octal, decimal, refused
_MAX_INT_NBYTES: Final = 1024
_ESCAPES: Final = rb"\\(?:[abfnrtv\\'\"\n]|x[0-9a-fA-F]{2}|[0-7]{1,3})"
OUTSIDE: Final = (Global, PersistentId, Unknown)
"""What the process knows, and no pickle holds."""
_ESCAPED: Final = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))


def op_proto(machine: Machine) -> None:
    before, machine.protocol = machine.protocol, machine.data[machine.pos + 1]
    if machine.base + machine.pos != machine.start and before != machine.protocol:
        machine.has_protocols = True
    if machine.protocol > 5:
        raise MalformedFile(
            f"pickle protocol {machine.protocol} at byte {machine.base + machine.pos:,}; the newest is 5",
            kind="malformed-pickle",
            offset=machine.base + machine.pos,
        )
    machine.pos += 2


def op_frame(machine: Machine) -> None:
    nbytes = _U64(machine.data, machine.pos + 1)[0]
    if nbytes > machine.source.nbytes - machine.base - machine.pos - 9 and not machine.is_patient:
        raise machine.truncated(machine.pos + 9 + nbytes)
    begin = machine.base + machine.pos
    if machine.frame_end is not None:
        machine.note_split(begin)
    machine.pos += 9
    machine.begin_frame(begin + 9 + nbytes)


def op_int(machine: Machine) -> None:
    line = machine.line()
    machine.push(line == b"01" if line in (b"00", b"01") else _decimal(machine, line))


def op_long(machine: Machine) -> None:
    machine.push(_decimal(machine, machine.line().removesuffix(b"L")))


def _decimal(machine: Machine, digits: bytes) -> Inert:
    digits = digits.strip()
    if not re.fullmatch(_INTEGER, digits):
        raise machine.malformed(f"not a number: {len(digits):,} characters")
    # As in _little_endian; here reading takes quadratic time, too.
    return int(digits) if len(digits) <= _MAX_INT_NBYTES else digits


def _memo_index(machine: Machine) -> Inert:
    line = machine.line()
    if machine.is_patient and re.fullmatch(rb"\s*\+?[0-9_]{1,4096}\s*", line):
        index = int(line)
        return index if index < 1 << 32 else f"{index:x}"  # larger numbers could be chosen to have one hash
    index = _decimal(machine, line)
    if not (isinstance(index, int) and 0 <= index < 1 << 32):
        raise machine.malformed("a memo index that is not a number from 0 to 4,294,967,295")
    return index


def op_long4(machine: Machine) -> None:
    nbytes = _I32(machine.data, machine.pos + 1)[0]
    if nbytes < 0:
        raise machine.malformed(f"a number of {nbytes:,} bytes")
    machine.push(_little_endian(machine.take(machine.pos + 5, nbytes)))


def _little_endian(digits: bytes) -> Inert:
    # Huge numbers stay bytes: printing one takes quadratic time, and nothing counts that far.
    return int.from_bytes(digits, "little", signed=True) if len(digits) <= _MAX_INT_NBYTES else digits


def op_string(machine: Machine) -> None:
    line = machine.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise machine.malformed("a string without quotes")
    machine.push_line(_python2_text(machine, re.sub(_ESCAPES, lambda found: _meaning(found[0]), line[1:-1])))


def op_binstring(machine: Machine) -> None:
    nbytes = _I32(machine.data, machine.pos + 1)[0]
    if nbytes < 0:
        raise machine.malformed(f"a string of {nbytes:,} bytes")
    machine.push(_python2_text(machine, machine.string(4)))


def op_binunicode8(machine: Machine) -> None:
    begin = machine.pos + 9
    text = str(machine.take(begin, _U64(machine.data, machine.pos + 1)[0]), "utf-8", "surrogatepass")
    machine.carry(machine.base + begin, text)
    machine.push(text)


def op_global(machine: Machine) -> None:
    module, name = machine.lines(2)
    machine.push(machine.intern(str(module, "utf-8"), str(name, "utf-8")))


def op_stack_global(machine: Machine) -> None:
    module, name = machine.stack[-2:]
    if isinstance(module, str) and isinstance(name, str):
        found: Inert = machine.intern(module, name)
    elif machine.is_patient:
        found = _unknown(machine, "a name that is computed")
    else:
        raise machine.malformed("a global whose name is no string")
    machine.stack[-2:] = [found]
    machine.pos += 1


def _unknown(machine: Machine, why: str) -> Unknown:
    found = Unknown(why)
    machine.note("refers", found)
    return found


def _extension(width: int) -> Callable[[Machine], None]:
    def op_extension(machine: Machine) -> None:
        if not machine.is_patient:
            why = "only the process that wrote it knows its meaning"
            raise _unsafe(machine, "extension code", why, "unsafe-extension")
        code = int.from_bytes(machine.data[machine.pos + 1 : machine.pos + 1 + width], "little")
        machine.push(_unknown(machine, f"extension code {code:,}"))
        machine.pos += 1 + width

    return op_extension


def op_next_buffer(machine: Machine) -> None:
    if machine.is_patient:
        machine.push(_unknown(machine, "an out-of-band buffer"))
        machine.pos += 1
        return
    raise _unsafe(machine, "out-of-band buffer", "the data was never in this file", "unsafe-buffer")


def _unsafe(machine: Machine, what: str, why: str, kind: str) -> UnsafePickle:
    offset = machine.base + machine.pos
    return UnsafePickle(f"{what} at byte {offset:,}: {why}", kind=kind, offset=offset)


def op_inst(machine: Machine) -> None:
    module, name = machine.lines(2)
    found = machine.intern(str(module, "utf-8"), str(name, "utf-8"))
    _called(machine, found, tuple(machine.pop_mark()))


def op_obj(machine: Machine) -> None:
    machine.pos += 1
    cls, *args = machine.pop_mark()
    _called(machine, cls, tuple(args))


def _called(machine: Machine, func: Inert, args: Inert, how: CallKind = "reduce", kwargs: Inert = None) -> None:
    machine.push_call(Call(func, args, how, kwargs))


def op_newobj_ex(machine: Machine) -> None:
    machine.pos += 1
    kwargs, args, cls = (machine.stack.pop() for _ in range(3))
    _called(machine, cls, args, "newobj_ex", kwargs)


def op_build(machine: Machine) -> None:
    machine.pos += 1
    state, target = machine.stack.pop(), machine.stack[-1]
    if not isinstance(target, Call):
        if machine.is_patient and isinstance(target, OUTSIDE):
            machine.note("sets", target, state)
        elif not (machine.is_patient and _sets_nothing(state)):
            raise machine.malformed("a state for something that is no object")
        return
    if target.state is not None:
        if not machine.is_patient:
            raise machine.malformed("a second state for one object")
        machine.note("sets", target, state)
        return
    target.state = state
    machine.builds.append(target)
    machine.build_offsets.append(machine.base + machine.opcode)
    if machine.on_build is not None:
        machine.stack[-1] = machine.on_build(machine, target)


def _sets_nothing(state: Inert) -> bool:
    """Say whether Python takes a state for none, whatever it is for."""
    if type(state) is tuple and len(state) == 2:
        return _sets_nothing(state[0]) and _sets_nothing(state[1])
    if type(state) in (Dict, Set):
        return not (state.pairs if type(state) is Dict else state.items)
    return not isinstance(state, (Call, *OUTSIDE)) and not state


def op_persid(machine: Machine) -> None:
    machine.push(PersistentId(str(machine.line(), "utf-8")))
    machine.persistent_ids.append(machine.stack[-1])


def op_pop(machine: Machine) -> None:
    machine.pos += 1
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()  # POP of a mark, as CPython allows


def op_pop_mark(machine: Machine) -> None:
    machine.pos += 1
    machine.pop_mark()


def op_dup(machine: Machine) -> None:
    machine.pos += 1
    machine.push(machine.stack[-1])
    machine.doubled.append(machine.stack[-1])


def op_get(machine: Machine) -> None:
    index: Inert = _memo_index(machine)
    memo: Inert = machine.memo
    if type(index) is str and type(memo) is list:
        raise KeyError(index)
    machine.push(memo[index])


def op_tuple3(machine: Machine) -> None:
    machine.pos += 1
    machine.stack[-3:] = [(machine.stack[-3], machine.stack[-2], machine.stack[-1])]


def op_list(machine: Machine) -> None:
    machine.pos += 1
    machine.push(machine.pop_mark())


def op_append(machine: Machine) -> None:
    machine.pos += 1
    value = machine.stack.pop()
    _extend(machine, machine.stack[-1], [value])


def op_appends(machine: Machine) -> None:
    machine.pos += 1
    values = machine.pop_mark()
    _extend(machine, machine.stack[-1], values)


def _extend(machine: Machine, target: Inert, values: list[Inert]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Call):
        target.items = target.items or []
        target.items.extend(values)
    elif machine.is_patient and (not values or isinstance(target, (bytearray, *OUTSIDE))):
        machine.note("adds", target, values)
    else:
        raise machine.malformed("items for something that is no list")


def op_dict(machine: Machine) -> None:
    machine.pos += 1
    machine.push(Dict(_pairs(machine, machine.pop_mark()) or None))


def op_setitem(machine: Machine) -> None:
    machine.pos += 1
    value, key = machine.stack.pop(), machine.stack.pop()
    if type(key) is not str:
        machine.odd_keys.append(key)
    _update(machine, machine.stack[-1], ((key, value),))


def op_setitems(machine: Machine) -> None:
    machine.pos += 1
    flat = machine.pop_mark()
    if machine.is_patient and len(flat) % 2:  # Python sets the whole pairs first
        _update(machine, machine.stack[-1], _pairs(machine, flat[:-1]))
    _update(machine, machine.stack[-1], _pairs(machine, flat))


def _update(machine: Machine, target: Inert, pairs: Inert) -> None:
    if isinstance(target, Dict):
        target.update(pairs)
    elif isinstance(target, Call):
        target.pairs = target.pairs or []
        target.pairs.extend(pairs)
    elif machine.is_patient and (not pairs or isinstance(target, (list, *OUTSIDE))):
        machine.note("adds", target, pairs)
    else:
        raise machine.malformed("pairs for something that is no dict")


def _pairs(machine: Machine, flat: list[Inert]) -> Pairs:
    if len(flat) % 2:
        raise machine.malformed(f"a dict of {len(flat):,} keys and values")
    machine.odd_keys += (key for key in flat[::2] if type(key) is not str)
    return list(zip(flat[::2], flat[1::2], strict=True))[:]  # a copy has no room to spare


def op_empty_set(machine: Machine) -> None:
    machine.pos, machine.empty = machine.pos + 1, machine.empty + 1
    machine.push(Set(NO_ITEMS))


def op_additems(machine: Machine) -> None:
    machine.pos += 1
    values, target = machine.pop_mark(), machine.stack[-1]
    machine.odd_keys += (one for one in values if type(one) is not str)
    if isinstance(target, Set):
        target.update(values)
    else:
        _extend(machine, target, values)


def op_frozenset(machine: Machine) -> None:
    machine.pos += 1
    values = machine.pop_mark()
    machine.odd_keys += (one for one in values if type(one) is not str)
    machine.push(Set(values or NO_ITEMS, frozen=True))


def op_readonly_buffer(machine: Machine) -> None:
    machine.pos += 1


def op_unknown(machine: Machine) -> None:
    raise machine.malformed(f"0x{machine.data[machine.pos]:02x} is not a pickle opcode")


def _python2_text(machine: Machine, data: bytes) -> str | bytes:
    """Return what a Python 2 ``str`` was: text where it can be, else the bytes (numpy put raw data into them)."""
    machine.has_old_strings = True
    machine.has_other_text = machine.has_other_text or not data.isascii()
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


@cache  # of the thousand or so that there are
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
    Let a patient machine go on where Python may: what one line says may be sound for it though it is not for us.

    What does not begin like ``sound`` is so for nobody.
    """

    def run(machine: Machine) -> None:
        begin = machine.pos
        try:
            step(machine)
        except (MalformedFile, ValueError):
            line = machine.data[begin + 1 : machine.pos].removesuffix(b"\n")
            if not machine.is_patient or machine.pos == begin or not re.match(sound, line, re.DOTALL | re.IGNORECASE):
                raise
            machine.push(Unknown("a malformed value"))

    return run


_NAMED: Final[dict[int, Callable[[Machine], None]]] = {
    0x80: op_proto,
    0x95: op_frame,
    ord("I"): _patiently(op_int, rb"\s*[+-]?[0-9]|\0|\Z"),
    ord("L"): _patiently(op_long, rb"\s*[+-]?[0-9]"),
    0x8A: lambda machine: machine.push(_little_endian(machine.take(machine.pos + 2, machine.data[machine.pos + 1]))),
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
    0x97: op_next_buffer,
    0x98: op_readonly_buffer,
    ord("c"): op_global,
    0x93: op_stack_global,
    0x82: _extension(1),
    0x83: _extension(2),
    0x84: _extension(4),
    ord("i"): op_inst,
    ord("o"): op_obj,
    0x92: op_newobj_ex,
    ord("b"): op_build,
    ord("P"): op_persid,
    ord("0"): op_pop,
    ord("1"): op_pop_mark,
    ord("2"): op_dup,
    ord("g"): op_get,
    ord("p"): lambda machine: machine.put(_memo_index(machine), machine.stack[-1]),
    0x87: op_tuple3,
    ord("l"): op_list,
    0x8F: op_empty_set,
    ord("a"): op_append,
    ord("e"): op_appends,
    ord("d"): op_dict,
    ord("s"): op_setitem,
    ord("u"): op_setitems,
    0x90: op_additems,
    0x91: op_frozenset,
}

RARE: Final = [_NAMED.get(op, op_unknown) for op in range(256)]
"""The function for each opcode, by its byte."""


# What strings begin with that may hold pickles


FIRST: Final = b"\x80\xc2\xc3\x93\xfdP\x1fBxc("
"""Their first bytes. The first two bytes of UTF-8 stand for any from 0x80 on."""
_HOLDERS: Final = (
    *(b"PK\x03\x04", b"\x1f\x8b\x08", b"BZh", b"\xfd7zX", b"\x93NUM"),
    *(b"x\x01", b"x\x5e", b"x\x9c", b"x\xda"),
)
"""Zip, gzip, bzip2, xz, an array of numpy, zlib."""
_LONGEST_TEXT: Final = 512
"""Bytes in which a pickle without PROTO has the end of a line: of its first name, mostly."""
_BEGINS_WITH_LINE: Final = re.compile(rb"\(|c[^\0-\x08\x0b\x0c\x0e-\x1f]{0,510}?\n", re.DOTALL).match
"""A bracket, or the module of a name: none has control characters in it."""
_STOPS_AT_ONCE: Final = re.compile(
    rb"(?:\(+|c[^\n]*\n[^\n]*\n)[^().012BCFGIJKLMNPQRSTUVX\]ab-eghijlopqrstu}?\x80-\xff]"
).match
"""
A name or a bracket, and then a character that is no opcode, at which every unpickler stops: source code, mostly.
A question mark may stand for any character.
"""


def may_hold_pickles(value: str | bytes | bytearray) -> bool:
    """Say whether a string may be a pickle, or hold some, by its first bytes. Characters of text stand for bytes."""
    if not value:
        return False
    if isinstance(value, str):
        first = ord(value[0])
        if first > 0xFF or first not in FIRST:
            return False
        value = value[:_LONGEST_TEXT].encode("latin-1", "replace")
    if value[0] in b"c(":  # a pickle without PROTO, mostly; then there is an end of line in it
        text = value[:_LONGEST_TEXT]
        return b"\n" in text and _BEGINS_WITH_LINE(text) is not None and _STOPS_AT_ONCE(text) is None
    return (value[0] == 0x80 and len(value) > 1 and value[1] <= 5) or value.startswith(_HOLDERS)


# How long opcodes are


_FIXED: Final = dict(zip(b"\x80\x95KMJGhjqr\x82\x83\x84", (1, 8, 1, 2, 4, 8, 1, 4, 1, 4, 1, 2, 4), strict=True))
"""Bytes of argument, for opcodes that have a fixed number of them; those not named anywhere here have none."""
_COUNTED: Final = dict(zip(b"\x8a\x8bTUX\x8c\x8dB\x8eC\x96", (1, 4, 4, 1, 4, 1, 8, 4, 8, 1, 8), strict=True))
"""Size in bytes of the count before as many bytes of argument."""
_LINES: Final = {**dict.fromkeys(b"ILFSVPgp", 1), **dict.fromkeys(b"ci", 2)}


def end_of_opcode(source: Source, position: int) -> int:
    """Return where the opcode at ``position`` ends, with its argument, which the source may not have."""
    data = source.read(position, min(_LONGEST_FIXED, source.nbytes - position))
    op = data[0]
    if op in _COUNTED:
        behind = 1 + _COUNTED[op]
        return position + behind + int.from_bytes(data[1:behind], "little")
    end = position + 1 + _FIXED.get(op, 0)
    for _ in range(_LINES.get(op, 0)):
        end = _end_of_line(source, end)
    return end


def _end_of_line(source: Source, position: int) -> int:
    while position < source.nbytes:
        block = source.read(position, min(_WINDOW, source.nbytes - position))
        if found := block.find(b"\n") + 1:
            return position + found
        position += len(block)
    return position
