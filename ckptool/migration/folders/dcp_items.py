"""The file of a DCP folder that holds everything but the index: items one behind the other, each a whole zip."""

from __future__ import annotations

from array import array
from contextlib import closing
from typing import Final, NamedTuple

from ckptool.errors import OutputFailed
from ckptool.limits import Limits
from ckptool.migration.output.sink import Sink
from ckptool.migration.transfer import Transfer
from ckptool.migration.zip_writer import append_torch_zip, torch_zip_nbytes
from ckptool.sources.checksums import checksums_of_file, joined_crc32
from ckptool.sources.files import open_source
from ckptool.sources.meter import Meter
from ckptool.sources.source import prefetch
from ckptool.tensors.payloads import Payload

_ROOT: Final = "archive"  # torch's name for what has no file name


class Item(NamedTuple):
    """A tensor, a box of one, or a value, as ``torch.save`` writes it to a stream."""

    name: str
    offsets: tuple[int, ...] | None
    """Where the box begins in its tensor; None for a value."""
    pickled: bytes
    storages: tuple[Payload, ...]
    nbytes: int


class WrittenItems(NamedTuple):
    """What was written: for each member of each zip its offset, its size and its checksum."""

    offsets: array[int]
    sizes: array[int]
    checksums: array[int]
    frame_crc32: int
    """The checksum of all that is no member."""


def item(
    name: str,
    offsets: tuple[int, ...] | None,
    pickled: bytes,
    storages: tuple[Payload, ...],
    known: dict[tuple[int, ...], int],
) -> Item:
    """Return an item with its size: one number for all that are alike, which are ``known``, as there may be many."""
    parts = (len(pickled), *(payload.nbytes for payload in storages))
    nbytes = known.get(parts)
    if nbytes is None:
        nbytes = known[parts] = torch_zip_nbytes(_ROOT, parts[0], parts[1:])
    return Item(name, offsets, pickled, storages, nbytes)


class ItemsFile(NamedTuple):
    """A file that is ready to be written."""

    items: tuple[Item, ...]
    cut: tuple[tuple[int, int, Payload], ...]
    """Storages that are cut into the items from one number up to another, in order."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return sum(one.nbytes for one in self.items)

    @property
    def copied(self) -> list[Payload]:
        """What is copied into the file, also in several items."""
        whole = [payload for one in self.items for payload in one.storages]
        return [*whole, *(payload for _, _, payload in self.cut)]

    def write(self, output: Sink, *, checksums: bool = True) -> WrittenItems:
        """
        Write the file, and return its members with the CRC-32 of what was read for each.

        Raises:
            DamagedFile: The source has another checksum for a storage.
        """
        written = WrittenItems(array("Q"), array("Q"), array("Q"), 0)
        own: list[int] = []
        with Transfer(output, checksums=checksums) as transfer:
            for one in self.items:
                begin, frame = output.position, written.frame_crc32
                done = append_torch_zip(output, transfer, _ROOT, one.pickled, one.storages, frame)
                written = written._replace(frame_crc32=done.frame_crc32)
                for member in done.members:
                    written.offsets.append(member.offset)
                    written.sizes.append(member.nbytes)
                    written.checksums.append(member.crc32)
                own.append(done.members[-2].crc32)
                if output.position - begin != one.nbytes:
                    raise OutputFailed(f"the item of {one.name!r} is not as long as it was to be")
        output.flush()
        for start, stop, storage in self.cut:
            found = 0
            for one, checksum in zip(self.items[start:stop], own[start:stop], strict=True):
                found = joined_crc32(found, checksum, one.storages[0].nbytes)
            storage.check(found)
        return written

    def verify(self, path: str, written: WrittenItems, limits: Limits, meter: Meter) -> None:
        """
        Read the file back, every byte of it. Whether its items are what the index says is seen once the index is there.

        Raises:
            OutputFailed: The file does not hold what was to be written.
        """
        source, _ = open_source(path, limits.cancellation)
        with closing(source):
            prefetch(source, [(0, source.nbytes)])
            ends = map(sum, zip(written.offsets, written.sizes, strict=True))
            ranges = list(zip(written.offsets, ends, strict=True))
            found, frame = checksums_of_file(source, ranges, meter)
        if frame != written.frame_crc32 or found != written.checksums.tolist():
            raise OutputFailed("its items were not written as they were read", kind="verification-failed")
