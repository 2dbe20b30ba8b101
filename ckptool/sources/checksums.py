"""
CRC-32 of ranges of files, by several threads.

Threads take runs of one range in turn, so that a file of one huge storage is as fast as one of many; the checksum of
the range follows from those of its runs, because a CRC is linear (as in zlib's ``crc32_combine``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias
from zlib import crc32

from ckptool.cancellation import Cancellation, steps
from ckptool.sources.files import FileSource, file_under
from ckptool.sources.source import SILENT, Meter, ReadAhead, Source

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


Take: TypeAlias = Callable[[int, memoryview], None]
PIECE_NBYTES: Final = 1 << 18
"""Bytes that are read and written at a time: few enough to stay in a core's cache meanwhile."""
RUN_NBYTES: Final = 1 << 22
"""Bytes that one thread reads before another may take over."""
WORTH_A_THREAD: Final = 1 << 20

_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31
_MOST_THREADS: Final = 4


class Buffer(threading.local):
    """One piece of memory for each thread, used again and again."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE_NBYTES))


_BUFFER: Final = Buffer()
"""Each thread allocates its own when it first reads, and frees it when it ends, with its pool."""


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads() -> ThreadPoolExecutor:
    """Return a pool with a thread for each processor that this process may use, four at most."""
    from concurrent.futures import ThreadPoolExecutor  # not needed for a file of small tensors

    return ThreadPoolExecutor(min(_MOST_THREADS, processors()))


def runs(start: int, stop: int) -> list[tuple[int, int]]:
    """Return a range of bytes cut into the runs that threads take."""
    return [(begin, min(begin + RUN_NBYTES, stop)) for begin in range(start, stop, RUN_NBYTES)]


def pieces(file: FileSource, start: int, stop: int) -> Iterable[tuple[int, memoryview]]:
    """Yield the pieces of a range of a file, each with its offset; a piece is overwritten by the next one."""
    buffer = _BUFFER.view
    for position in range(start, stop, PIECE_NBYTES):
        piece = buffer[: stop - position]
        file.read_into(position, piece)
        yield position, piece


def joined_crc32(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two parts joined together, from theirs; ``nbytes`` is the size of the second part."""
    return _product(_shift(nbytes), first) ^ second


def checksum_in_memory(buffer: memoryview, cancellation: Cancellation | None = None) -> int:
    """Return the CRC-32 of a buffer."""
    found = 0
    for piece in steps(buffer, cancellation):
        found = crc32(piece, found)
    return found


def checksum_of_range(source: Source, start: int, stop: int) -> int:
    """Return the CRC-32 of a range; several threads compute that of a large one."""
    if stop - start < 2 * RUN_NBYTES:
        return _checksum_of_run(source, start, stop)
    with threads() as pool:
        of_runs = pool.map(lambda run: _checksum_of_run(source, *run), runs(start, stop))
        return _joined(of_runs, start, stop, SILENT)


def _joined(of_runs: Iterator[int], start: int, stop: int, meter: Meter) -> int:
    """Return the checksum of a range from those of its runs, which are taken from an iterator."""
    found = 0
    for begin, end in runs(start, stop):
        found = joined_crc32(found, next(of_runs), end - begin)
        meter.read(end - begin)
    return found


def read_once(source: Source, take: Take, meter: Meter = SILENT) -> None:
    """Read all bytes in order, and call ``take`` with the offset and the view of each piece; the next overwrites it."""
    under = file_under(source, 0)
    if under is None:
        found = ((start, memoryview(source.read(start, stop - start))) for start, stop in runs(0, source.nbytes))
    else:
        file, shift = under
        found = ((at - shift, piece) for at, piece in pieces(file, shift, shift + source.nbytes))
    for at, piece in found:
        take(at, piece)
        meter.read(len(piece))


def checksums_of_file(
    source: Source, ranges: Sequence[tuple[int, int]], meter: Meter = SILENT, watch: Take | None = None
) -> tuple[list[int], int]:
    """
    Return the CRC-32 of each range, and one of all bytes outside of them joined together.

    The ranges must be in order and disjoint. Every byte of the source is read once: large ranges by several threads,
    the rest in one pass; if there is a ``watch``, all bytes in order, and it is called with each piece.
    """
    # A watch has to meet all bytes in order, so threads would have nothing to do.
    large = [] if watch is not None else [bounds for bounds in ranges if bounds[1] - bounds[0] >= WORTH_A_THREAD]
    ahead = ReadAhead(source)

    def in_order(start: int, stop: int, found: int) -> int:
        """Return the checksum of a range that follows bytes with the checksum ``found``."""
        for position in range(start, stop, ReadAhead.BLOCK):
            block = ahead.read(position, min(ReadAhead.BLOCK, stop - position))
            found = crc32(block, found)
            if watch is not None:
                watch(position, memoryview(block))
            meter.read(len(block))
        return found

    with threads() if large else nullcontext() as pool:
        work = chain.from_iterable(runs(*bounds) for bounds in large)
        of_runs = pool.map(lambda run: _checksum_of_run(source, *run), work) if pool else iter(())
        found: list[int] = []
        outside = position = 0
        for start, stop in ranges:
            outside = in_order(position, start, outside)
            is_large = watch is None and stop - start >= WORTH_A_THREAD
            found.append(_joined(of_runs, start, stop, meter) if is_large else in_order(start, stop, 0))
            position = stop
    return found, in_order(position, source.nbytes, outside)


def _checksum_of_run(source: Source, start: int, stop: int) -> int:
    under = file_under(source, start)
    if under is None:
        return crc32(source.read(start, stop - start))
    file, position = under
    found = 0
    for _, piece in pieces(file, position, position + stop - start):
        found = crc32(piece, found)
    return found


@lru_cache(maxsize=64)
def _shift(nbytes: int) -> int:
    """Return x to the power of ``8 * nbytes``: the factor for the checksum of bytes that ``nbytes`` more follow."""
    power, square = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        nbytes >>= 1
    return power


def _product(left: int, right: int) -> int:
    """Return the product of two polynomials over GF(2), modulo CRC-32's; the highest bit is the coefficient of x^0."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
