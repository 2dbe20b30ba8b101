"""
Fuzzing that looks at which branches are reached: ``python -m tests.fuzz.guided TARGET -max_total_time=60``.

The targets are ``pickle``, ``zip``, ``legacy`` and ``header``. Needs atheris, which is not among the project's
requirements: ``pip install atheris``. Anything but an error of ours is a crash; the file that crashes is written to the
working directory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main() -> None:
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["ckptool"]):
        from tests.fuzz.targets import TARGETS, one

    name, *options = sys.argv[1:]
    target, known = TARGETS[name]
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    for number, data in enumerate(known):
        (folder / f"seed-{number}").write_bytes(data)
    atheris.Setup([name, str(folder), *options], lambda data: one(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
