"""Calls are named however deep they are packed, and in each way that somebody's reader unpacks."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptool import check
from ckptool.archives import zips as zips_module
from tests import zip_bytes
from tests.build import COMPRESSED, call, named, pickled, raw, tar_file, zip_file
from tests.checking.test_safety import system
from tests.program import invoke
from tests.scale import in_turn

CALLS = pickled(call(named("os", "system"), "true"))


def zipped(content: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("a.pkl", content)
    return stream.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    **COMPRESSED,
    "zip": zipped,
    "tar": lambda content: tar_file({"a.pkl": content}),
    "a pickle": lambda content: pickled(raw(content)),
}


@pytest.mark.parametrize(("levels", "packer"), in_turn([1, 5, 9, 15], PACKERS))
def test_calls_are_named_however_deep_they_are_packed(packer: str, levels: int) -> None:
    data = CALLS
    for _ in range(levels):
        data = PACKERS[packer](data)
    report = check(data)
    assert system(report) == ["os.system('true')"]
    assert report.grade == "system"


@pytest.mark.parametrize("count", [1, 2, 9, 1001])
def test_each_of_several_zips_is_looked_at(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of ``torch.distributed.checkpoint`` has one for each tensor: whoever opens one may open the others."""
    monkeypatch.setattr(zips_module, "_MOST_ZIPS", 500)  # so that many are looked at in two steps
    honest, hostile = zipped(pickled(1)), zipped(CALLS)
    for place in {0, count // 2, count - 1}:
        zips = [honest] * count
        zips[place] = hostile
        report = check(b"".join(zips))
        assert system(report) == ["os.system('true')"]
        assert report.unseen == ()
    quiet = check(honest * count)
    assert system(quiet) == []
    assert {one.code for one in quiet.findings} <= {"CK202"}
    cut = check((honest * count)[:-9])
    assert cut.unseen or cut.error is not None


def test_what_is_deeper_is_said() -> None:
    data = CALLS
    for _ in range(20):
        data = tar_file({"a": data})
    report = check(data)
    assert report.error is not None
    assert "CK209" in {one.code for one in report.findings}
    assert "more than 16 levels deep" in report.unseen[0]


def test_files_of_zstandard_are_unpacked() -> None:
    packed = pytest.importorskip("zstandard").compress(CALLS)
    for data in (packed, zip_file({"a.pth": pickled([1]), "b.joblib": packed})):
        assert system(check(data)) == ["os.system('true')"]


def entry(name: str, content: bytes, kind: bytes, extensions: dict[str, str] | None = None) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.pax_headers = len(content), kind, extensions or {}
    return info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512)


REFUSED = {
    "packed by bzip2": zipped(CALLS + bytes(5000), zipfile.ZIP_BZIP2),
    "packed by lzma": zipped(CALLS + bytes(5000), zipfile.ZIP_LZMA),
    "a zip with two readings": zip_bytes.whole([zip_bytes.stored("a.pkl", one) for one in (pickled([1]), CALLS)]),
    "a zip without its end": zip_file({"a.pkl": CALLS})[:-30],
    "two of one name": entry("a.pkl", pickled([1]), b"0") + entry("a.pkl", CALLS, b"0"),
    "a sparse file": entry("a.pkl", CALLS, b"0", {"GNU.sparse.major": "0", "GNU.sparse.minor": "1"}),
    "a sparse file with its list": entry(
        "a.pkl", b"1\n0\n90\n".ljust(512, b"\0") + CALLS, b"0", {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    ),
    "a member that is cut": entry("b.pkl", CALLS + bytes(5000), b"0")[:-4000],
    "a damaged header behind it": entry("b.pkl", CALLS, b"0") + b"\1" * 512,
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_gate_lets_an_archive_through_that_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(REFUSED[name])
    assert invoke(["check", "--fail-on", "system", str(tmp_path / "x")]).exit_code != 0
    (tmp_path / "both.zip").write_bytes(zip_file({"a.pth": pickled([1]), "x": REFUSED[name]}))
    assert invoke(["check", "--fail-on", "system", str(tmp_path / "both.zip")]).exit_code == 1


def test_a_member_of_a_tar_of_a_kind_of_its_own_is_not_looked_at_and_said() -> None:
    data = entry("w.pth", pickled([1]), b"0") + entry("a.pkl", CALLS, b"Z") + bytes(1024)
    assert "CK209" in [one.code for one in check(data).findings]


def test_levels_of_bombs_share_one_budget() -> None:
    zeros = gzip.compress(bytes(25 << 20), 1)
    bomb = gzip.compress(tar_file({str(one): zeros for one in range(6)}))
    tracemalloc.start()
    check(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 << 20
