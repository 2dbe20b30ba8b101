"""
Follow a pickle opcode by opcode, and tell of each effect: every name it looks up, everything it calls or changes.

A second interpreter, more patient than ``reader``: that one refuses what it cannot give as a tree, this one goes on as
long as Python's unpickler could, for what was called before a stream breaks off was called. Results that are dropped or
left under the value count as well. It looks no name up either: what a call gives stays a ``Call``, unless the listener
knows better (``getattr(os, "system")`` is a name, too).

See Python's Modules/_pickle.c.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from ckptool.errors import Failure, LimitExceeded, TruncatedFile
from ckptool.pickles.effect_opcodes import STEPS
from ckptool.pickles.effects import INVALID, Listener, Tracer
from ckptool.pickles.joblib_arrays import take_elements
from ckptool.pickles.machine import Machine, NeedMore, OnBuild
from ckptool.pickles.nodes import Call, Inert
from ckptool.pickles.numpy_values import is_wrapper
from ckptool.pickles.scanner import FIRST
from ckptool.sources.source import Source

_U32 = struct.Struct("<I").unpack_from
_STOP: Final = 0x2E
_FRAME: Final = 0x95
_LONGEST_FIXED: Final = 9


class Trace(NamedTuple):
    """How far a pickle was followed."""

    end: int
    """Where it ends, or where it was given up."""
    broken: str | None = None
    """Why it was given up: nothing after that is known. None where STOP was reached."""
    left: int = 0
    """Values left under the one that unpickling returns."""
    root: Inert = None
    """What unpickling returns."""
    blocks: tuple[range, ...] = ()
    """Where bytes lie between the opcodes, in order."""
    is_over_limit: bool = False
    """Whether it was given up for what it would cost to follow it."""


def trace(source: Source, start: int, listener: Listener, *, on_build: OnBuild | None = None) -> Trace:
    """
    Follow the pickle that begins at byte ``start``, and tell of each effect in the order of the file.

    ``on_build`` is as in ``read_pickle``.

    Raises:
        Cancelled: The source has a cancellation, and it was.
    """
    tracer = Tracer(source, start, listener, on_build)
    try:
        _follow(tracer)
    except Failure as error:
        is_over = isinstance(error, LimitExceeded)
        return Trace(tracer.base + tracer.pos, error.message, blocks=tuple(tracer.blocks), is_over_limit=is_over)
    left = len(tracer.stack) - 1 + sum(map(len, tracer.marks))
    return Trace(tracer.base + tracer.pos, None, left, tracer.stack[-1], tuple(tracer.blocks))


def trace_with_arrays(source: Source, start: int, listener: Listener) -> Trace:
    """Follow a pickle as joblib loads it: past the elements of arrays, and into the pickles in arrays of objects."""

    def on_build(machine: Machine, built: Call) -> Inert:
        if isinstance(machine, Tracer) and is_wrapper(built):
            machine.check_outside_frame()
        return take_elements(machine, built, objects)

    def objects(machine: Machine) -> Inert:
        """Tell of what the pickle of an array of objects does, and return the array."""
        inner = trace(machine.source, machine.position, listener)
        if inner.broken is not None:
            raise machine.malformed(inner.broken)
        machine.skip(inner.end - machine.position, opcodes=True)
        return inner.root

    return trace(source, start, listener, on_build=on_build)


def _follow(tracer: Tracer) -> None:
    """Run until STOP, through as many windows as that takes."""
    while True:
        try:
            return _run(tracer)
        except NeedMore as need:
            try:
                tracer.move_window(need.end)
            except TruncatedFile:
                tracer.check_torn(tracer.base + tracer.pos)
                raise
        except Failure:
            tracer.check_torn(tracer.base + tracer.opcode)
            raise
        except INVALID as error:
            opcode = tracer.data[tracer.opcode] if tracer.opcode < len(tracer.data) else 0
            tracer.pos = tracer.opcode
            tracer.check_torn(tracer.base + tracer.opcode)
            raise tracer.malformed(f"opcode 0x{opcode:02x} has no valid operand") from error


def _run(tracer: Tracer) -> None:  # noqa: C901 - the hot loop: calls would double its time
    """Run until STOP, or raise with ``pos`` at the opcode to begin again from."""
    data, pos, stack = tracer.data, tracer.pos, tracer.stack
    memo: Any = tracer.memo
    whole = tracer.base + len(data) == tracer.source.nbytes
    last = tracer.last(_LONGEST_FIXED)
    try:
        while True:
            if pos >= last:
                tracer.pos, tracer.stack = pos, stack
                tracer.check_frame()
                last = tracer.last(_LONGEST_FIXED)
                if pos >= len(data) - (0 if whole else _LONGEST_FIXED):
                    raise NeedMore(pos + 1)
            op = data[pos]
            if op == 0x4B:  # BININT1
                stack.append(data[pos + 1])
                pos += 2
            elif op == 0x72:  # LONG_BINPUT
                index = _U32(data, pos + 1)[0]
                if type(memo) is list and index == len(memo):
                    memo.append(stack[-1])
                else:
                    tracer.put(index, stack[-1])
                    memo = tracer.memo
                pos += 5
            elif op == 0x68:  # BINGET
                stack.append(memo[data[pos + 1]])
                pos += 2
            elif op == 0x28:  # MARK
                tracer.marks.append(stack)
                stack = []
                pos += 1
            elif op == 0x74:  # TUPLE
                items = tuple(stack)
                stack = tracer.marks.pop()
                stack.append(items)
                pos += 1
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
                pos += 1
            elif op == 0x52:  # REDUCE
                tracer.opcode = pos
                args = stack.pop()
                func = stack[-1]
                known = tracer.tell("calls", func, args)
                stack[-1] = Call(func, args) if known is None else known
                pos += 1
            elif op == 0x5D:  # EMPTY_LIST
                tracer.empty += 1
                stack.append([])
                pos += 1
            elif op == 0x58 and (text := _dull_text(data, pos)) is not None:  # BINUNICODE
                stack.append(text)
                pos += 5 + len(text)
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
                pos += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[_U32(data, pos + 1)[0]])
                pos += 5
            elif op == 0x56 and (line := _dull_line(data, pos)) is not None:  # UNICODE
                stack.append(line)
                pos += 2 + len(line)
            elif op == 0x30 and stack:  # POP
                stack.pop()
                pos += 1
            else:
                tracer.opcode, tracer.pos, tracer.stack = pos, pos, stack
                if op == _STOP:
                    return _stop(tracer)
                STEPS[op](tracer)
                pos, stack, memo = tracer.pos, tracer.stack, tracer.memo
                if tracer.data is not data:  # what was skipped ends behind the window
                    raise NeedMore(pos + 1)
                if op == _FRAME:
                    last = tracer.last(_LONGEST_FIXED)
    except INVALID:
        tracer.opcode = pos  # most opcodes of this loop do not say where they are
        raise


def _stop(tracer: Tracer) -> None:
    if not tracer.stack:
        raise IndexError
    tracer.pos += 1
    tracer.check_stop()


def _dull_text(data: bytes, pos: int) -> str | None:
    """Return the text of the opcode at ``pos`` if it is ASCII, and none that may hold pickles; None of any other."""
    begin = pos + 5
    count = int.from_bytes(data[pos + 1 : begin], "little")
    text = data[begin : begin + count]
    return str(text, "ascii") if len(text) == count and text.isascii() and text[:1] not in FIRST else None


def _dull_line(data: bytes, pos: int) -> str | None:
    """Return the text of the line at ``pos`` if it has no escapes, and may hold no pickles; None of any other."""
    text = data[pos + 1 : max(pos, data.find(b"\n", pos))]
    return str(text, "latin-1") if text[:1] not in FIRST and b"\\" not in text else None
