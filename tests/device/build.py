"""
Build the device for tests with torch's own builder of extensions:  python -m tests.device.build

Takes a compiler of C++20 and ninja, and less than a minute. What was built is kept in ``~/.cache/ckptool-device``, in a
folder for each version of torch and of the source.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Final

import torch

SOURCE: Final = Path(__file__).with_name("device.cpp")
CACHE: Final = Path.home() / ".cache" / "ckptool-device"
KEYS: Final = {"sim": "PrivateUse1", "cuda": "CUDA", "xpu": "XPU"}
"""What torch calls a device, and the key that its C++ has for it."""


def lacks() -> str | None:
    """Return what is not here that building takes."""
    if sys.platform != "linux":
        return "the device maps memory as Linux does"
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return "there is no C++ compiler"
    try:
        from torch.utils.cpp_extension import verify_ninja_availability

        verify_ninja_availability()
    except (ImportError, RuntimeError) as error:
        return f"torch cannot build extensions: {error}"
    return None


def library(kind: str) -> Path:
    """Return the library of the device that torch is to call ``kind``, built if it was not."""
    key = KEYS[kind]
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = CACHE / version / kind
    built = folder / f"device_{kind}.so"
    if not built.exists():
        from torch.utils import cpp_extension

        folder.mkdir(parents=True, exist_ok=True)
        flags = ["-O1", "-g0", f"-DSIM_KEY={key}", *([f"-DSIM_{key}"] if kind != "sim" else [])]
        cpp_extension.load(
            built.stem, [str(SOURCE)], extra_cflags=flags, build_directory=str(folder), is_python_module=False
        )
    return built


if __name__ == "__main__":
    reason = lacks()
    if reason is not None:
        sys.exit(reason)
    for each in sys.argv[1:] or ["sim"]:
        print(library(each))
