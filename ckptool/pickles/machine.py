"""
The machine that interprets a pickle: what it has found, its registers, and its window onto the source.

The window covers the bytes around the opcode that is being read. An opcode that needs more raises ``NeedMore`` before
it has changed anything; then the window is moved and the opcode started again.

It also notes, on the way, what nobody is to look for again: opcodes that not all loaders know, strings that may be
pickles themselves, frames that end inside an opcode. For the last, the window never reaches beyond the frame that is
being read.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from ckptool.errors import LimitExceeded, MalformedFile, TruncatedFile
from ckptool.limits import refuse_long
from ckptool.messages import counted
from ckptool.pickles.nodes import Call, Global, Inert, PersistentId
from ckptool.sources.source import BytesSource, SliceSource, Source

if TYPE_CHECKING:
    from ckptool.pickles.nodes import FieldNames


_WINDOW: Final = 1 << 16
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


class NeedMore(Exception):
    """The window ends inside the opcode that is being read; the argument is the first byte that is not needed."""


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
        packed = packed_nbytes(source)
        self.left_nbytes = inf if packed is None else max(_INFLATED_NBYTES, _INFLATED_RATIO * packed)
        """Bytes of opcodes that may still be read, long arguments apart."""

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
        """Return the string that follows, behind a count of so many bytes, and move past it."""
        begin = self.pos + width
        count = int.from_bytes(self.data[self.pos : begin], "little")
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
        """Return the ``count`` lines that follow, without their ends, and move past them."""
        begin, lines = self.pos, []
        for _ in range(count):
            end = self.data.find(b"\n", begin)
            if end < 0 and self.is_patient and self.base + len(self.data) >= self.source.nbytes:
                # Python takes the last line for one without its end, and what it has without its last character.
                rest = self.data[self.pos :].split(b"\n")
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
        return self.lines(1)[0]

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

    def odd(self, how: Deed, target: Inert, given: Inert, what: str, kinds: tuple[type, ...]) -> None:
        """Note what Python would do to a target of some kinds and no tree can show; an error, unless it goes on."""
        if not self.is_patient or not isinstance(target, kinds):
            raise self.malformed(what)
        self.note(how, target, given)

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
            if len(self.names) >= _MOST_NAMES:  # each costs hundreds of bytes, and a few in the file
                fact = f"a pickle that asks for more than {_MOST_NAMES:,} names"
                raise LimitExceeded(fact, kind="too-many-names")
            if not self.is_patient:
                refuse_long("a name that the pickle asks for", module, name)
            found = self.names[module, name] = Global(module, name, self.base + self.opcode)
        return found

    def is_at_window_end(self) -> bool:
        """Say whether the opcode at ``pos`` may reach over the end of the window, and the source goes on."""
        window = len(self.data)
        is_near = self.pos + _LONGEST_FIXED > window and self.base + window < self.source.nbytes
        return is_near and self.base + self.pos != self._whole

    def truncated(self, end: int) -> TruncatedFile:
        begin = self.base + self.pos
        needed, left = end - self.pos, self.source.nbytes - begin
        fact = f"a pickle needs at least {needed:,} bytes at {begin:,}, the file has {left:,} left"
        return TruncatedFile.early(fact, "pickle", left, needed, begin)

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
        self.data = self.source.read(begin, min(left, max(needed, _WINDOW)))
        self.base, self.pos = begin, 0
        if self.frame_end is not None:
            self.begin_frame(self.frame_end)

    def begin_frame(self, end: int) -> None:
        """Let no window reach beyond ``end``, so that an opcode does not go unnoticed which does."""
        self.frame_end, self._uncut = end, self.data
        if self.base + len(self.data) > end:
            self.data = self.data[: end - self.base]

    def _leave_frame(self) -> None:
        if self.frame_end is not None:
            self.frame_end, self.data = None, self._uncut

    def note_split(self, offset: int) -> None:
        self.split_frame = offset if self.split_frame is None else self.split_frame


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


def end_of_opcode(source: Source, position: int) -> int:
    """Return where the opcode at ``position`` ends, with its argument, which the source may not have."""
    import pickletools  # few opcodes are at the end of a frame that they may reach over

    data = source.read(position, min(_LONGEST_FIXED, source.nbytes - position))
    opcode = next((one for one in pickletools.opcodes if one.code == chr(data[0])), None)
    nbytes = opcode.arg.n if opcode is not None and opcode.arg is not None else 0
    if width := _COUNTED.get(nbytes):
        return position + 1 + width + int.from_bytes(data[1 : 1 + width], "little")
    end = position + 1
    for _ in range(2 if data[:1] in b"ci" else 1) if nbytes < 0 else ():
        end = _end_of_line(source, end)
    return end + max(nbytes, 0)


_COUNTED: Final = {-2: 1, -3: 4, -4: 4, -5: 8}
"""Bytes of the count before as many bytes of argument, by what ``pickletools`` has for their number."""


def _end_of_line(source: Source, position: int) -> int:
    while position < source.nbytes:
        block = source.read(position, min(_WINDOW, source.nbytes - position))
        if found := block.find(b"\n") + 1:
            return position + found
        position += len(block)
    return position
