"""
What loading and serving do on a device whose work is late, case by case:  python -m tests.device.cases [LEFT OUT]...

Prints one JSON object: for ``nothing``, what each case came to, true or what was wrong; for each of ``WAITS``, the same
with that wait left out, of the cases that need it, up to the first that is wrong. Arguments say which of these to try.
A process of its own, one for all: torch keeps a device once it is registered.

Kernels run as the host's, whose results are late and whose inputs are not; only copies read late. So models here copy.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ckptool.loading.memory import device as device_memory
from ckptool.loading.memory import host
from tests.device import loading, serving, waits
from tests.device.ground import CASES, api
from tests.device.register import register

__all__ = ["CASES", "NOTHING", "loading", "serving"]
NOTHING = "nothing"
MEMORY_NBYTES = 160 << 20
"""The device's: a file that does not fit into it is this long."""


@contextmanager
def without(wait: str) -> Iterator[str]:
    """Leave one wait out, and say how the cases begin that need it."""
    if wait == NOTHING:
        yield ""
        return
    try:
        with waits.without(waits.places()[wait]):
            yield waits.WAITS[wait]
    finally:
        for index in range(api().device_count()):
            api().synchronize(index)  # what is late is not the next one's


def came_to(name: str) -> object:
    api().empty_cache()  # memory is taken as if by the first case
    try:
        return CASES[name]()
    except Exception as error:  # noqa: BLE001 - a result as others
        return f"{type(error).__name__}: {error}"


def tried(left_out: str) -> dict[str, object]:
    found: dict[str, object] = {}
    with without(left_out) as begin:
        for name in (name for name in CASES if name.startswith(begin)):
            found[name] = came_to(name)
            if left_out != NOTHING and found[name] is not True:
                break
    return found


def main() -> None:
    os.environ["SIM_MEMORY"] = str(MEMORY_NBYTES)
    native = register()
    device_memory.PIECE = host.PIECE = 1 << 20  # type: ignore[misc]  # each buffer is used again
    found = {}
    for left_out in sys.argv[1:] or [NOTHING, *waits.WAITS]:
        found[left_out] = tried(left_out)
        if left_out == NOTHING:
            found[left_out]["pinned memory is let go of"] = native.pinned_nbytes() == 0 or native.pinned_nbytes()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
