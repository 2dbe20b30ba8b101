"""Checksums of parts of a file, joined, against zlib's of the whole."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import pytest

from ckptool import Source
from ckptool.errors import SourceChanged
from ckptool.sources.checksums import RUN_NBYTES, WORTH_A_THREAD, checksums_of_file, joined_crc32, runs
from ckptool.sources.files import FileSource
from ckptool.sources.source import BytesSource, Meter
from tests.each import each

SIZES = [0, 1, 2, 7, 255, 256, 4096, 65_537, 1_000_003]


@each("first", SIZES)
@each("second", SIZES)
def test_the_checksum_of_two_parts_is_that_of_the_whole(first: int, second: int) -> None:
    data = random.Random(first * 31 + second).randbytes(first + second)

    assert joined_crc32(crc32(data[:first]), crc32(data[first:]), second) == crc32(data)


def test_runs_are_a_range_without_gaps() -> None:
    assert runs(5, 5) == []
    assert runs(5, 6) == [(5, 6)]
    assert runs(3, 3 + 2 * RUN_NBYTES + 1) == [
        (3, 3 + RUN_NBYTES),
        (3 + RUN_NBYTES, 3 + 2 * RUN_NBYTES),
        (3 + 2 * RUN_NBYTES, 4 + 2 * RUN_NBYTES),
    ]


@pytest.mark.parametrize("kind", ["file", "bytes"])
def test_large_and_small_ranges_and_what_lies_between(kind: str, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(3 * RUN_NBYTES + 1000)
    path = tmp_path / "data"
    path.write_bytes(data)
    source: Source = FileSource(str(path)) if kind == "file" else BytesSource(data)
    ranges = [(3, 3), (7, 20), (21, 21 + WORTH_A_THREAD), (WORTH_A_THREAD + 500, len(data) - 9)]

    found, outside = checksums_of_file(source, ranges)

    assert found == [crc32(data[start:stop]) for start, stop in ranges]
    bounds = [0, *(bound for pair in ranges for bound in pair), len(data)]
    assert outside == crc32(b"".join(data[bounds[i] : bounds[i + 1]] for i in range(0, len(bounds), 2)))


def test_a_file_that_shrinks_under_several_threads(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * RUN_NBYTES))
    source = FileSource(str(path))
    path.write_bytes(bytes(RUN_NBYTES))

    with pytest.raises(SourceChanged):
        checksums_of_file(source, [(0, 4 * RUN_NBYTES)])


def test_each_byte_that_is_read_counts_once() -> None:
    data = random.Random(0).randbytes(3 * WORTH_A_THREAD + 12_345)
    ranges = [(5, 300_000), (300_000, 300_000 + WORTH_A_THREAD), (len(data) - 200_000, len(data) - 7)]
    told: list[int] = []

    checksums_of_file(BytesSource(data), ranges, Meter(lambda done, _: told.append(done), 10 * len(data)))

    assert told[-1] == len(data)
    assert max(after - before for before, after in pairwise([0, *told])) <= RUN_NBYTES
