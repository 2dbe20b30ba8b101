"""
Compare ckptool with old releases of torch: they write files that it reads, and read files that it writes.

    python -m tests.zoo.old                     every release whose Python is found here
    python -m tests.zoo.old 1.0.0 1.12.1        these
    python -m tests.zoo.old --python 1.0.0=/usr/bin/python3.6 1.0.0

Each release is installed into an environment of its own under ~/.cache/ckptool-zoo (0.1 to 0.8 GB to download each).
Pythons are looked for on the path and among those of pyenv.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptool

RELEASES = {
    "1.0.0": ("3.6", "numpy==1.19.5"),
    "1.4.0": ("3.7", "numpy==1.21.6"),
    "1.6.0": ("3.8", "numpy==1.24.4"),
    "1.12.1": ("3.10", "numpy==1.26.4"),
    "2.1.2": ("3.10", "numpy==1.26.4"),
}
"""Their Python, and the numpy that fits both."""
READS_ZIPS = (1, 6)
PROGRAM = Path(__file__).with_name("program.py")
CACHE = Path("~/.cache/ckptool-zoo").expanduser()


def main() -> int:
    """Run the releases; 1 if something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.old", description=__doc__.strip().splitlines()[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=", ".join(RELEASES))
    parser.add_argument("--python", action="append", default=[], metavar="RELEASE=PATH", help="the interpreter of one")
    arguments = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in arguments.python)
    logging.getLogger("ckptool").setLevel(logging.ERROR)
    bad = 0
    for release in arguments.releases or RELEASES:
        interpreter = pythons.get(release) or _python(RELEASES[release][0])
        if interpreter is None:
            print(f"torch {release}: no Python {RELEASES[release][0]} here")
            continue
        bad += _compare(release, _installed(release, interpreter))
    return int(bad > 0)


def _python(version: str) -> str | None:
    found = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def _installed(release: str, interpreter: str) -> Path:
    folder = CACHE / f"torch-{release}"
    done = folder / "installed.txt"
    python = folder / "bin" / "python"
    if not done.exists():
        subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], cwd=CACHE, check=True)
        needed = [f"torch=={release}", RELEASES[release][1]]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *needed], cwd=folder, check=True)
        done.write_text(release)
    return python


def _run(python: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), str(PROGRAM), *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{python}: {done.stderr[-2000:]}")
    for line in done.stderr.splitlines():
        print(f"  not written: {line}")
    return done.stdout


def _compare(release: str, python: Path) -> int:
    folder = CACHE / "files" / f"torch-{release}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "back").mkdir(parents=True)
    print(f"torch {release}", flush=True)
    _run(python, "write", str(folder))
    bad: list[str] = []
    files, tensors, refused = 0, 0, 0
    wanted = {}
    for path in sorted(folder.glob("*.pt")):
        told = json.loads(Path(f"{path}.json").read_text())
        files, tensors = files + 1, tensors + len(told)
        bad += [f"{path.name}: {why}" for why in _differences(path, told)]
        for form, tail in (("same", ""), ("state_dict", "_weights")):
            target = folder / "back" / f"{path.stem}{tail}.pt"
            try:
                ckptool.migrate(path, target, form=form)
            except ckptool.CkptoolError as error:
                refused += 1
                print(f"  {path.name}, {form}: {error.message}")
                continue
            wanted[target.name] = told if form == "same" else _said(target)
    if _number(release) >= READS_ZIPS:
        again = json.loads(_run(python, "read", str(folder / "back")))
        for name, found in again.items():
            if found != wanted[name]:
                bad.append(f"{name}, as written by ckptool: {found if isinstance(found, str) else 'differs'}")
    print("".join(f"  wrong: {one}\n" for one in bad), end="")
    read = len(wanted) if _number(release) >= READS_ZIPS else 0
    print(
        f"  {files} files with {tensors} tensors read; {read} written and read by it; "
        f"{refused} refused; {len(bad)} wrong"
    )
    return len(bad)


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _differences(path: Path, told: dict[str, Any]) -> Iterator[str]:
    try:
        ours = _said(path)
    except ckptool.CkptoolError as error:
        yield error.message
        return
    for name, tensor in told.items():
        if name in ours:
            if ours[name] != tensor:
                yield f"{name}: {ours[name]}, not {tensor}"
        elif tensor not in ours.values():
            yield f"{name}: is missing"


def _said(path: Path) -> dict[str, Any]:
    with ckptool.open_checkpoint(path) as checkpoint:
        return {name: tensor for one in checkpoint.tensors.values() for name, tensor in _parts(one.name, one.info)}


def _parts(name: str, info: ckptool.TensorInfo) -> Iterator[tuple[str, list[Any]]]:
    for part, inner in info.parts:
        yield from _parts(f"{name}[{part}]", inner)
    if not info.parts:
        data = ckptool.LazyTensor(name, info).read()
        yield name, [info.dtype.name, list(info.shape), hashlib.sha1(data).hexdigest()]


if __name__ == "__main__":
    sys.exit(main())
