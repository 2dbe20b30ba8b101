"""Which nodes of a tree may stand in it more than once: those that its pickle took from the memo, or doubled."""

from __future__ import annotations

import re
from typing import Final

from ckptool.pickles.reader import Pickle
from ckptool.sources.source import Source

_WINDOW: Final = 1 << 18
_LONGEST: Final = 12
"""An opcode that gets from the memo, with an index of ten digits."""
# At every byte, for it is not known which of them are opcodes: what is wrongly taken for shared costs some bytes.
_SHORT: Final = re.compile(rb"(?=h(.))", re.DOTALL).findall
_LONG: Final = re.compile(rb"(?=j(.{4}))", re.DOTALL).findall
_TEXT: Final = re.compile(rb"(?=g\s*\+?([0-9]{1,10})\s*\n)").findall


def shared_nodes(source: Source, pickled: Pickle) -> set[int]:
    """Return the ids of all nodes that may stand in the tree of a pickle more than once."""
    indices: set[int] = set()
    for begin in range(pickled.start, pickled.end, _WINDOW):
        data = source.read(begin, min(_WINDOW + _LONGEST, pickled.end - begin))
        indices.update(found[0] for found in set(_SHORT(data)))
        indices.update(int.from_bytes(found, "little") for found in set(_LONG(data)))
        indices.update(map(int, set(_TEXT(data))))
    memo = pickled.memo
    got = (memo[index] for index in indices if (index in memo if isinstance(memo, dict) else index < len(memo)))
    return {id(node) for node in got} | {id(node) for node in pickled.doubled}
