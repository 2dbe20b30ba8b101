"""Workers that are copies of this process: what they have of it, how they end, and the same rows from them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scale import some

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux")

FIXTURES = Path(__file__).parents[2] / "fixtures"
FINE = FIXTURES / "valid" / "lenet-state-dict-cpu-zip.pth"

ONE_THREAD = "import os\nassert len(os.listdir('/proc/self/task')) == 1\n"
NO_NEW_PROCESS = "import subprocess\nsubprocess.Popen = None\n"
NO_COPY = "from ckptool.cli import scan_workers\nscan_workers.can_copy = lambda: False\n"


def python(code: str, *arguments: object, code_is: int = 0) -> subprocess.CompletedProcess[str]:
    """Run code in a process of one thread, which this one need not be."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_THREAD + code, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code_is, done.stderr
    return done


def scanned(before: str, *arguments: object, code_is: int = 0) -> tuple[dict[str, Any], str]:
    """Return the rows of a scan by path, and what it said."""
    code = f"{before}from ckptool.cli import cli\ncli()"
    done = python(code, "scan", *arguments, code_is=code_is)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row.pop("path"): row | {"scanned_ns": 0} for row in rows}, done.stderr


@pytest.mark.parametrize(
    ("before", "can"),
    [
        ("", True),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
        ("from ckptool.sources.folder import FolderSource; folder = FolderSource('/')", False),
        ("from ckptool.sources.folder import FolderSource; FolderSource('/').close()", True),
        ("import os; os.listdir = lambda _: os.stat('/nowhere')", False),
    ],
)
def test_a_process_is_copied_where_the_copy_works_for_sure(before: str, can: bool) -> None:
    said = python(f"{before}\nfrom ckptool.cli.worker_process import can_copy\nprint(can_copy())").stdout

    assert said == f"{can}\n"


@pytest.mark.parametrize("jobs", some([3, 1], 2))
def test_copies_and_new_processes_make_the_same_rows(jobs: int) -> None:
    options = (FIXTURES, "--jobs", jobs, "--check", "--digest")  # files of other kinds come in any order
    copies, said = scanned(NO_NEW_PROCESS, *options, code_is=2)
    new, said_by_new = scanned(NO_COPY, *options, code_is=2)

    assert copies == new
    assert len(copies) > 50
    assert said.partition("passed over")[0] == said_by_new.partition("passed over")[0]


def test_a_copy_that_dies_costs_the_file_that_it_is_at(tmp_path: Path) -> None:
    for name in range(6):
        (tmp_path / f"{name}.pth").write_bytes(FINE.read_bytes())
    dies = (
        "import os\nfrom ckptool.checking import row_worker as w\nrow = w.row\n"
        "w.row = lambda path, asked: os._exit(7) if path.endswith('3.pth') else row(path, asked)\n"
    )
    found, said = scanned(NO_NEW_PROCESS + dies, tmp_path, "--jobs", 2, code_is=2)

    assert found[str(tmp_path / "3.pth")]["error"] == {
        "kind": "worker-ended", "type": None, "message": "the process that looked at it ended with exit code 7"
    }  # fmt: skip
    assert sum(row["error"] is None for row in found.values()) == 5
    assert "5 fine, 1 not opened" in said


def test_copies_that_end_before_they_begin_are_one_error() -> None:
    dies = "from ckptool.checking import row_worker as w\nw.READY = None\n"
    found, said = scanned(NO_NEW_PROCESS + dies, FINE, code_is=2)

    assert not found
    assert "worker processes do not start: the last one ended with exit code 1" in said


FORKS = """
import errno, os
fork, opened, left = os.fork, len(os.listdir("/proc/self/fd")), [{}]
def fork_or_not():
    if not left[0]:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    left[0] -= 1
    return fork()
os.fork = fork_or_not
"""


def test_where_the_system_starts_no_more_processes_those_that_are_there_do_all() -> None:
    some, said = scanned(FORKS.format(2), FIXTURES / "valid", "--jobs", 5)
    all_of_them, said_by_all = scanned("", FIXTURES / "valid", "--jobs", 5)

    assert some == all_of_them
    assert said.partition("passed over")[0] == said_by_all.partition("passed over")[0]


def test_where_the_system_starts_none_that_is_the_error() -> None:
    found, said = scanned(FORKS.format(0), FINE, code_is=2)

    assert not found
    assert "worker processes do not start: resource temporarily unavailable" in said


def test_a_copy_that_is_not_made_leaves_nothing_open() -> None:
    code = (
        "from ckptool.cli.worker_process import Copy\nfor _ in range(9):\n    try:\n        Copy(print)\n"
        "    except OSError:\n        pass\nprint(len(os.listdir('/proc/self/fd')) - opened)"
    )

    assert python(FORKS.format(0) + code).stdout == "0\n"


def test_a_copy_takes_no_more_descriptors_than_its_pipes() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    del held[:4]
print(ask('session')[1])
"""
    assert python(COPY + code).stdout == "ended with exit code 0\n"


COPY = """
import os, sys
from ckptool.cli.worker_process import Copy, WorkerProcess

files = [open("/dev/null"), *map(os.fdopen, os.pipe())]
other = WorkerProcess(Copy(lambda lines, _: [None for _ in lines]), None)

def main(lines, written):
    what = lines.readline().strip()
    written.write(b"ready\\n")
    if what == b'"files"':
        written.write(" ".join(sorted(os.listdir("/proc/self/fd"))[:-1]).encode())
    elif what == b'"session"':
        written.write(b"%d %d" % (os.getsid(0), os.getpid()))
    elif what == b'"interrupt"':
        os.kill(os.getpid(), 2)
    elif what == b'"wait"':
        written.flush()
        lines.read()
    written.write(b"\\n")
    written.flush()

def ask(what):
    worker = WorkerProcess(Copy(main), what)
    found = []
    while (lines := worker.receive()) is not None:
        found += lines
    return b"".join(found).decode(), worker.end()
"""


def test_a_copy_has_nothing_open_but_its_pipes_and_what_it_says_to_the_terminal() -> None:
    assert python(f"{COPY}print(ask('files'))").stdout == "('0 1 2', 'ended with exit code 0')\n"


def test_a_copy_is_in_a_session_of_its_own_so_that_the_terminal_interrupts_the_parent_alone() -> None:
    session, process = python(f"{COPY}print(ask('session')[0])").stdout.split()

    assert session == process


def test_an_interrupt_ends_a_copy_as_it_does_a_new_process() -> None:
    before = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = python(f"{before}{COPY}print(ask('interrupt'))")

    assert done.stdout == "('', 'ended with exit code 1')\n"
    assert "KeyboardInterrupt" in done.stderr


def test_an_interrupt_while_a_copy_is_made_is_the_parents() -> None:
    at_once = (
        "fork = os.fork\ndef interrupted():\n"
        " process = fork()\n"
        " if not process: os.kill(os.getpid(), 2)\n"
        " return process\n"
        "os.fork = interrupted\n"
    )

    assert python(f"{COPY}{at_once}print(ask('files'))").stdout == "('0 1 2', 'ended with exit code 0')\n"


def test_a_copy_ends_when_the_parent_is_gone_though_others_are_there() -> None:
    code = f"{COPY}waits = WorkerProcess(Copy(main), 'wait')\nwaits.receive()\n"
    done = python(
        f"{code}print(other._process._pid, waits._process._pid, flush=True)\nos.kill(os.getpid(), 9)", code_is=-9
    )

    for process in map(int, done.stdout.split()):
        _wait_until_gone(process)


def test_a_copy_is_killed_once_and_asked_again_how_it_ended() -> None:
    code = (
        f"{COPY}copy = Copy(main)\nworker = WorkerProcess(copy, 'wait')\nworker.receive()\ncopy.kill()\n"
        "print(copy.wait(), copy.wait())\ncopy.kill()\nprint(worker.end())"
    )

    assert python(code).stdout == f"-9 -9\nwas ended by signal 9, {signal.strsignal(9)}\n"


def _wait_until_gone(process: int) -> None:
    """Wait for the end of a process that is nobody's child any more."""
    until = time.monotonic() + 30
    while True:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        assert time.monotonic() < until
        time.sleep(0.01)
