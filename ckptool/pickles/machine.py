"""
The state of the interpreter of pickles: ``Pickle``, its results; registers; its window onto the source.

The window covers the bytes around the current opcode. An opcode that needs more raises ``NeedMore`` before it has
changed anything; then the window is moved and the opcode is started again.

It also records facts that would need another pass: opcodes that not all loaders know, strings that may be pickles
themselves, frames that end inside an opcode. To see the last, the window never extends beyond the current frame.
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

# Rules, and what each is against:
# 1. The window is small and moves along: behind the pickle may be gigabytes of storages (legacy streams), and between
#    its opcodes those of arrays (joblib).
# 2. An opcode changes nothing before it has all of its bytes: it is started again after the window was moved.
# 3. A frame that ends inside an opcode is noted. Python's unpickler in C reads on over the end of a frame, the one in
#    Python stops there, so that a file could show other opcodes to each.
# 4. What takes more memory than its bytes is counted as it is made: empty containers and marks (one byte each), indices
#    of the memo that leave gaps, names, and opcodes that were compressed a thousand to one.
# 5. A memo index from the file is never hashed as a large number: numbers can be chosen to have one hash, on which a
#    dict takes quadratic time. CPython allocates its memo up to the largest index, so that one far ahead is noted.
# 6. Strings that could be pickles are kept with their offsets: what loads them later is a call like any other
#    (torch.storage._load_from_bytes), and payloads are hidden there.
# 7. A patient machine (follows_python) goes on where a tree has no value, as an unpickler would have run the calls
#    before that already.

_WINDOW: Final = 1 << 16
_MOST_NAMES: Final = 100_000
_MOST_EMPTY: Final = 450_000
"""Containers that any pickle may have, and one more for each two bytes: a pickler writes two opcodes for each. An
empty list takes 80 bytes while it is read, and two trees of them 150: with more, memory would exceed its bound."""
_MOST_AHEAD: Final = 1024
_OF_BYTES: Final = frozenset(b"TUBC\x8e\x96")
"""Opcodes of bytes, and of Python 2's strings."""
_LONGEST_FIXED: Final = 9  # an opcode and eight bytes of argument

# Bytes of opcodes that a compressed pickle may have, whichever is more: a state dict takes about 100 for a tensor.
_INFLATED_NBYTES: Final = 1 << 20
_INFLATED_RATIO: Final = 4


def packed_nbytes(source: Source) -> int | None:
    """Return the size of the compressed file that a source was unpacked from; None if it was not compressed."""
    while isinstance(source, SliceSource):
        source = source.whole
    return source.packed_nbytes if isinstance(source, BytesSource) else None


class NeedMore(Exception):
    """The window ends inside the current opcode; the argument is the window position where the opcode ends."""


Deed: TypeAlias = Literal["refers", "sets", "adds"]


class Oddity(NamedTuple):
    """Something that unpickling would do and a tree cannot show, for example giving a state to a name."""

    how: Deed
    target: Inert
    given: Inert
    offset: int
    """Offset of the opcode in the source, in bytes."""


OnBuild: TypeAlias = "Callable[[Machine, Call], Inert]"


class Pickle:
    """A pickle that was read: ``source[start:end]`` in bytes, and its contents. No name in it was looked up."""

    root: Inert = None
    end = 0
    protocol = 0
    memo: list[Inert] | dict[int | str, Inert]
    """The memo by index: a list as long as the indices come in order, as nearly all writers number them."""
    left = 0
    """Values left on the stack under the root: unpicklers drop them, but have made their calls."""
    split_frame: int | None = None
    """Offset where a frame ends inside an opcode, or goes on after the pickle: loaders disagree about what follows."""
    has_lines = False
    """Whether an opcode other than of names has an argument that ends with a line."""
    has_protocols = False
    """Whether the protocol changes after the start, and with it the meaning of names."""
    has_old_strings = False
    """Whether it has strings of Python 2, whose type depends on the reader."""
    has_other_text = False
    """Whether some of them are not ASCII, so that their text depends on the reader, too."""
    has_far_memo = False
    """Whether an index of its memo is so large that Python needs far more memory for it than the pickle has."""
    broken: str | None = None
    """Why reading ended before STOP: what comes after is not known."""
    is_over_limit = False
    """Whether it ended because reading on would exceed the limits."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.names: dict[tuple[str, str], Global] = {}
        """Every name that it refers to, in order of first use."""
        self.persistent_ids: list[PersistentId] = []
        """Every reference to something outside, in order."""
        self.blocks: list[range] = []
        """Ranges of bytes between the opcodes, in order."""
        self.calls: list[Call] = []
        """Every call that unpickling would make, in order, also if its result is dropped."""
        self.call_offsets = array("Q")  # an int in each call would take a third of the call's memory
        """Offsets of the opcodes of the calls in the source, in bytes."""
        self.builds: list[Call] = []
        """The objects that get a state, in order."""
        self.build_offsets = array("Q")
        """Offsets of the opcodes that give it."""
        self.memo = []
        self.doubled: list[Inert] = []
        """Values that DUP put on the stack again, or that another value replaced in the memo."""
        self.opcodes: dict[int, int] = {}
        """The opcodes that occur, without the frequent ones of protocol 2, and the offset of the first of each."""
        self.carried: list[tuple[int, str | bytes]] = []
        """Strings that may hold pickles, and their offsets."""
        self.odd_keys: list[Inert] = []
        """Keys of dicts and members of sets that are not text: Python computes their hash."""
        self.oddities: list[Oddity] = []
        """What a tree cannot show; only recorded by ``read_as_far``."""

    @property
    def globals(self) -> tuple[Global, ...]:
        """Every name that it refers to, in order of first use."""
        return tuple(self.names.values())

    @property
    def may_hold_bytes(self) -> bool:
        """Whether it may contain bytes, or text that a call turns into bytes."""
        has_some = self.has_lines or not _OF_BYTES.isdisjoint(self.opcodes)
        return has_some or any(one.name == "encode" for one in self.globals)

    @property
    def notes(self) -> tuple[str, ...]:
        """Oddities that cannot be misread, as text."""
        return (f"{counted(self.left, 'value')} left under the one that the pickle gives",) if self.left else ()

    def add(self, inner: Pickle) -> None:
        """Add the contents of another pickle, between the opcodes of this one, except its root."""
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
    A pickle that is being read, with the registers: a stack, the stacks set aside by marks, and a window.
    """

    data = b""
    pos = 0
    opcode = 0  # position of the opcode that errors are about
    frame_end: int | None = None
    """Offset of the end of the current frame in the source."""
    empty = 0
    """How many lists, dicts and sets were begun by an opcode of one byte."""
    _argument_nbytes = 0
    _uncut = b""
    """The window, not cut at the end of the frame."""
    _whole = -1
    """Offset of an opcode that is known to end inside its frame."""

    def __init__(
        self,
        source: Source,
        start: int,
        on_build: OnBuild | None = None,
        field_names: FieldNames | None = None,
        *,
        follows_python: bool = False,
    ) -> None:
        super().__init__(start)
        self.source = source
        self.follows_python = follows_python
        """Whether it goes on as long as Python's unpickler could, and records what a tree cannot show."""
        self.on_build = on_build
        """Returns the node for an object that got its state, and may move past bytes that follow it."""
        self.field_names = field_names
        """The keys that small dicts share; None if they do not."""
        self.base = start  # source offset of data[0]
        self.stack: list[Inert] = []
        self.marks: list[list[Inert]] = []
        packed = packed_nbytes(source)
        self.left_nbytes = inf if packed is None else max(_INFLATED_NBYTES, _INFLATED_RATIO * packed)
        """Bytes of opcodes that may still be read, not counting long arguments."""

    def stop(self, root: Inert) -> None:
        """Set the root and the end, and drop the registers."""
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
        """Return the string at ``pos``, after its length in ``width`` bytes, and move past it."""
        begin = self.pos + width
        count = int.from_bytes(self.data[self.pos : begin], "little")
        if begin > len(self.data):
            raise NeedMore(begin)
        data = self.take(begin, count)
        self.carry(self.base + begin, data)
        return data

    def carry(self, offset: int, value: str | bytes) -> None:
        """Record a string if it may hold pickles."""
        if may_hold_pickles(value):
            self.carried.append((offset, value))

    def lines(self, count: int) -> list[bytes]:
        """Return the next ``count`` lines, without their ends, and move past them."""
        begin, lines = self.pos, []
        for _ in range(count):
            end = self.data.find(b"\n", begin)
            if end < 0 and self.follows_python and self.base + len(self.data) >= self.source.nbytes:
                # Python accepts a last line without its end, but drops its last character.
                rest = self.data[self.pos :].split(b"\n")
                self.pos = len(self.data)
                return [*rest[:-1], rest[-1][:-1], b""][:count]
            if end < 0:
                # The window doubles each time, or a long line would be searched again for each small step.
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
        """Offset of the next byte in the source."""
        return self.base + self.pos

    def peek(self) -> int:
        """Return the next byte; raise TruncatedFile if there is none."""
        if self.position >= self.source.nbytes:
            raise self.truncated(self.pos + 1)
        return self.source.read(self.position, 1)[0]

    def skip(self, nbytes: int, *, opcodes: bool = False) -> None:
        """Move past bytes that the loop must not interpret; ``opcodes`` says that they are a pickle read already."""
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
        """Record an oddity at the current opcode."""
        self.oddities.append(Oddity(how, target, given, self.base + self.opcode))

    def odd(self, how: Deed, target: Inert, given: Inert, what: str, kinds: tuple[type, ...]) -> None:
        """Record an oddity if the machine is patient and the target of one of ``kinds``; else raise MalformedFile."""
        if not self.follows_python or not isinstance(target, kinds):
            raise self.malformed(what)
        self.note(how, target, given)

    def push_line(self, value: str | bytes) -> None:
        """Push a string that was a line."""
        self.carry(self.base + self.opcode + 1, value)
        self.push(value)

    def put(self, index: int | str, value: Inert) -> None:
        """Store a value in the memo. An index of 2**32 or more comes as text, in hexadecimal."""
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
            self.doubled.append(memo[index])  # it may have been read from the memo before
        memo[index] = value

    def next_index(self) -> int:
        """Return the next index of the memo if all came in order so far, else -1."""
        return len(self.memo) if isinstance(self.memo, list) else -1

    def intern(self, module: str, name: str) -> Global:
        found = self.names.get((module, name))
        if found is None:
            if len(self.names) >= _MOST_NAMES:  # each takes hundreds of bytes of memory, and a few of the file
                fact = f"a pickle that asks for more than {_MOST_NAMES:,} names"
                raise LimitExceeded(fact, kind="too-many-names")
            if not self.follows_python:
                refuse_long("a name that the pickle asks for", module, name)
            found = self.names[module, name] = Global(module, name, self.base + self.opcode)
        return found

    def is_at_window_end(self) -> bool:
        """Return whether the opcode at ``pos`` may extend beyond the window, and the source has more bytes."""
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
        """Move the window so that it begins at ``pos`` and covers ``end``, or raise TruncatedFile."""
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
        if max(self.empty, len(self.marks), 3 * scattered) > most:  # an explicit memo index takes five more bytes
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
        """Cut the window at ``end``, so that an opcode that extends beyond the frame is noticed."""
        self.frame_end, self._uncut = end, self.data
        if self.base + len(self.data) > end:
            self.data = self.data[: end - self.base]

    def _leave_frame(self) -> None:
        if self.frame_end is not None:
            self.frame_end, self.data = None, self._uncut

    def note_split(self, offset: int) -> None:
        self.split_frame = offset if self.split_frame is None else self.split_frame


# The first bytes of strings that may hold pickles


FIRST: Final = b"\x80\xc2\xc3\x93\xfdP\x1fBxc("
"""Possible first bytes, also of text in UTF-8, where C2 and C3 begin the characters 0x80 to 0xFF."""
_HOLDERS: Final = (
    *(b"PK\x03\x04", b"\x1f\x8b\x08", b"BZh", b"\xfd7zX", b"\x93NUM"),
    *(b"x\x01", b"x\x5e", b"x\x9c", b"x\xda"),
)
"""Magics of zip, gzip, bzip2, xz, numpy's arrays, and zlib."""
_LONGEST_TEXT: Final = 512
"""Bytes in which a pickle without PROTO has the end of a line, mostly of its first name."""
_BEGINS_WITH_LINE: Final = re.compile(rb"\(|c[^\0-\x08\x0b\x0c\x0e-\x1f]{0,510}?\n", re.DOTALL).match
"""Matches a bracket, or the module of a name, which has no control characters."""
_STOPS_AT_ONCE: Final = re.compile(
    rb"(?:\(+|c[^\n]*\n[^\n]*\n)[^().012BCFGIJKLMNPQRSTUVX\]ab-eghijlopqrstu}?\x80-\xff]"
).match
"""
Matches a name or brackets and then a character that is not an opcode, at which every unpickler stops: mostly source
code. A question mark may stand for a character that is not Latin-1.
"""


def may_hold_pickles(value: str | bytes | bytearray) -> bool:
    """Return whether a string may be or hold pickles, by its first bytes; characters of text count as bytes."""
    if not value:
        return False
    if isinstance(value, str):
        first = ord(value[0])
        if first > 0xFF or first not in FIRST:
            return False
        value = value[:_LONGEST_TEXT].encode("latin-1", "replace")
    if value[0] in b"c(":  # a pickle without PROTO has an end of line
        text = value[:_LONGEST_TEXT]
        return b"\n" in text and _BEGINS_WITH_LINE(text) is not None and _STOPS_AT_ONCE(text) is None
    return (value[0] == 0x80 and len(value) > 1 and value[1] <= 5) or value.startswith(_HOLDERS)


def end_of_opcode(source: Source, position: int) -> int:
    """Return the offset where the opcode at ``position`` ends with its argument, which may be beyond the source."""
    import pickletools  # needed for few opcodes: those at the end of a frame

    data = source.read(position, min(_LONGEST_FIXED, source.nbytes - position))
    opcode = next((one for one in pickletools.opcodes if one.code == chr(data[0])), None)
    nbytes = opcode.arg.n if opcode is not None and opcode.arg is not None else 0
    # Width of the length before an argument, by the codes of ``pickletools`` for arguments with a length.
    if width := {-2: 1, -3: 4, -4: 4, -5: 8}.get(nbytes):
        return position + 1 + width + int.from_bytes(data[1 : 1 + width], "little")
    end = position + 1
    for _ in range(2 if data[:1] in b"ci" else 1) if nbytes < 0 else ():
        end = _end_of_line(source, end)
    return end + max(nbytes, 0)


def _end_of_line(source: Source, position: int) -> int:
    while position < source.nbytes:
        block = source.read(position, min(_WINDOW, source.nbytes - position))
        if found := block.find(b"\n") + 1:
            return position + found
        position += len(block)
    return position
