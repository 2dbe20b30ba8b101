"""``python -m tests.fixture_set fixtures``: write the fixture set into a folder, on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ckptool.reference.trainer import choose
from ckptool.torch_ops import devices
from tests.fixture_set.writing import write_fixtures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets valid/ and README.md")
    parser.add_argument("--device", default="auto", help="auto, or what 'ckptool devices' lists")
    arguments = parser.parse_args()
    choice = choose(arguments.device, devices.devices(os.environ.get("CUDA_VISIBLE_DEVICES")))
    written = write_fixtures(arguments.folder, choice.device, lambda case: print(case.filename, file=sys.stderr))
    print(f"wrote {written} files to {arguments.folder}")


if __name__ == "__main__":
    main()
