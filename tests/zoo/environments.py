"""An environment for each group of libraries: torch once for all of them, their own packages beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
REQUIREMENTS = HERE / "requirements"
BASE = ("torch", "safetensors", "click", "tabulate", "numpy", "scipy", "scikit-learn", "pytest")


def groups() -> list[str]:
    """Return the names of all groups; ``torch`` is the first, and needs nothing else."""
    return ["torch", *sorted(path.stem for path in REQUIREMENTS.glob("*.txt") if path.stem != "torch")]


def python(group: str, cache: Path, needed: Path | None = None) -> Path:
    """Return the interpreter of a group's environment, which is made if it is not there, or not as it should be."""
    base = _environment(cache / "base")
    constraints = REPOSITORY / "tests" / "constraints.txt"
    _install(cache / "base", ["--constraint", str(constraints), *BASE], constraints.read_text())
    folder = cache / group
    _environment(folder)
    site = _site_packages(folder)
    (site / "zoo_base.pth").write_text(f"{_site_packages(base.parents[1])}\n")  # found after its own packages
    needed = needed or REQUIREMENTS / f"{group}.txt"
    _install(folder, ["--requirement", str(needed)], needed.read_text())
    return _interpreter(folder)


def _environment(folder: Path) -> Path:
    interpreter = _interpreter(folder)
    if not interpreter.exists():
        venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    return interpreter


def _interpreter(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _site_packages(folder: Path) -> Path:
    if os.name == "nt":
        return folder / "Lib" / "site-packages"
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _install(folder: Path, arguments: list[str], wanted: str) -> None:
    """Install, unless the same was installed before."""
    done = folder / "installed.txt"
    if done.exists() and done.read_text() == wanted:
        return
    environment = {**os.environ, "DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [str(_interpreter(folder)), "-m", "pip", "install", "--quiet", "--prefer-binary", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    done.write_text(wanted)
