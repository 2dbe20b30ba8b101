"""
Files inside values: bytes in a pickle that are a file of their own. None is opened.

skorch, d3rlpy and others store weights so. ``FILE::PATH`` opens one; if the whole value is bytes, PATH is ``content``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from ckptool.archives.zips import LOCAL_MAGIC
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Inert
from ckptool.pickles.numpy_values import encoded_bytes, raw_bytes

_MOST: Final = 1_000
_LONGEST_PATH: Final = 1_024
_SHORTEST: Final = 64
_LONG: Final = 64
_HEAD_NBYTES: Final = 256
_PICKLE: Final = tuple(bytes((0x80, protocol)) for protocol in (2, 3, 4, 5))
_LEGACY_MAGIC: Final = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")


class Embedded(NamedTuple):
    """Bytes that are a file of their own."""

    what: str
    """The kind of file that they begin like, for people to read."""
    data: bytes | bytearray


def find_embedded(extras: Iterable[tuple[str, Inert]]) -> dict[str, Embedded]:
    """Return the files inside subtrees without tensors, by dotted path, as long as paths are short."""
    found: dict[str, Embedded] = {}
    seen: set[int] = set()
    # The containers on the way down, each with its path and an iterator over its remaining children.
    outermost = [one for one in extras if one[0].rpartition(".")[2] != "_metadata"]
    way: list[tuple[str, Iterator[tuple[Inert, Inert]]]] = [("", iter(outermost))]
    while way and len(found) < _MOST:
        path, left = way[-1]
        for key, node in left:
            if type(node) in _PLAIN or not isinstance(key, str | int):
                continue
            name = f"{path}.{key}" if path else str(key)
            embedded = _file_in(node)
            if embedded is not None:
                found.setdefault(name or "content", embedded)
            elif nodes.is_container(node) and id(node) not in seen and not _shares(node, seen):
                if not nodes.is_small(node):  # visiting it again costs less than recording it
                    seen.add(id(node))
                if len(name) < _LONGEST_PATH:
                    way.append((name, nodes.children(node)))
                    break
        else:
            way.pop()
    return found


def _shares(node: Inert, seen: set[int]) -> bool:
    """Return whether a node shares long arguments, or a large state, with one that was searched already."""
    known = False
    for part in (node.args, node.state) if isinstance(node, Call) else (node.pairs,) if isinstance(node, Dict) else ():
        part = part[-1] if isinstance(part, tuple) and len(part) == 1 else part  # the pairs of an OrderedDict
        held = part.pairs if isinstance(part, Dict) else part
        if isinstance(held, list | tuple) and len(held) > _LONG:
            known = known or id(held) in seen
            seen.add(id(held))
    return known


_PLAIN: Final = frozenset((int, float, bool, str, type(None), nodes.Global))


def _file_in(value: Inert) -> Embedded | None:
    """Return the file in a value of bytes or in a BytesIO; None if there is none."""
    if not isinstance(value, bytes | bytearray | Call):
        return None
    cls = nodes.class_of(value)
    if isinstance(value, Call) and cls is not None and (cls.module, cls.name) == ("_io", "BytesIO"):
        held = value.state[0] if isinstance(value.state, tuple) and value.state else value.args
        value = held[0] if isinstance(held, tuple) and held else held
    data = encoded_bytes(value)
    if data is None or len(data) < _SHORTEST or (data is value and isinstance(data, str)):
        return None
    if isinstance(data, str):
        data = raw_bytes(data) if _named(data[:_HEAD_NBYTES].encode("latin-1", "replace")) else None
    what = None if data is None else _named(data)
    return Embedded(what, data) if data is not None and what is not None else None


def _named(data: bytes | bytearray) -> str | None:
    head = data[:_HEAD_NBYTES]
    if head.startswith(LOCAL_MAGIC):
        return "a zip of torch.save()" if b"/data.pkl" in head else "a zip"
    if _LEGACY_MAGIC in head[:24]:
        return "a stream of torch.save()"
    is_pickle = head.startswith(_PICKLE) and data.endswith(b".")
    return "a pickle with tensors of torch" if is_pickle and b"_load_from_bytes" in data else None
