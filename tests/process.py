"""What a process has: open descriptors, and memory. Children of tests ask it of themselves, on every system."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
_MOST_DESCRIPTORS = 1024

_MEASURED = """
import os, sys
from tests.process import peak_nbytes
def end(code):  # the command line leaves without more ado
    print(peak_nbytes(), file=sys.stderr, flush=True)
    leave(code)
leave, os._exit = os._exit, end
from ckptool.__main__ import main
main()
"""


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    gc.collect()
    found = 0
    for fd in range(_MOST_DESCRIPTORS):
        try:
            os.fstat(fd)
        except OSError:
            continue
        found += 1
    return found


def peak_nbytes() -> int:
    """Return the most memory that this process has had; on Windows, of its own and not with files that are mapped."""
    if sys.platform == "win32":
        import ctypes

        counters = (ctypes.c_size_t * 9)(72)  # PROCESS_MEMORY_COUNTERS: of its words the last is the peak
        ctypes.WinDLL("kernel32").K32GetProcessMemoryInfo(ctypes.c_void_p(-1), counters, 72)
        return counters[8]
    if sys.platform == "linux":  # ru_maxrss begins with what the process had before exec, which is all of pytest
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts in bytes


def in_a_fork(work: Callable[[], dict[str, Any]], patience: int) -> dict[str, Any]:
    """Return what a copy of this process comes to, or how it was ``broken``; after so many seconds, it is killed."""
    assert sys.platform != "win32"
    import json
    import signal
    import traceback

    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        signal.alarm(patience)
        try:
            said = json.dumps(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is told of
            said = json.dumps({"broken": "".join(traceback.format_exception(error))[-2000:]})
        with os.fdopen(writing, "w") as stream:
            stream.write(said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    status = os.waitpid(pid, 0)[1]
    found: dict[str, Any] = json.loads(said) if said else {"broken": f"killed by signal {os.WTERMSIG(status)}"}
    return found


def run_within(nbytes: int, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """
    Run the command line, which may have so much memory.

    On Linux, it gets no more address space. Elsewhere it says what it has had in a last line of stderr, which is taken
    away.
    """
    import subprocess  # whoever asks for the memory of a process needs none of it

    if sys.platform == "linux":
        import resource

        options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
        start = ["-m", "ckptool"]
    else:
        start = ["-c", _MEASURED]
    command = [sys.executable, *start, *map(str, arguments)]
    done = subprocess.run(command, stderr=subprocess.PIPE, cwd=ROOT, check=False, **options)
    if sys.platform != "linux":
        *lines, peak = done.stderr.splitlines(keepends=True)
        done.stderr = b"".join(lines)
        assert int(peak) <= nbytes
    return done
