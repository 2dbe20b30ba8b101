"""Writers: sizes where the layout changes, and buffers that are just full."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from ckptool.archives.zip_directory import FULL32
from ckptool.archives.zips import read_zip
from ckptool.migration import zip_writer
from ckptool.migration.zip_writer import torch_zip, torch_zip_nbytes
from ckptool.sources.source import Source
from tests.each import each

# Zips round 4 GiB, of which only the frame is written


class Frame(Source):
    """A source, of which the parts of a file were written: payloads are holes of zeros in it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.parts: list[tuple[int, bytes]] = []
        self.payloads: list[tuple[int, int]] = []

    def take(self, part: Any) -> None:
        if isinstance(part, bytes):
            self.parts.append((self.nbytes, part))
        else:
            self.payloads.append((self.nbytes, part.nbytes))
        self.nbytes += len(part) if isinstance(part, bytes) else part.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        found = bytearray(nbytes)
        for begin, data in self.parts:
            low, high = max(begin, offset), min(begin + len(data), offset + nbytes)
            if low < high:
                found[low - offset : high - offset] = data[low - begin : high - begin]
        return bytes(found)


def written(root: str, *sizes: int) -> Frame:
    """Return what is written for a checkpoint with storages of these sizes."""
    frame = Frame()
    content = torch_zip(root, b"\x80\x02K\x01.", [SimpleNamespace(nbytes=nbytes) for nbytes in sizes])  # type: ignore[misc]
    part: Any = next(content)
    with suppress(StopIteration):
        while True:
            frame.take(part)
            part = content.send(0)
    return frame


HEAD = 448
"""Where the payload of the first storage begins; sixteen bytes of descriptor stand behind it."""


@each(
    "sizes",
    [
        (FULL32 - 1,),
        (FULL32,),
        (FULL32 + 1,),
        (FULL32 - 1 - HEAD - 16, 0, 7),
        (FULL32 - HEAD - 16, 0, 7),
        (FULL32 + 1 - HEAD - 16, 0, 7),
        (FULL32 - 1 - HEAD - 16, FULL32),
        (FULL32 - HEAD - 16, FULL32 - 1),
        (0, 0),
    ],
)
def test_members_and_offsets_round_4_gib_are_read_as_they_were_written(sizes: tuple[int, ...]) -> None:
    frame = written("x", *sizes)
    archive = read_zip(frame)

    stored = [archive[f"x/data/{number}"] for number in range(len(sizes))]
    assert [(one.offset, one.nbytes) for one in stored] == frame.payloads
    assert archive.notes == ()
    assert frame.payloads[0][0] == HEAD + (64 if sizes[0] >= FULL32 else 0)
    assert torch_zip_nbytes("x", 5, sizes) == frame.nbytes


@pytest.mark.parametrize("start", [FULL32 - 1, FULL32, FULL32 + 1])
def test_a_directory_may_begin_round_4_gib(start: int) -> None:
    frame, around = Frame(), zip_writer.Frame(b"x", start - 64 - 16, 0)
    for part in (around.local(), SimpleNamespace(nbytes=around.nbytes), around.descriptor(0), around.entry(0)):
        frame.take(part)
    frame.take(zip_writer.end_records(start, len(around.entry(0)), 1))

    assert list(read_zip(frame)) == ["x"]
    assert end_record(frame)[3] == min(start, FULL32)


def end_record(frame: Frame) -> tuple[int, ...]:
    data = frame.read(frame.nbytes - 22, 22)
    return tuple(int.from_bytes(data[at : at + size], "little") for at, size in ((8, 2), (10, 2), (12, 4), (16, 4)))
