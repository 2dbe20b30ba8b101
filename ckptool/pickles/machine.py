"""
The registers of the machine that interprets a pickle, and its window onto the source.

The window covers the bytes around the opcode that is being read. An opcode that needs more raises ``NeedMore`` before
it has changed anything; then the window is moved and the opcode started again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from ckptool.errors import LimitExceeded, MalformedFile, TruncatedFile
from ckptool.limits import refuse_long
from ckptool.pickles.nodes import Call, Global, Inert, PersistentId
from ckptool.pickles.scanner import may_hold_pickles
from ckptool.sources.source import BytesSource, SliceSource, Source

if TYPE_CHECKING:
    from ckptool.pickles.fields import FieldNames

_WINDOW: Final = 1 << 16
_WIDEST: Final = 1 << 18
_MOST_NAMES: Final = 100_000
_MOST_EMPTY: Final = 450_000
"""Containers that any pickle may begin, and one more for each two bytes: a pickler writes two opcodes for each.
An empty list takes 80 bytes while it is read, and two trees of them 150: more would break what we promise."""
_MOST_AHEAD: Final = 1024
_LONGEST_FIXED: Final = 9  # an opcode and eight bytes of argument

# What a compressed pickle may have in opcodes, whichever is more: a state dict takes some hundred bytes for a tensor.
_INFLATED_NBYTES: Final = 1 << 20
_INFLATED_RATIO: Final = 4


def _most_read(source: Source) -> float:
    """Return how many bytes of opcodes may be read: each can be an object."""
    while isinstance(source, SliceSource):
        source = source.whole
    packed = source.packed_nbytes if isinstance(source, BytesSource) else None
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


class Machine:
    """The machine's registers: a stack, the stacks set aside by marks, a memo, and a window onto the source."""

    def __init__(
        self,
        source: Source,
        start: int,
        on_build: OnBuild | None = None,
        field_names: FieldNames | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        self.source = source
        self.start = start
        self.is_patient = is_patient
        """Whether it goes on as long as Python's unpickler could, and notes what has no place in a tree."""
        self.on_build = on_build
        """Returns what an object is that has got its state; bytes that are no opcodes may follow it."""
        self.field_names = field_names
        """Where small dicts share their keys; None where they do not."""
        self._argument_nbytes = 0
        self.base = start  # source offset of data[0]
        self.data = b""
        self.pos = 0
        self.opcode = 0  # position of the opcode that errors are about
        self.stack: list[Inert] = []
        self.marks: list[list[Inert]] = []
        self.memo: list[Inert] | dict[int | str, Inert] = []
        """By index: a list as long as they come in order, which is how nearly everybody writes them."""
        self.doubled: list[Inert] = []
        """What stands on the stack once more, or stood in the memo under an index that something else has now."""
        self.globals: dict[tuple[str, str], Global] = {}
        self.persistent_ids: list[PersistentId] = []
        self.blocks: list[range] = []
        """Where bytes lie that are no opcodes, in order."""
        self.protocol = 0
        self.rare: set[int] = set()
        """Opcodes of frames, and of strings and long numbers of rare kinds, that there were."""
        self.carried: list[tuple[int, str | bytes]] = []
        """Strings that end with their line and may hold pickles, and where they begin in the source."""
        self.has_lines = False
        """Whether an argument ended with its line."""
        self.calls: list[Call] = []
        self.call_offsets = array("Q")  # an int each in the calls takes as much as a third of them
        """In order, those of what is dropped among them."""
        self.builds: list[Call] = []
        self.build_offsets = array("Q")
        """In order, those of the opcodes that give an object a state."""
        self.odd_keys: list[Inert] = []
        """Keys of dicts and members of sets that are no text: Python takes their hash."""
        self.has_old_strings = False
        """Whether there are strings of Python 2, which readers give other types."""
        self.has_other_text = False
        """Whether some of them are not ASCII, so that each reader may take them for other text."""
        self.has_far_memo = False
        """Whether an index of the memo is so large that Python needs far more memory for it than the pickle has."""
        self.has_protocols = False
        """Whether the protocol changes on the way, and with it what names mean."""
        self.oddities: list[Oddity] = []
        """What was done to what is no object of the pickle, by a patient machine."""
        self.empty = 0
        """Lists, dicts and sets that were begun, by an opcode of one byte each."""
        self.left = _most_read(source)
        """Bytes of opcodes that may still be read, long arguments apart."""
        # Each window is a read, which may be cancelled: then none is to hold too many opcodes.
        self._widest = _WIDEST if self.left == inf and source.cancellation is None else _WINDOW

    def take(self, begin: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of argument from window position ``begin`` and move past them."""
        end = begin + nbytes
        if end > len(self.data):
            raise NeedMore(end)
        self.rare.add(self.data[self.pos])
        self.pos = end
        return self.data[begin:end]

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
        if not opcodes:
            self.blocks.append(range(self.position, self.base + end))
        if end <= len(self.data):
            self.pos = end
            self._argument_nbytes += 0 if opcodes else nbytes
            return
        self.left -= self.pos - self._argument_nbytes + (nbytes if opcodes else 0)
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
        if may_hold_pickles(value):
            self.carried.append((self.base + self.opcode + 1, value))
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
        found = self.globals.get((module, name))
        if found is None:
            self.refuse_more_names()
            if not self.is_patient:
                refuse_long("a name that the pickle asks for", module, name)
            found = self.globals[module, name] = Global(module, name, self.base + self.opcode)
        return found

    def refuse_more_names(self) -> None:
        """Refuse more names than any program has: each costs hundreds of bytes, and a few in the file."""
        if len(self.globals) >= _MOST_NAMES:
            raise LimitExceeded(f"a pickle that asks for more than {_MOST_NAMES:,} names", kind="too-many-names")

    def is_at_window_end(self) -> bool:
        """Say whether the opcode at ``pos`` may reach over the end of the window, and the source goes on."""
        window = len(self.data)
        return self.pos + _LONGEST_FIXED > window and self.base + window < self.source.nbytes

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
        needed = end - self.pos
        left = self.source.nbytes - begin
        if needed > left:
            raise self.truncated(end)
        self.left -= self.pos - self._argument_nbytes
        self._argument_nbytes = needed if needed > _WINDOW else 0
        most = _MOST_EMPTY + (begin - self.start) // 2
        scattered = len(self.memo) if isinstance(self.memo, dict) else 0
        if max(self.empty, len(self.marks), 3 * scattered) > most:  # to name an index takes five bytes more
            raise LimitExceeded(
                f"a pickle of more than {most:,} empty objects in {begin - self.start:,} bytes",
                kind="pickle-bomb",
                offset=begin,
            )
        if self.left < 0:
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
