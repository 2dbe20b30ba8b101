"""
Files inside values: bytes in a pickle that ``torch.save`` or ``pickle`` wrote to memory first. Found, never opened.

skorch, d3rlpy and others keep their weights so. ``FILE::PATH`` opens one; where the bytes are all, PATH is ``content``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Final, NamedTuple

from ckptool.archives.zip_directory import LOCAL_MAGIC
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
    """What they begin like, for people to read."""
    data: bytes | bytearray

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.data)


def find_embedded(extras: Iterable[tuple[str, Inert]]) -> dict[str, Embedded]:
    """Return the files inside what holds no tensors, by the dotted path of each, as far as paths are short."""
    found: dict[str, Embedded] = {}
    seen: set[int] = set()
    # The containers on the way down, each with its path and an iterator over what is left of it.
    way: list[tuple[str, Iterator[tuple[Inert, Inert]]]] = [("", iter(_outermost(extras)))]
    while way and len(found) < _MOST:
        path, left = way[-1]
        for key, node in left:
            kind = type(node)
            if kind in _PLAIN or not isinstance(key, str | int):
                continue
            data = _content(node) if kind in _CONTENT else None
            what = None if data is None else _named(data)
            if data is not None and what is not None:
                found.setdefault((f"{path}.{key}" if path else str(key)) or "content", Embedded(what, data))
                break
            if _is_plain_call(node) or _holds_plain(node):
                continue
            if nodes.is_container(node) and id(node) not in seen and not _shares(node, seen):
                name = f"{path}.{key}" if path else str(key)
                if len(name) < _LONGEST_PATH:
                    if not nodes.is_small(node):  # to look again costs less than to note it
                        seen.add(id(node))
                    way.append((name, nodes.children(node)))
                    break
        else:
            way.pop()
    return found


def _outermost(extras: Iterable[tuple[str, Inert]]) -> Iterator[tuple[str, Inert]]:
    return ((path, node) for path, node in extras if path.rpartition(".")[2] != "_metadata")


def _shares(node: Inert, seen: set[int]) -> bool:
    """Say whether a call has the long arguments, or the large state, of one that was looked at: many may have."""
    known = False
    for part in (node.args, node.state) if isinstance(node, Call) else (node.pairs,) if isinstance(node, Dict) else ():
        part = part[-1] if isinstance(part, tuple) and len(part) == 1 else part  # the pairs of an OrderedDict
        held = part.pairs if isinstance(part, Dict) else part
        if isinstance(held, list | tuple) and len(held) > _LONG:
            known = known or id(held) in seen
            seen.add(id(held))
    return known


def _is_plain_call(node: Inert) -> bool:
    """Say whether a node is a call that is given a few plain values and no more, as most are where there are many."""
    if type(node) is not Call or not (node.items is node.pairs is node.kwargs is None):
        return False
    for part in (node.args, node.state):
        kind = type(part)
        if kind not in _PLAIN and not (kind is tuple and len(part) <= _FEW and _PLAIN.issuperset(map(type, part))):
            return False
    return True


def _holds_plain(node: Inert) -> bool:
    """Say whether a list or a dict holds no more than plain values: long ones mostly do."""
    kind = type(node)
    if kind is Dict:
        return _PLAIN.issuperset(map(type, map(_VALUE, node.pairs)))
    return (kind is list or kind is tuple) and _PLAIN.issuperset(map(type, node))


_FEW: Final = 8
_VALUE: Final = itemgetter(1)
_PLAIN: Final = frozenset((int, float, bool, str, type(None), nodes.Global))
_CONTENT: Final = frozenset((bytes, bytearray, Call))
"""Types of values that may be files."""


def _content(node: Inert) -> bytes | bytearray | None:
    """Return the bytes that a value is, or that a file object in memory holds, if they are long enough for a file."""
    cls = nodes.class_of(node)
    if cls is not None and (cls.module, cls.name) == ("_io", "BytesIO"):
        node = node.state[0] if isinstance(node.state, tuple) and node.state else node.args
        node = node[0] if isinstance(node, tuple) and node else node
    text = encoded_bytes(node)
    if text is None or len(text) < _SHORTEST or (text is node and isinstance(text, str)):
        return None
    if isinstance(text, str):
        return raw_bytes(text) if _named(text[:_HEAD_NBYTES].encode("latin-1", "replace")) else None
    return text


def _named(data: bytes | bytearray) -> str | None:
    head = data[:_HEAD_NBYTES]
    if head.startswith(LOCAL_MAGIC):
        return "a zip of torch.save()" if b"/data.pkl" in head else "a zip"
    if _LEGACY_MAGIC in head[:24]:
        return "a stream of torch.save()"
    is_pickle = head.startswith(_PICKLE) and data.endswith(b".")
    return "a pickle with tensors of torch" if is_pickle and b"_load_from_bytes" in data else None
