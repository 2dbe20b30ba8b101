"""
What loading and serving do on a device whose work is late, case by case:  python -m tests.device.cases

Prints one JSON object: what each case came to, true or what was wrong. A process of its own, one for all: torch keeps a
device once it is registered.

Kernels run as the host's, whose results are late and whose inputs are not; only copies read late. So models here copy.
"""

from __future__ import annotations

import json
import os

from ckptool.loading.memory import filling
from tests.device import loading, serving
from tests.device.ground import CASES, api
from tests.device.register import register

__all__ = ["CASES", "loading", "serving"]
MEMORY_NBYTES = 160 << 20
"""The device's: a file that does not fit into it is this long."""


def came_to(name: str) -> object:
    api().empty_cache()  # memory is taken as if by the first case
    try:
        return CASES[name]()
    except Exception as error:  # noqa: BLE001 - a result as others
        return f"{type(error).__name__}: {error}"


def main() -> None:
    os.environ["SIM_MEMORY"] = str(MEMORY_NBYTES)
    native = register()
    filling.PIECE = 1 << 20  # type: ignore[misc]  # each buffer is used again
    found = {name: came_to(name) for name in CASES}
    print(json.dumps(found | {"pinned memory is let go of": native.pinned_nbytes() == 0 or native.pinned_nbytes()}))


if __name__ == "__main__":
    main()
