"""Say which bytes will be read next, so that those of files far away are fetched ahead."""

from __future__ import annotations

from collections.abc import Iterable

from ckptool.sources.source import FarSource, far_under
from ckptool.tensors.reading import LazyTensor


def announce(tensors: Iterable[LazyTensor]) -> None:
    """Announce the storages of tensors, those of their parts too, to the sources that they are read from."""
    found: dict[int, tuple[FarSource, list[tuple[int, int]]]] = {}
    todo = [tensor.info for tensor in tensors]
    while todo:
        info = todo.pop()
        todo.extend(part for _, part in info.parts)
        storage = info.storage
        under = None if storage is None else far_under(storage.source)
        if storage is None or under is None:
            continue
        far, shift = under
        start = shift + storage.offset
        found.setdefault(id(far), (far, []))[1].append((start, start + storage.nbytes))
    for far, ranges in found.values():
        far.prefetch(ranges)
