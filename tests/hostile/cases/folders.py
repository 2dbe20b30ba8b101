"""Folders of torch.distributed.checkpoint whose index and whose pieces say different things, or say too much."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch

from tests.formats.dcp_folder import Described, Item, columns, rows, save, saved_bytes, write
from tests.hostile.cases import Case

FILE = "__0_0.distcp"
BESIDE = (".metadata", FILE, "__1_0.distcp", "missing")
HUGE = 1 << 62


@cache
def piece() -> bytes:
    return saved_bytes(torch.arange(6.0).reshape(2, 3))


def folder(
    items: Callable[[int], list[Item]], shape: tuple[int, ...] = (4, 3), data: bytes | None = None
) -> Callable[[Path], str]:
    """Return what makes a folder of one tensor, of which ``items`` says where its pieces are, given their length."""

    def make(parent: Path) -> str:
        content = piece() if data is None else data
        tensors: dict[str, Described] = {"model.w": (torch.float32, shape, items(len(content)))}
        return str(write(parent / "saved", tensors, {FILE: content}))

    return make


def two(offset: int, length: int, file: str = FILE) -> Callable[[int], list[Item]]:
    """Return two pieces, of which the second lies elsewhere."""
    return lambda nbytes: [((0, 0), (2, 3), FILE, 0, nbytes), ((2, 0), (2, 3), file, offset, length or nbytes)]


def beside(at: tuple[int, ...], nbytes: int) -> list[Item]:
    """Return two pieces, of which the second is at a place of its own."""
    return [((0, 0), (2, 3), FILE, 0, nbytes), (at, (2, 3), FILE, 0, nbytes)]


def grid(nbytes: int) -> list[Item]:
    return [((row, at), (1, 1), FILE, 0, nbytes) for row in range(50) for at in range(50)]


def whole(sizes: tuple[int, ...]) -> Callable[[int], list[Item]]:
    return lambda nbytes: [((0,) * len(sizes), sizes, FILE, 0, nbytes)]


def many(count: int) -> Callable[[int], list[Item]]:
    """Return pieces that are all the same bytes."""
    return lambda nbytes: [((2 * at, 0), (2, 3), FILE, 0, nbytes) for at in range(count)]


def bomb() -> bytes:
    """Return a piece whose record is a gibibyte of zeros, deflated."""
    source, target = io.BytesIO(saved_bytes(torch.zeros(2, 3))), io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for one in old.infolist():
            data = old.read(one)
            if one.filename.endswith("data/0"):
                with new.open(one.filename, "w", force_zip64=True) as record:
                    for _ in range(1 << 8):
                        record.write(bytes(1 << 20))
            else:
                new.writestr(one.filename, data)
    return target.getvalue()


def bombed(parent: Path) -> str:
    return folder(whole((2, 3)), (2, 3), bomb())(parent)


def sound(cut: str) -> Callable[[Path], str]:
    values = torch.arange(600.0).reshape(20, 30)
    boxes = {"rows": rows((20, 30), 3), "columns": columns((20, 30), 4)}[cut]
    return lambda parent: str(save(parent / "saved", {"model.w": values}, {"model.w": boxes}))


def d1() -> Iterator[Case]:
    """D1: pieces that are not where the index has them."""
    data = torch.arange(600.0).numpy().tobytes()
    for cut in ("rows", "columns"):
        yield Case("D1", f"sound, in {cut}", sound(cut), "read", {"w": data}, BESIDE)
    for offset, length in [(0, 1 << 40), (1 << 40, 0), (HUGE, 0), (HUGE, HUGE), (1, 0), (-1, 0), (0, -1), (0, 10)]:
        made = folder(two(offset, length))
        yield Case("D1", f"a piece of {length} bytes at {offset}", made, "any", False, BESIDE)
    for name in ("../secret", "/etc/passwd", "x/../../secret", "", ".", "..", ".metadata", "\0", "missing"):
        yield Case("D1", f"a piece in {name!r}", folder(two(0, 0, name)), "any", False, BESIDE)


def d2() -> Iterator[Case]:
    """D2: boxes and shapes that no pieces have."""
    for sizes in [
        (HUGE,),
        (HUGE, 3),
        (1 << 31, 1 << 31),
        (1 << 40, 3),
        (2, 3, 1),
        (6,),
        (3, 2),
        (2, 3, 1 << 40),
        (0, 3),
    ]:
        made = folder(whole(sizes), sizes)
        yield Case("D2", f"one piece of {list(sizes)}", made, "any", sizes in ((6,), (0, 3)), BESIDE)
    for shape in [(5, 3), (3, 3), (4, 4), (HUGE, 3), (4,)]:
        yield Case("D2", f"pieces that do not fill {list(shape)}", folder(two(0, 0), shape), "any", False, BESIDE)
    overlapping: list[tuple[int, int]] = [(0, 0), (1, 0), (2, 1), (-2, 0), (HUGE, 0)]
    for at in overlapping:
        made = folder(partial(beside, at))
        yield Case("D2", f"the second piece at {list(at)}", made, "any", False, BESIDE)


def d3() -> Iterator[Case]:
    """D3: few bytes as very many."""
    yield Case("D3", "1,000 pieces that are the same bytes", folder(many(1_000), (2_000, 3)), "any", None, BESIDE)
    yield Case("D3", "a grid of 2,500 pieces of another shape", folder(grid, (50, 50)), "any", False, BESIDE)
    expanded = saved_bytes(torch.zeros(1).expand(1 << 15, 1 << 15))
    made = folder(whole((1 << 15, 1 << 15)), (1 << 15, 1 << 15), expanded)
    yield Case("D3", "a piece that repeats one element", made, "any", False, BESIDE)
    yield Case("D3", "a piece that is a bomb", bombed, "any", None, BESIDE)
    packed = gzip.compress(bytes(1 << 26))
    yield Case("D3", "a piece that is gzip", folder(whole((2, 3)), (2, 3), packed), "any", False, BESIDE)


CASES = (*d1(), *d2(), *d3())
