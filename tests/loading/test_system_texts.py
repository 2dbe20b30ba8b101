"""What the system says of its memory and its file systems, from texts as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.loading.memory import host
from ckptool.loading.memory.available import free_memory
from ckptool.sources import paths
from ckptool.sources.paths import is_network
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
    monkeypatch.setattr(paths, "system_text", lambda path: found.get(path, ""))
    return found


def group(texts: dict[str, str], limit: str, used: str, stat: str = "") -> None:
    texts["/sys/fs/cgroup/memory.max"] = limit
    texts["/sys/fs/cgroup/memory.current"] = used
    texts["/sys/fs/cgroup/memory.stat"] = stat


def test_what_is_available_and_free_swap_can_be_had(texts: dict[str, str]) -> None:
    assert free_memory() == 9 * GIB


@pytest.mark.parametrize("text", ["", "nonsense", "MemTotal: 5 kB\n", "MemAvailable:\n", "MemAvailable: many kB\n"])
def test_nothing_is_known_where_the_system_does_not_say(text: str, texts: dict[str, str]) -> None:
    texts["/proc/meminfo"] = text

    assert free_memory() is None


def test_a_machine_without_swap(texts: dict[str, str]) -> None:
    texts["/proc/meminfo"] = "MemAvailable: 12 kB\n"

    assert free_memory() == 12 * KIB


def test_the_limit_of_a_container_counts_if_it_is_less(texts: dict[str, str]) -> None:
    group(texts, f"{4 * GIB}\n", f"{GIB}\n")
    assert free_memory() == 3 * GIB
    group(texts, f"{400 * GIB}\n", f"{GIB}\n")
    assert free_memory() == 9 * GIB


def test_pages_of_files_can_be_dropped_and_those_of_shared_memory_cannot(texts: dict[str, str]) -> None:
    group(texts, f"{4 * GIB}\n", f"{4 * GIB - 100}\n", STAT)

    assert free_memory() == 100 + 2 * GIB


@pytest.mark.parametrize(("limit", "used"), [("max", "5"), ("", ""), ("5", ""), ("-1", "7"), ("junk", "junk")])
def test_a_container_without_a_limit_has_the_machine(limit: str, used: str, texts: dict[str, str]) -> None:
    group(texts, limit, used, STAT)

    assert free_memory() == 9 * GIB


def test_a_container_over_its_limit_has_nothing(texts: dict[str, str]) -> None:
    group(texts, f"{GIB}\n", f"{2 * GIB}\n")

    assert free_memory() == 0


V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
UNLIMITED = 9223372036854771712


def old_group(texts: dict[str, str], folder: str, limit: int, used: int, stat: str = "") -> None:
    texts[f"{folder}/memory.limit_in_bytes"] = f"{limit}\n"
    texts[f"{folder}/memory.usage_in_bytes"] = f"{used}\n"
    texts[f"{folder}/memory.stat"] = stat


def new_group(texts: dict[str, str], folder: str, limit: int | str, used: int, stat: str = "") -> None:
    texts[f"{folder}/memory.max"] = f"{limit}\n"
    texts[f"{folder}/memory.current"] = f"{used}\n"
    texts[f"{folder}/memory.stat"] = stat


@pytest.mark.parametrize(
    ("inner", "middle", "expected"),
    [(4, "max", 3), ("max", 4, 3), (2, 6, 1), (6, 2, 1), ("max", "max", 9), (40, 60, 9)],
    ids=str,
)
def test_the_least_limit_of_all_groups_around_a_process_counts(
    inner: int | str, middle: int | str, expected: int, texts: dict[str, str]
) -> None:
    texts["/proc/self/cgroup"] = "0::/user.slice/serving:a.scope\n"
    for folder, limit in ((f"{V2}/user.slice/serving:a.scope", inner), (f"{V2}/user.slice", middle)):
        new_group(texts, folder, limit * GIB if isinstance(limit, int) else limit, GIB)

    assert free_memory() == expected * GIB


def test_groups_of_others_do_not_count(texts: dict[str, str]) -> None:
    texts["/proc/self/cgroup"] = "0::/a/b\n"
    new_group(texts, f"{V2}/a/b/c", GIB, 0)
    new_group(texts, f"{V2}/b", GIB, 0)

    assert free_memory() == 9 * GIB


@pytest.mark.parametrize("line", ["5:memory:/a/b", "7:cpu,memory:/a/b"])
def test_groups_of_the_first_version_count_too(line: str, texts: dict[str, str]) -> None:
    texts["/proc/self/cgroup"] = f"9:name=systemd:/x\n{line}\n3:memory_not:/c\n0::/\n"
    old_group(texts, f"{V1}/a/b", UNLIMITED, GIB)
    assert free_memory() == 9 * GIB
    old_group(texts, V1, 8 * GIB, GIB)
    assert free_memory() == 7 * GIB
    old_group(texts, f"{V1}/a", 6 * GIB, GIB)
    assert free_memory() == 5 * GIB
    old_group(texts, f"{V1}/a/b", 4 * GIB, GIB)
    assert free_memory() == 3 * GIB
    old_group(texts, f"{V1}/c", GIB, GIB)
    assert free_memory() == 3 * GIB


def test_pages_of_files_count_with_those_of_groups_below(texts: dict[str, str]) -> None:
    texts["/proc/self/cgroup"] = "5:memory:/a\n"
    stat = f"cache 7\ninactive_file 7\nactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}\n"
    old_group(texts, f"{V1}/a", 4 * GIB, 4 * GIB - 100, stat)

    assert free_memory() == 100 + 3 * GIB


@pytest.mark.parametrize("path", ["/docker/abc", "/../other", "/", "", "nonsense"])
def test_a_container_that_sees_its_group_as_the_root_has_its_limit(path: str, texts: dict[str, str]) -> None:
    texts["/proc/self/cgroup"] = f"5:memory:{path}\n0::{path}\n::\n\njunk\n"
    new_group(texts, V2, 4 * GIB, GIB)
    assert free_memory() == 3 * GIB
    old_group(texts, V1, 2 * GIB, GIB)
    assert free_memory() == GIB


def test_a_path_never_leads_out_of_the_groups(texts: dict[str, str]) -> None:
    texts["/proc/self/cgroup"] = "0::/../../../etc\n"
    new_group(texts, f"{V2}/../../../etc", GIB, 0)

    assert free_memory() == 9 * GIB


@pytest.mark.parametrize("stat", ["file\n", "inactive_file x\nactive_file\n", "\n\n", "inactive_file -5\n"])
def test_a_strange_table_of_a_container_adds_nothing(stat: str, texts: dict[str, str]) -> None:
    group(texts, f"{4 * GIB}\n", f"{GIB}\n", stat)

    assert free_memory() == 3 * GIB


def test_the_numbers_lead_to_the_error(texts: dict[str, str], tmp_path: Path) -> None:
    saved({"a": torch.ones(1000)}, tmp_path / "x.pth")
    group(texts, "5000", "1500")

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


def test_a_mount_over_another_counts_and_one_of_another_device_does_not(tmp_path: Path, texts: dict[str, str]) -> None:
    with (tmp_path / "x").open("wb") as stream:
        texts["/proc/self/mountinfo"] = "40 35 0:0 / / rw - nfs4 server:/y rw\n"
        assert is_network(stream.fileno()) is False
        texts["/proc/self/mountinfo"] = ""
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


def test_a_system_that_cannot_map_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved({"a": torch.ones(1000)}, tmp_path / "x.pth")
    monkeypatch.setattr(host.os, "name", "nt")

    assert ckptool.load(str(tmp_path / "x.pth"), mmap=True)["a"].eq(1).all()
