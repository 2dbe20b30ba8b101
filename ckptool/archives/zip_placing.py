"""
Where the payloads of a zip lie, as far as its directory alone tells: for files that are slow to read.

The directory has the offset of each local header, and not how long that is. Two ways lead to the payload, and where
they agree nothing is left to know: back from the next header over the descriptor and the payload, and forward over the
header as torch and zipfile write it. torch pads the name with extra fields to the next multiple of 64 (``getPadding``
in caffe2/serialize/inline_container.cc); zipfile adds none.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ckptool.archives.zip_directory import Entry
from ckptool.archives.zip_layout import DESCRIPTOR, DESCRIPTOR64, FIELD, FLAG_DESCRIPTOR, FULL32, LOCAL

_ALIGNMENT: Final = 64
_SIGNATURE: Final = 4
_BARE: Final = (0,)
_DESCRIPTORS: Final = (_SIGNATURE + DESCRIPTOR.size, _SIGNATURE + DESCRIPTOR64.size)
_HEADER_NBYTES: Final = 160
"""What is fetched of a local header beyond its name."""


class Place(NamedTuple):
    """Offset of a payload, and of what follows the member."""

    offset: int
    end: int


def placed(entries: Sequence[Entry], limit: int) -> Iterator[Place | None]:
    """Yield for each entry, in the order of the headers, where its payload lies; None where that is not certain."""
    following = [*(entry.header for entry in entries[1:]), limit]
    for entry, end in zip(entries, following, strict=True):
        descriptors = _DESCRIPTORS if entry.flags & FLAG_DESCRIPTOR else _BARE
        backward = {end - nbytes - entry.stored_nbytes for nbytes in descriptors}
        agreed = backward & _forward(entry)
        yield Place(agreed.pop(), end) if len(agreed) == 1 else None


def _forward(entry: Entry) -> set[int]:
    bare = entry.header + LOCAL.size + len(entry.name)
    padded = bare + FIELD.size
    if entry.stored_nbytes >= FULL32 or entry.header >= FULL32:
        padded += FIELD.size + (16 if entry.stored_nbytes >= FULL32 else 0) + (8 if entry.header >= FULL32 else 0)
    return {bare, padded + -padded % _ALIGNMENT}


def header_ranges(entries: Sequence[Entry], places: Sequence[Place | None], limit: int) -> Iterator[tuple[int, int]]:
    """Yield what has to be read of the members that have no place: their headers, and the descriptors behind them."""
    following = [*(entry.header for entry in entries[1:]), limit]
    for entry, place, end in zip(entries, places, following, strict=True):
        if place is None:
            yield entry.header, min(end, entry.header + len(entry.name) + _HEADER_NBYTES)
            if entry.flags & FLAG_DESCRIPTOR:
                yield max(entry.header, end - _DESCRIPTORS[-1]), end
