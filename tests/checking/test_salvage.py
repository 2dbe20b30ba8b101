"""Files cut short anywhere: what is said to be whole is, and what is missing is counted."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch

from ckptool import CheckReport, check, open_checkpoint
from tests.program import VALID
from tests.scale import step

FILES = [
    "lenet-state-dict-cpu-zip.pth",
    "checkpoint-ddp-forged-cuda0-zip.pth",
    "model-plain-cpu-zip.pth",
    "lenet-state-dict-data-parallel-forged-cuda0-zip.pth",
    "lenet-model-forged-cuda0-legacy.pth",
    "checkpoint-plain-cpu-legacy.pth",
    "views-cpu-legacy.pth",
    "sparse-cpu-zip.pth",
    "safetensors-float32-cpu.safetensors",
]


def ends_of(path: Path) -> dict[str, int]:
    """Return where the storages of each tensor end in the whole file, and 0 for what stands in the index."""
    ends = {}
    with open_checkpoint(path) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            infos = [tensor.info, *(part for _, part in tensor.info.parts)]
            storages = [info.storage for info in infos if info.storage is not None]
            ends[name] = max((storage.offset + storage.nbytes for storage in storages), default=0)
    return ends


def salvaged(report: CheckReport) -> tuple[int, int, int, str] | None:
    """Return how many tensors are said to be whole, of how many, how many bytes are missing, and what is lost."""
    said = [one.message for one in report.findings if one.code == "CK106"]
    if not said:
        return None
    whole, total, missing, lost = re.fullmatch(
        r"([\d,]+) of ([\d,]+) tensors are whole, ([\d,]+) bytes are missing(?:: lost (.*))?", said[0]
    ).groups()  # type: ignore[union-attr]
    return (*(int(number.replace(",", "")) for number in (whole, total, missing)), lost or "")  # type: ignore[return-value]


@pytest.mark.parametrize("name", FILES)
def test_what_is_said_to_be_whole_is_and_nothing_else(name: str) -> None:
    data = (VALID / name).read_bytes()
    ends = ends_of(VALID / name)
    told = 0
    shares = {len(data) * share // 40 for share in range(1, 40, step(9))}
    for cut in shares | set(ends.values()) | {end - 1 for end in ends.values()}:
        report = check(data[:cut])
        if report.error is None:  # nothing but padding was cut off
            continue
        found = salvaged(report)
        if found is None:
            continue
        whole, total, missing, lost = found
        gone = [name for name, end in ends.items() if end > cut]
        assert (whole, total, bool(missing)) == (len(ends) - len(gone), len(ends), bool(gone))
        assert all(name in gone for name in lost.split(" and ")[0].split(", ") if name), lost
        assert bool(lost) == bool(gone)
        told += 1
    assert told > 10 // step(9)


def test_missing_bytes_are_those_of_tensors() -> None:
    data = (VALID / "safetensors-float32-cpu.safetensors").read_bytes()
    _, _, missing, _ = salvaged(check(data[:-100])) or (0, 0, 0, "")

    assert missing == 100


@pytest.mark.parametrize(
    "junk", [b"", b"PK\x03\x04", b"PK\x03\x04" * 5000, b"\x08\0\0\0\0\0\0\0{", b"\x80\x02\x8a\nl\xfc"]
)
def test_what_cannot_be_followed_is_an_error_and_no_more(junk: bytes) -> None:
    report = check(junk)

    assert report.error is not None
    assert report.findings == ()
    assert report.verdict == "cannot be opened"


class Counting(io.BytesIO):
    """Bytes that count what is read of them."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self.taken += len(found)
        return found


def test_a_zip_of_countless_headers_with_something_between_them_is_given_up_on() -> None:
    header = b"PK\x03\x04" + b"\0" * 22 + b"\1\0\0\0" + b"x" + b"-"
    stream = Counting(header * 60_000)

    assert salvaged(check(stream)) is None
    assert 0 < stream.taken < 1 << 27


def test_a_zip_of_many_records_is_followed_to_its_end() -> None:
    buffer = io.BytesIO()
    torch.save({str(index): torch.full((3,), float(index)) for index in range(1500)}, buffer)
    whole, total, _, _ = salvaged(check(buffer.getvalue()[: -len(buffer.getvalue()) // 3])) or (0, 0, 0, "")

    assert whole > 1000
    assert total == 1500
