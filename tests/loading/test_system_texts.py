"""What the system says of its memory and its file systems, from texts as Linux writes them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import system
from ckptool.system import free_memory, is_network, posix
from tests.each import each
from tests.loading.same import saved

KIB, GIB = 1 << 10, 1 << 30

MEMINFO = """MemTotal:       32653556 kB
MemFree:         1000000 kB
MemAvailable:    8388608 kB
Buffers:          100000 kB
SwapTotal:       2097152 kB
SwapFree:        1048576 kB
HugePages_Total:       0
DirectMap1G:    20971520 kB
"""
STAT = """anon 1000
file 3221225472
kernel 5
shmem 1073741824
file_mapped 7
inactive_file 1610612736
active_file 536870912
"""


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what the system's files hold, to be changed."""
    found: dict[str, str] = {"/proc/meminfo": MEMINFO}
    monkeypatch.setattr(posix, "_text_of", lambda path: found.get(path, ""))
    return found


V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
UNLIMITED = 9223372036854771712


def group(folder: str, limit: int | str, used: int | str = GIB, stat: str = "") -> dict[str, str]:
    """Return the files of a control group of either version."""
    names = ("limit_in_bytes", "usage_in_bytes") if folder.startswith(V1) else ("max", "current")
    limit = limit * GIB if isinstance(limit, int) and limit < 100 else limit
    values = (f"{limit}\n", f"{used}\n", stat)
    return {f"{folder}/memory.{name}": value for name, value in zip((*names, "stat"), values, strict=True)}


def inside(path: str) -> dict[str, str]:
    return {"/proc/self/cgroup": f"9:name=systemd:/x\n5:cpu,memory:{path}\n3:memory_not:/c\n0::{path}\n::\n\njunk\n"}


OLD_STAT = f"cache 7\ninactive_file 7\nactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}\n"
FREE: list[tuple[dict[str, str], int | None]] = [
    # Of the machine, with its swap.
    ({}, 9 * GIB),
    ({"/proc/meminfo": "MemAvailable: 12 kB\n"}, 12 * KIB),
    *(({"/proc/meminfo": text}, None) for text in ("", "nonsense", "MemTotal: 5 kB\n", "MemAvailable: many kB\n")),
    # Of a container, which may see its group as the root.
    (group(V2, 4), 3 * GIB),
    (group(V2, 400 * GIB), 9 * GIB),
    (group(V2, 1, 2 * GIB), 0),
    (group(V2, 4, 4 * GIB - 100, STAT), 100 + 2 * GIB),  # pages of files can be dropped, shared memory cannot
    *((group(V2, limit, used, STAT), 9 * GIB) for limit, used in (("max", "5"), ("", ""), ("5", ""), ("-1", "7"))),
    *((group(V2, 4, GIB, stat), 3 * GIB) for stat in ("file\n", "inactive_file x\nactive_file\n", "active_file -5\n")),
    *((inside(path) | group(V2, 4) | group(V1, 2), GIB) for path in ("/docker/abc", "/../other", "/", "", "nonsense")),
    # The least of all groups around a process counts, and none of others.
    *(
        (inside("/a/b:c.d") | group(f"{root}/a/b:c.d", inner) | group(f"{root}/a", outer), expected * GIB)
        for root in (V1, V2)
        for inner, outer, expected in ((4, UNLIMITED, 3), (UNLIMITED, 4, 3), (2, 6, 1), (6, 2, 1), (40, 60, 9))
    ),
    (inside("/a/b") | group(f"{V2}/a/b/c", 1, 0) | group(f"{V2}/b", 1, 0) | group(f"{V1}/c", 1, 0), 9 * GIB),
    (inside("/a") | group(f"{V1}/a", 4, 4 * GIB - 100, OLD_STAT), 100 + 3 * GIB),
    (inside("/../../../etc") | group(f"{V2}/../../../etc", 1, 0), 9 * GIB),
]


@each(("files", "expected"), FREE)
def test_what_is_free_is_what_the_machine_has_within_the_limits_of_containers(
    files: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"/proc/meminfo": MEMINFO} | files
    monkeypatch.setattr(posix, "_text_of", lambda path: found.get(path, ""))
    assert free_memory() == expected


def test_the_numbers_lead_to_the_error(texts: dict[str, str], tmp_path: Path) -> None:
    saved({"a": torch.ones(1000)}, tmp_path / "x.pth")
    texts.update(group(V2, "5000", "1500"))

    with pytest.raises(ckptool.OutOfMemory) as caught:
        ckptool.load(tmp_path / "x.pth", mmap=False)
    assert (caught.value.needed, caught.value.actual) == (4000, 3500)


# File systems


def mounts(fd: int, kind: str) -> str:
    device = os.fstat(fd).st_dev
    mine = f"{os.major(device)}:{os.minor(device)}"
    return (
        "22 28 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
        f"36 35 {mine} /some\\040where /mnt/my\\040data rw,noatime master:1 propagate_from:2 - {kind} server:/x rw\n"
        "short line\n"
        "40 35 0:99 / /mnt/other rw - nfs4 server:/y rw\n"
    )


@each(
    ("kind", "expected"),
    [
        *((kind, True) for kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "fuse", "fuse.sshfs", "virtiofs")),
        *((kind, False) for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk", "nfsd", "")),
    ],
)
def test_mounts_are_told_apart_by_their_type(kind: str, expected: bool, tmp_path: Path, texts: dict[str, str]) -> None:
    with (tmp_path / "x").open("wb") as stream:
        texts["/proc/self/mountinfo"] = mounts(stream.fileno(), kind)

        assert is_network(stream.fileno()) is expected
        for none in ("40 35 0:0 / / rw - nfs4 server:/y rw\n", ""):  # of another device
            texts["/proc/self/mountinfo"] = none
            assert is_network(stream.fileno()) is False


@pytest.mark.parametrize(("kind", "maps"), [("nfs4", False), ("ext4", True)])
def test_files_that_answer_over_a_network_are_read_unless_told_otherwise(
    kind: str, maps: bool, tmp_path: Path, texts: dict[str, str]
) -> None:
    saved({"a": torch.ones(1000)}, tmp_path / "x.pth")
    with (tmp_path / "x.pth").open("rb") as stream:
        texts["/proc/self/mountinfo"] = mounts(stream.fileno(), kind)

    automatic = ckptool.predict_memory(tmp_path / "x.pth")
    told = ckptool.predict_memory(tmp_path / "x.pth", mmap=True)

    assert (automatic.mapped_nbytes, automatic.host_nbytes) == ((4000, 0) if maps else (0, 4000))
    assert (told.mapped_nbytes, told.host_nbytes) == (4000, 0)
    assert ckptool.load(tmp_path / "x.pth")["a"].eq(1).all()


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOMEM])
def test_where_nothing_can_be_mapped_it_is_read(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmapped(fd: int, nbytes: int) -> Any:
        raise OSError(code, os.strerror(code))

    saved({"a": torch.ones(1000)}, tmp_path / "x.pth")
    monkeypatch.setattr(system, "map_private", unmapped)

    assert ckptool.load(str(tmp_path / "x.pth"), mmap=True)["a"].eq(1).all()
