"""
The machine that tells what unpickling would do beyond building data, while ``tracer`` follows a pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.errors import Failure, LimitExceeded
from ckptool.pickles.machine import Machine, NeedMore, OnBuild
from ckptool.pickles.nodes import Call, Global, Inert
from ckptool.pickles.scanner import end_of_opcode
from ckptool.sources.source import Source

How: TypeAlias = Literal["refers", "calls", "builds", "sets", "adds", "asks", "holds", "runs"]
"""
refers: a name is looked up, and its module imported; calls: REDUCE, INST, OBJ; builds: NEWOBJ, NEWOBJ_EX;
sets: BUILD, which calls ``__setstate__`` or sets attributes; adds: items, by ``append``, ``extend``, ``add`` or
``__setitem__`` of what is no plain container; asks: a persistent id, which the loader looks up; holds: no deed, but a
string that may be a pickle, or an archive of some; runs: a program beside the pickles does it, once its loader runs it.
"""


SPLIT_FRAME = "a frame that ends inside an opcode or goes on after the pickle, so that loaders read other opcodes"


INVALID: Final = (IndexError, KeyError, ValueError, TypeError, struct.error)
"""What an opcode without a valid operand comes to."""


class Unfollowed:
    """A value that only the process that unpickles it knows."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


class Effect(NamedTuple):
    """One thing that unpickling does."""

    how: How
    target: Inert
    """What is looked up, called, built or changed: a node."""
    arguments: Inert
    """What it is given: the arguments as they are in the file (a tuple, if Python is to take them), a state, items."""
    offset: int
    """Of the opcode, from the start of the source; of the first byte, for a string."""
    keywords: Inert = None


Listener: TypeAlias = Callable[[Effect], Inert]
"""Is told of each effect, and returns what a call is known to give; None if that is not known."""


class Tracer(Machine):
    """The machine, with somebody who listens."""

    def __init__(self, source: Source, start: int, listener: Listener, on_build: OnBuild | None = None) -> None:
        super().__init__(source, start, on_build)
        self.listener = listener
        self._frame_end: int | None = None
        self.far_memo: dict[bytes, Inert] = {}
        """What is remembered under indices that only text can name, as bytes: of those nobody chooses the hash."""

    def begin_frame(self, nbytes: int) -> None:
        """Begin a frame: so many bytes, which an unpickler reads at once."""
        if self._frame_end is not None:
            self._refuse_frame()
        end = self.base + self.pos + nbytes
        self._frame_end = end if end <= self.source.nbytes else None  # in Python, all that is left

    def last(self, longest: int) -> int:
        """Return the position at which to stop and look: where the window may end in an opcode, or the frame ends."""
        whole = self.base + len(self.data) == self.source.nbytes
        last = len(self.data) - (0 if whole else longest)
        return last if self._frame_end is None else min(last, self._frame_end - self.base)

    def check_frame(self) -> None:
        """End the frame where an opcode begins at its end."""
        if self._frame_end is not None and self.base + self.pos >= self._frame_end:
            if self.base + self.pos > self._frame_end:
                self._refuse_frame()
            self._frame_end = None

    def check_stop(self) -> None:
        """Where the pickle ends, its frame has to end."""
        if self._frame_end not in (None, self.base + self.pos):
            self._refuse_frame()

    def check_outside_frame(self) -> None:
        """Where bytes follow that are no opcodes, a frame has to end: what is left of it would be read after them."""
        self.check_frame()
        if self._frame_end is not None:
            self._refuse_frame()

    def check_torn(self, opcode: int) -> None:
        """
        Look at an opcode that went wrong: if its frame ends inside it, another reading can go on.

        ``opcode`` is where it begins in the source.
        """
        end = self._frame_end
        if end is not None and opcode + 1 < end < end_of_opcode(self.source, opcode):
            self._refuse_frame()

    def _refuse_frame(self) -> None:
        """Refuse two readings: from a file, the unpickler forgets what is left of a frame; from memory it does not."""
        self._frame_end = None
        self.tell("refers", Unfollowed(SPLIT_FRAME))
        raise self.malformed(SPLIT_FRAME)

    def lines(self, count: int) -> list[bytes]:
        try:
            return super().lines(count)
        except NeedMore:
            # Python takes the last line for one without its end, and what it has for it without its last character.
            if self.base + len(self.data) < self.source.nbytes:
                raise
            rest = self.data[self.pos + 1 :].split(b"\n")
            self.pos = len(self.data)
            return [*rest[:-1], rest[-1][:-1], b""][:count]

    def tell(self, how: How, target: Inert, arguments: Inert = None, keywords: Inert = None) -> Inert:
        return self.hear(Effect(how, target, arguments, self.base + self.opcode, keywords))

    def hear(self, effect: Effect) -> Inert:
        """
        Let the listener judge an effect.

        Raises:
            RuntimeError: It failed: that must not be taken for an opcode without an operand, which ends a pickle.
        """
        try:
            return self.listener(effect)
        except LimitExceeded:
            raise
        except (Failure, *INVALID) as error:
            raise RuntimeError(f"{effect.how} at byte {effect.offset:,}: {type(error).__name__}: {error}") from error

    def look_up(self, module: str, name: str) -> Global:
        key = (module, name)
        found = self.globals.get(key)
        if found is None:
            self.refuse_more_names()
            found = self.globals[key] = Global(module, name, self.base + self.opcode)
        self.tell("refers", found)
        return found

    def call(self, func: Inert, args: Inert) -> Inert:
        known = self.tell("calls", func, args)
        return Call(func, args) if known is None else known
