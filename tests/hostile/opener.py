"""
A process that opens hostile files, each in a fork of its own: ``python -m tests.hostile.opener``.

A fork may use so much address space more than it has when it opens its file. It reads the first tensors, and tells of
their digests, of errors, of the seconds of processor time, and of the bytes by which it has grown. Where no process
becomes two, there is a new one for each file, whose growth alone is told.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ckptool.formats.identify
from ckptool import CkptoolError, open_checkpoint
from tests.process import in_a_fork, peak_nbytes

PATIENCE = 60
"""Seconds on the clock, after which a fork is killed: it hangs."""


def opened(path: str, nbytes: int) -> dict[str, Any]:
    """Open a file and read its first tensors, with so much address space more than there is in use."""
    data = Path(path).read_bytes()
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before, start = peak_nbytes(), time.process_time()
    told: dict[str, Any] = {"error": None, "tensors": 0, "digests": {}, "unread": None}
    try:
        with open_checkpoint(data) as found:
            told["tensors"] = len(found.tensors)
            found.weights  # noqa: B018 - it is found when it is asked for
            try:
                for name, tensor in list(found.tensors.items())[:100]:
                    tensor.info.total_nbytes  # noqa: B018
                    told["digests"][name] = hashlib.sha256(tensor.read()).hexdigest()
            except CkptoolError as caught:
                told["unread"] = caught.kind
    except CkptoolError as caught:
        told["error"] = caught.kind
    return {**told, "seconds": time.process_time() - start, "grown": peak_nbytes() - before}


def alone(path: str, nbytes: int) -> dict[str, Any]:
    """Open a file in a process of its own."""
    if sys.platform == "win32":
        command = [sys.executable, "-m", "tests.hostile.opener", path, str(nbytes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        told: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"broken": done.stderr}
        return told
    return in_a_fork(lambda: opened(path, nbytes), PATIENCE)


def main() -> None:
    assert ckptool.formats.identify  # what is imported when it is needed is imported now
    open_checkpoint(b"\x80\x02}.").close()
    if sys.argv[1:]:
        print(json.dumps(opened(sys.argv[1], int(sys.argv[2]))))
    for line in () if sys.argv[1:] else sys.stdin:
        print(json.dumps(alone(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
