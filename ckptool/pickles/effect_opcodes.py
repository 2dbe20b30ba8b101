"""
The opcodes of a pickle as ``tracer`` follows them, one function each; its loop handles the most frequent ones.

Each function finds ``pos`` at its opcode, reads all of its argument before it touches the stack, and leaves ``pos``
after the argument, as those in ``opcodes`` do. They are more patient: what matters is what is called.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Final

from ckptool.errors import MalformedFile
from ckptool.pickles import opcodes
from ckptool.pickles.effects import Effect, Tracer, Unfollowed
from ckptool.pickles.nodes import Call, Dict, Inert, PersistentId, Set
from ckptool.pickles.opcodes import RARE
from ckptool.pickles.scanner import may_hold_pickles

_U32 = struct.Struct("<I").unpack_from
_U16 = struct.Struct("<H").unpack_from
_I32 = struct.Struct("<i").unpack_from
_F64 = struct.Struct(">d").unpack_from

_FAR: Final = 1 << 32
"""From here on only text names an index of the memo; numbers could be chosen to have one hash."""


def _leniently(step: Callable[[Tracer], None], sound: bytes | None = None) -> Callable[[Tracer], None]:
    """
    Read an argument whose value nobody can call: one that is malformed may be sound for Python.

    What does not begin like ``sound`` is so for nobody: with that, a pickle ends, and a text is none.
    """

    def run(tracer: Tracer) -> None:
        begin = tracer.pos
        if sound is not None:
            line = tracer.line()
            tracer.pos = begin
            if re.match(sound, line, re.DOTALL | re.IGNORECASE) is None:
                raise tracer.malformed("text that is no value")
        try:
            step(tracer)
        except (MalformedFile, ValueError):
            if tracer.pos == begin:
                raise
            tracer.push(Unfollowed("a malformed value"))

    return run


def _holding(step: Callable[[Tracer], None]) -> Callable[[Tracer], None]:
    """Read a string, and tell of it if it may hold pickles."""

    def run(tracer: Tracer) -> None:
        step(tracer)
        value = tracer.stack[-1]
        if may_hold_pickles(value):
            text = value if isinstance(value, bytes | bytearray) else value.encode("utf-8", "surrogatepass")
            tracer.hear(Effect("holds", None, value, tracer.base + tracer.pos - len(text)))

    return run


def _constant(value: Inert) -> Callable[[Tracer], None]:
    def run(tracer: Tracer) -> None:
        tracer.pos += 1
        tracer.stack.append(value)

    return run


def _fixed(read: Callable[..., tuple[Inert, ...]], step: int) -> Callable[[Tracer], None]:
    def run(tracer: Tracer) -> None:
        tracer.stack.append(read(tracer.data, tracer.pos + 1)[0])
        tracer.pos += step

    return run


def _fixed_byte(tracer: Tracer) -> None:
    tracer.stack.append(tracer.data[tracer.pos + 1])
    tracer.pos += 2


def _text(width: int) -> Callable[[Tracer], None]:
    def run(tracer: Tracer) -> None:
        begin = tracer.pos + 1 + width
        count = int.from_bytes(tracer.data[tracer.pos + 1 : begin], "little")
        tracer.push(str(tracer.take(begin, count), "utf-8", "surrogatepass"))

    return run


def _mark(tracer: Tracer) -> None:
    tracer.pos += 1
    tracer.marks.append(tracer.stack)
    tracer.stack = []


def _tuple(tracer: Tracer) -> None:
    tracer.pos += 1
    items = tuple(tracer.stack)
    tracer.stack = tracer.marks.pop()
    tracer.stack.append(items)


def _tuple_of(count: int) -> Callable[[Tracer], None]:
    def run(tracer: Tracer) -> None:
        tracer.pos += 1
        stack = tracer.stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]

    return run


def _put(tracer: Tracer, index: int, step: int) -> None:
    tracer.put(index, tracer.stack[-1])
    tracer.pos += step


def _get(tracer: Tracer, index: int, step: int) -> None:
    tracer.stack.append(tracer.memo[index])
    tracer.pos += step


def _text_index(tracer: Tracer) -> int:
    index = int(tracer.line())
    if index < 0:
        raise IndexError
    return index


def _put_text(tracer: Tracer) -> None:
    index = _text_index(tracer)
    if index < _FAR:
        tracer.put(index, tracer.stack[-1])
    else:
        tracer.far_memo[_far_key(index)] = tracer.stack[-1]


def _get_text(tracer: Tracer) -> None:
    index = _text_index(tracer)
    tracer.stack.append(tracer.memo[index] if index < _FAR else tracer.far_memo[_far_key(index)])


def _far_key(index: int) -> bytes:
    return index.to_bytes((index.bit_length() + 7) // 8, "little")


def _reduce(tracer: Tracer) -> None:
    args = tracer.stack.pop()
    tracer.stack[-1] = tracer.call(tracer.stack[-1], args)
    tracer.pos += 1


def _inst(tracer: Tracer) -> None:
    module, name = tracer.lines(2)
    found = tracer.look_up(str(module, "utf-8", "replace"), str(name, "utf-8", "replace"))
    args = tuple(tracer.pop_mark())
    tracer.push(tracer.call(found, args))


def _obj(tracer: Tracer) -> None:
    tracer.pos += 1
    cls, *args = tracer.pop_mark()
    tracer.push(tracer.call(cls, tuple(args)))


def _newobj(tracer: Tracer) -> None:
    tracer.pos += 1
    args = tracer.stack.pop()
    cls = tracer.stack[-1]
    tracer.tell("builds", cls, args)
    tracer.stack[-1] = Call(cls, args, "newobj")


def _newobj_ex(tracer: Tracer) -> None:
    tracer.pos += 1
    kwargs = tracer.stack.pop()
    args = tracer.stack.pop()
    cls = tracer.stack[-1]
    tracer.tell("builds", cls, args, kwargs)
    tracer.stack[-1] = Call(cls, args, "newobj_ex", kwargs)


def _build(tracer: Tracer) -> None:
    tracer.pos += 1
    state = tracer.stack.pop()
    target = tracer.stack[-1]
    tracer.tell("sets", target, state)  # before it is: the listener sees what was set earlier
    if isinstance(target, Call):
        target.state = state if target.state is None else Unfollowed("an object that gets a state twice")
        if tracer.on_build is not None:
            tracer.stack[-1] = tracer.on_build(tracer, target)


def _global(tracer: Tracer) -> None:
    module, name = tracer.lines(2)
    tracer.push(tracer.look_up(str(module, "utf-8", "replace"), str(name, "utf-8", "replace")))


def _stack_global(tracer: Tracer) -> None:
    module, name = tracer.stack[-2:]
    if isinstance(module, str) and isinstance(name, str):
        found: Inert = tracer.look_up(module, name)
    else:
        found = Unfollowed("a name that is computed")
        tracer.tell("refers", found)
    tracer.stack[-2:] = [found]
    tracer.pos += 1


def _extension(width: int) -> Callable[[Tracer], None]:
    def run(tracer: Tracer) -> None:
        code = int.from_bytes(tracer.data[tracer.pos + 1 : tracer.pos + 1 + width], "little")
        found = Unfollowed(f"extension code {code:,}")
        tracer.tell("refers", found)
        tracer.push(found)
        tracer.pos += 1 + width

    return run


def _persid(tracer: Tracer) -> None:
    node = PersistentId(str(tracer.line(), "utf-8", "replace"))
    tracer.tell("asks", node)
    tracer.push(node)


def _binpersid(tracer: Tracer) -> None:
    node = tracer.stack[-1] = PersistentId(tracer.stack[-1])
    tracer.tell("asks", node)
    tracer.pos += 1


def _append(tracer: Tracer) -> None:
    tracer.pos += 1
    value = tracer.stack.pop()
    _add(tracer, [value])


def _appends(tracer: Tracer) -> None:
    tracer.pos += 1
    values = tracer.pop_mark()
    _add(tracer, values)


def _add(tracer: Tracer, values: list[Inert]) -> None:
    target = tracer.stack[-1]
    if isinstance(target, list):
        target.extend(values)
        return
    if isinstance(target, Set):
        target.update(values)
        return
    tracer.tell("adds", target, values)
    if isinstance(target, Call):
        target.items = target.items or []
        target.items.extend(values)


def _setitem(tracer: Tracer) -> None:
    tracer.pos += 1
    value = tracer.stack.pop()
    key = tracer.stack.pop()
    target = tracer.stack[-1]
    if type(target) is Dict:
        target.update([(key, value)])
    else:
        _update(tracer, [key, value])


def _setitems(tracer: Tracer) -> None:
    tracer.pos += 1
    flat = tracer.pop_mark()
    _update(tracer, flat)


def _update(tracer: Tracer, flat: list[Inert]) -> None:
    pairs = list(zip(flat[::2], flat[1::2], strict=False))
    target = tracer.stack[-1]
    if len(flat) % 2:
        tracer.tell("adds", target, flat)  # Python sets the whole pairs first
        raise ValueError
    if isinstance(target, Dict):
        target.update(pairs)
        return
    if isinstance(target, list):
        target.extend(flat)  # under which index does not matter here
        return
    tracer.tell("adds", target, flat)
    if isinstance(target, Call):
        target.pairs = target.pairs or []
        target.pairs.extend(pairs)


def _dict(tracer: Tracer) -> None:
    tracer.pos += 1
    flat = tracer.pop_mark()
    tracer.push(Dict(list(zip(flat[::2], flat[1::2], strict=True))))


def _frame(tracer: Tracer) -> None:
    nbytes = int.from_bytes(tracer.data[tracer.pos + 1 : tracer.pos + 9], "little")
    tracer.pos += 9
    tracer.begin_frame(nbytes)


def _buffer(tracer: Tracer) -> None:
    tracer.pos += 1
    found = Unfollowed("an out-of-band buffer")
    tracer.tell("refers", found)
    tracer.push(found)


_OWN: Final[dict[int, Callable[[Tracer], None]]] = {
    0x95: _frame,
    ord("K"): _fixed_byte,
    ord("M"): _fixed(_U16, 3),
    ord("J"): _fixed(_I32, 5),
    ord("G"): _fixed(_F64, 9),
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord(")"): _constant(()),
    ord("I"): _leniently(opcodes.op_int, rb"\s*[+-]?[0-9]|\0|\Z"),
    ord("L"): _leniently(opcodes.op_long, rb"\s*[+-]?[0-9]"),
    ord("F"): _leniently(opcodes.op_float, rb"\s*[+-]?(?:[0-9.]|inf|nan)"),
    ord("S"): _leniently(_holding(opcodes.op_string), rb"\s*([\'\"]).*\1\s*\Z"),
    ord("T"): _holding(opcodes.op_binstring),
    ord("U"): _holding(opcodes.op_short_binstring),
    ord("B"): _holding(opcodes.op_binbytes),
    ord("C"): _holding(opcodes.op_short_binbytes),
    0x8E: _holding(opcodes.op_binbytes8),
    0x96: _holding(opcodes.op_bytearray8),
    ord("V"): _leniently(_holding(opcodes.op_unicode)),
    ord("X"): _leniently(_holding(_text(4))),
    0x8C: _leniently(_holding(_text(1))),
    0x8D: _leniently(_holding(_text(8))),
    ord("("): _mark,
    ord("t"): _tuple,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x94: lambda tracer: _put(tracer, len(tracer.memo) + len(tracer.far_memo), 1),
    ord("q"): lambda tracer: _put(tracer, tracer.data[tracer.pos + 1], 2),
    ord("r"): lambda tracer: _put(tracer, _U32(tracer.data, tracer.pos + 1)[0], 5),
    ord("p"): _put_text,
    ord("h"): lambda tracer: _get(tracer, tracer.data[tracer.pos + 1], 2),
    ord("j"): lambda tracer: _get(tracer, _U32(tracer.data, tracer.pos + 1)[0], 5),
    ord("g"): _get_text,
    ord("R"): _reduce,
    ord("i"): _inst,
    ord("o"): _obj,
    0x81: _newobj,
    0x92: _newobj_ex,
    ord("b"): _build,
    ord("c"): _global,
    0x93: _stack_global,
    0x82: _extension(1),
    0x83: _extension(2),
    0x84: _extension(4),
    ord("P"): _persid,
    ord("Q"): _binpersid,
    ord("a"): _append,
    ord("e"): _appends,
    0x90: _appends,
    ord("s"): _setitem,
    ord("u"): _setitems,
    ord("d"): _dict,
    0x97: _buffer,
}


STEPS: Final[list[Callable[[Tracer], None]]] = [_OWN.get(op, RARE[op]) for op in range(256)]
