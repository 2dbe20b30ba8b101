"""Copying payloads: where threads begin to copy, and what is known of the bytes on either side."""

from __future__ import annotations

import random
from pathlib import Path
from zlib import crc32

from ckptool import StorageRef, TensorInfo
from ckptool.migration.output import Output
from ckptool.migration.transfer import Transfer
from ckptool.sources.checksums import WORTH_A_THREAD, checksum_of_range, checksums_of_file
from ckptool.sources.files import FileSource
from ckptool.sources.source import BytesSource, ReadAhead
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.payloads import Payload, StoragePayload
from ckptool.tensors.pieces import Box, Piece, PiecesSource
from ckptool.tensors.tensor import row_major
from tests.bounds.sources import BytesPayload
from tests.each import each

DATA = random.Random(0).randbytes((5 << 20) + 4)
UINT8 = BY_NAME["uint8"]


def stored(path: Path, nbytes: int, known: int = 0) -> StoragePayload:
    """Return a storage that a file holds behind seven bytes; ``known`` is its checksum in the file."""
    path.write_bytes(b"7 bytes" + DATA[:nbytes])
    return StoragePayload(StorageRef("0", "cpu", nbytes, FileSource(str(path)), 7, crc32=known), 1)


def in_pieces(path: Path, shape: tuple[int, int], boxes: list[Box]) -> StoragePayload:
    """Return a matrix of ``DATA`` whose pieces lie in a file one behind the other."""
    pieces, content = [], b""
    path.touch()
    file = str(path)
    for (top, left), (rows, columns) in boxes:
        at = len(content)
        lines = [DATA[row * shape[1] + left :][:columns] for row in range(top, top + rows)]
        content += b"".join(lines)

        def opened(at: int = at, sizes: tuple[int, int] = (rows, columns)) -> TensorInfo:
            storage = StorageRef("0", "cpu", sizes[0] * sizes[1], FileSource(file), at)
            return TensorInfo(UINT8, sizes, row_major(sizes), 0, storage, "cpu")

        pieces.append(Piece((top, left), (rows, columns), "file", opened))
    path.write_bytes(content)
    source = PiecesSource(shape, UINT8, pieces, name="w")
    return StoragePayload(StorageRef("0", "cpu", source.nbytes, source, 0), 1)


def sent(folder: Path, payload: Payload, *, checksums: bool = True, checksum: bool = False) -> tuple[int, bytes]:
    """Send a payload, and return the checksum that is told, and what is in the output."""
    target = folder / "out"
    with Output(str(target), force=True) as output:
        with Transfer(output, checksums=checksums) as transfer:
            found = transfer.send(payload, checksum=checksum)
        output.flush()
        output.publish()
    return found, target.read_bytes()


@each("nbytes", [ReadAhead.BLOCK - 1, ReadAhead.BLOCK, ReadAhead.BLOCK + 1, 3 * ReadAhead.BLOCK + 7])
def test_ranges_of_more_than_a_block_have_their_checksum(nbytes: int) -> None:
    for begin in (0, 3):
        for behind in (0, 5, ReadAhead.BLOCK + 5):
            whole = DATA[: begin + nbytes + behind]
            inside = whole[begin : begin + nbytes]
            found = checksums_of_file(BytesSource(whole), [(begin, begin + nbytes)])
            assert found == ([crc32(inside)], crc32(whole[:begin] + whole[begin + nbytes :]))
            assert checksum_of_range(BytesSource(whole), begin, begin + nbytes) == crc32(inside)


SIZES = [0, 1, WORTH_A_THREAD - 1, WORTH_A_THREAD, WORTH_A_THREAD + 1, 1 << 22, (1 << 22) + 1, len(DATA)]


@each("nbytes", SIZES)
def test_a_storage_of_any_size_is_copied_with_its_checksum(nbytes: int, tmp_path: Path) -> None:
    data = DATA[:nbytes]
    for known in (0, crc32(data)):
        assert sent(tmp_path, stored(tmp_path / "in", nbytes, known)) == (crc32(data), data)
    assert sent(tmp_path, BytesPayload(data)) == (crc32(data), data)


@each(("columns", "is_small"), [((1 << 19) - 1, True), (1 << 19, False), ((1 << 19) + 1, False)])
def test_pieces_that_are_no_runs_are_put_together(columns: int, is_small: bool, tmp_path: Path) -> None:
    boxes: list[Box] = [((0, 0), (2, 5)), ((0, 5), (2, columns - 5))]
    data = DATA[: 2 * columns]
    payload = in_pieces(tmp_path / "in", (2, columns), boxes)
    assert sent(tmp_path, payload) == (crc32(data), data)
    assert sent(tmp_path, payload, checksums=False) == (crc32(data) if is_small else 0, data)
    assert sent(tmp_path, payload, checksums=False, checksum=True) == (crc32(data), data)


@each("checksums", [True, False])
def test_runs_of_several_pieces_and_of_none_are_copied(checksums: bool, tmp_path: Path) -> None:
    payload = in_pieces(tmp_path / "in", (4, 9), [((row, 0), (1, 9)) for row in range(4)])
    assert sent(tmp_path, payload, checksums=checksums) == (crc32(DATA[:36]), DATA[:36])
    assert sent(tmp_path, in_pieces(tmp_path / "in", (0, 9), []), checksums=checksums) == (0, b"")
