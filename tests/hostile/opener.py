"""
A process that opens hostile files, each in a fork of its own: ``python -m tests.hostile.opener``.

A fork may use so much address space more than it has when it opens its file. It reads the first tensors, and tells of
their digests, of errors, and of the seconds of processor time.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ckptool.formats.identify
from ckptool import CkptoolError, open_checkpoint

PATIENCE = 60
"""Seconds on the clock, after which a fork is killed: it hangs."""


def opened(path: str, nbytes: int) -> dict[str, Any]:
    """Open a file and read its first tensors, with so much address space more than there is in use."""
    data = Path(path).read_bytes()
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    start = time.process_time()
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
    return {**told, "seconds": time.process_time() - start}


def forked(path: str, nbytes: int) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(PATIENCE)
        os.write(writing, json.dumps(opened(path, nbytes)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    status = os.waitpid(pid, 0)[1]
    found: dict[str, Any] = json.loads(said) if said else {"broken": f"ended with status {status}"}
    return found


def main() -> None:
    assert ckptool.formats.identify  # what is imported when it is needed is imported now
    open_checkpoint(b"\x80\x02}.").close()
    for line in sys.stdin:
        print(json.dumps(forked(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
