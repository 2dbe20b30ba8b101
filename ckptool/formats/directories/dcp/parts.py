"""The items of a folder one by one, for whoever reads all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ckptool.checkpoints.parsed import Parsed, Part
from ckptool.errors import Failure
from ckptool.formats.directories.dcp.entries import Entry, Item
from ckptool.formats.directories.dcp.items import Items
from ckptool.formats.directories.dcp.ranks import Copy


class ItemParts:
    """Every item that the index names, in the order of the files, and copies that have to be equal."""

    def __init__(self, items: Items, entries: Mapping[str, Entry | Item | None], copies: Sequence[Copy]) -> None:
        self._items = items
        self._entries = entries
        self._copies = copies

    def __iter__(self) -> Iterator[Part]:
        found: list[tuple[str, int, str, int]] = []
        for name, entry in self._entries.items():
            if isinstance(entry, Entry):
                found += [(one.file, one.offset, name, at) for at, one in enumerate(entry.items) if one is not None]
            elif entry is not None:
                found.append((entry.file, entry.offset, name, -1))
        found.sort()
        for _, _, name, at in found:
            yield self._part(name, at)
        for copy in self._copies:
            entry = self._entries[copy.name]
            compare = partial(self._piece_contradiction, entry, None) if isinstance(entry, Entry) else None
            yield Part(
                repr(copy.name), copy.other.file, self._opens(copy, copy.other), compare, self._opens(copy, copy.taken)
            )

    def _opens(self, copy: Copy, item: Item) -> Callable[[], Parsed]:
        if copy.offsets is None:
            return partial(self._items.open, item)
        return partial(self._items.piece, copy.name, item, copy.offsets)

    def _part(self, name: str, at: int) -> Part:
        entry = self._entries[name]
        if isinstance(entry, Entry):
            item = entry.items[at]
            assert item is not None  # __iter__ saw it
            offsets, sizes = entry.boxes[at]
            what = f"{name!r} at {list(offsets)}"
            compare = partial(self._piece_contradiction, entry, sizes)
            return Part(what, item.file, partial(self._items.piece, name, item, offsets), compare)
        assert isinstance(entry, Item)  # __iter__ saw it
        return Part(repr(name), entry.file, partial(self._items.open, entry))

    @staticmethod
    def _piece_contradiction(entry: Entry, sizes: tuple[int, ...] | None, parsed: Parsed) -> str | None:
        """Return in what an item is not what the index says; None if it is."""
        try:
            info = parsed.tensor()
        except Failure as error:
            return error.message
        if info is None:
            return "is no tensor"
        flat = sizes is not None and len(sizes) == 1 and info.numel == sizes[0]
        if sizes is not None and info.shape != sizes and not flat:
            return f"has shape {list(info.shape)}, not {list(sizes)}"
        if info.dtype != entry.dtype:
            return f"is of {info.dtype}, not {entry.dtype}"
        return None
