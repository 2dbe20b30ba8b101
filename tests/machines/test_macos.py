"""What is asked of macOS alone, on a simulated one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool import open_checkpoint, system
from tests import build
from tests.machines.wine import ROOT
from tests.missing import only_linux

pytestmark = only_linux("of Linux a macOS is made")

MACOS = os.pathsep.join([str(Path(__file__).with_name("macos")), str(ROOT)])


def run(program: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": MACOS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_what_is_written_is_on_the_disk_itself(tmp_path: Path) -> None:
    program = """
import sys, ckptool, sitecustomize
ckptool.migrate(sys.argv[1], sys.argv[2], to="cpu")
print(len(sitecustomize.FULL_SYNCS))
ckptool.migrate(sys.argv[2], in_place=True, to="meta")
print(len(sitecustomize.FULL_SYNCS))
"""
    (tmp_path / "a.pth").write_bytes(build.torch_zip({"w": build.tensor(build.storage())}, {"0": build.floats()}))
    copied, edited = map(int, run(program, tmp_path / "a.pth", tmp_path / "b.pth").split())
    assert copied >= 1
    assert edited >= copied + 3  # the journal, the file, and the file without its journal


@pytest.mark.exhaustive
def test_a_tensor_of_more_than_two_gib_is_read(tmp_path: Path) -> None:
    program = """
import sys, ckptool
data = ckptool.open_checkpoint(sys.argv[1])["w"].read()
print(len(data), data[-1])
"""
    nbytes = (2 << 30) + 4096
    header = f'{{"w":{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[0,{nbytes}]}}}}'.encode()
    with (tmp_path / "a.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.seek(nbytes - 1, os.SEEK_CUR)
        stream.write(b"\7")  # all before it is a hole
    assert run(program, tmp_path / "a.safetensors") == f"{nbytes} 7\n"


def test_a_disk_without_hard_links_will_do(tmp_path: Path) -> None:
    program = """
import errno, os, sys, ckptool
def refused(*_, **__):
    number = getattr(errno, sys.argv[3])
    raise OSError(number, os.strerror(number))
os.link = refused
ckptool.migrate(sys.argv[1], sys.argv[2], to="cpu")
print(os.listdir(os.path.dirname(sys.argv[2])))
"""
    (tmp_path / "a.pth").write_bytes(build.torch_zip({"w": build.tensor(build.storage())}, {"0": build.floats()}))
    for name in ("EPERM", "ENOTSUP"):
        target = tmp_path / name / "b.pth"
        target.parent.mkdir()
        assert run(program, tmp_path / "a.pth", target, name) == "['b.pth']\n"


@pytest.mark.parametrize(("flags", "expected"), [(0x1000, False), (0x0, True)])
def test_a_disk_of_another_machine_is_known_by_what_the_system_says_of_it(flags: int, expected: bool) -> None:
    program = """
import ctypes, sys
from ckptool import system
def fstatfs(fd, status):
    status[16] = int(sys.argv[1])  # f_flags of struct statfs
    return 0
class System:
    fstatfs = staticmethod(fstatfs)
    __getitem__ = lambda self, name: fstatfs
ctypes.CDLL = lambda _: System()
print(system.is_network(0))
"""
    assert run(program, str(flags)) == f"{expected}\n"


@pytest.mark.parametrize("has_it", [True, False])
def test_what_has_no_such_call_is_synced_as_elsewhere(
    has_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    asked: list[object] = []

    def full(_fd: int, what: int) -> None:
        if not has_it:
            raise OSError(errno.ENOTSUP, "a network")
        asked.append(what)

    with (tmp_path / "file").open("wb") as stream, monkeypatch.context() as macos:
        macos.setattr(sys, "platform", "darwin")
        macos.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
        macos.setattr(fcntl, "fcntl", full)
        macos.setattr(os, "fsync", lambda _fd: asked.append("fsync"))
        system.sync(stream.fileno())

    assert asked == [51 if has_it else "fsync"]


@pytest.mark.parametrize(("clones", "how"), [(True, "clone"), (False, "copy")])
def test_a_disk_that_clones_is_asked_to_and_any_other_gets_a_copy(clones: bool, how: str, tmp_path: Path) -> None:
    program = """
import ctypes, os, sys, ckptool
def fclonefileat(source, folder, path, flags):
    if sys.argv[4] != "True" or os.path.lexists(path):
        ctypes.set_errno(45)  # ENOTSUP
        return -1
    with open(path, "xb") as stream:
        stream.write(os.pread(source, 1 << 30, 0))
    os.chmod(path, 0o444)  # as the source
    return 0
ctypes.CDLL = lambda *_, **__: type("System", (), {"fclonefileat": staticmethod(fclonefileat)})
os.umask(0o022)
done = ckptool.migrate(sys.argv[1], sys.argv[2], to="cpu")
assert ckptool.migrate(sys.argv[1], sys.argv[2], to="cpu", force=True).how == done.how
assert ckptool.migrate(sys.argv[1], sys.argv[3], to="cpu", reflink=False).how == "copy"
assert oct(os.stat(sys.argv[2]).st_mode) == oct(os.stat(sys.argv[3]).st_mode) == "0o100444"
print(done.how, done.verified, sorted(os.listdir(os.path.dirname(sys.argv[2]))))
"""
    source, target, copy = (tmp_path / name for name in ("a.pth", "b.pth", "c.pth"))
    numel = 1 << 18
    tensor = build.tensor(build.storage(numel=numel, location="cuda:0"), (numel,))
    source.write_bytes(build.torch_zip({"w": tensor}, {"0": build.floats(numel)}))
    source.chmod(0o444)
    assert run(program, source, target, copy, str(clones)) == f"{how} True ['a.pth', 'b.pth', 'c.pth']\n"
    with open_checkpoint(target) as one, open_checkpoint(copy) as other:
        assert one["w"].read() == other["w"].read() == build.floats(numel)
