"""
Save with real libraries, and compare what ckptool makes of the files with what the libraries themselves read.

    python -m tests.zoo torch training        two groups of libraries, each in an environment of its own
    python -m tests.zoo --all                 every group
    python -m tests.zoo training --only timm  one library
    python -m tests.zoo torch --here          in this environment: nothing is installed
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.zoo import environments, table

SECONDS = 900
"""For one library."""


def main() -> int:
    """Run the groups that were asked for; 1 if something is worse than in the table of README.md."""
    arguments = _arguments()
    names = environments.groups() if arguments.all else arguments.groups
    cache = Path(arguments.cache).expanduser().absolute()
    found = []
    for group in names:
        python = Path(sys.executable) if arguments.here else environments.python(group, cache)
        for library in _libraries(python, group):
            if arguments.only and library not in arguments.only:
                continue
            result = _run(python, group, library, cache / "files" / group)
            if arguments.here and result["version"] is None:
                print(f"{group} {library}: is not installed here")
                continue
            found.append(table.row(group, result))
            if arguments.write:
                table.written(found[-1:])
            print(f"{group} {library} {result['version'] or ''}: {len(result['records'])} files", flush=True)
            print("".join(f"{line}\n" for line in table.complaints(result)), end="", flush=True)
    print(table.text(found))
    bad = [] if arguments.write else table.worse(found)
    print("".join(f"worse than in {table.PAGE.name}: {one}\n" for one in bad), end="")
    return int(bool(bad))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.strip().splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(environments.groups()))
    parser.add_argument("--all", action="store_true", help="every group")
    parser.add_argument("--only", action="append", metavar="LIBRARY", help="only this library; repeatable")
    parser.add_argument("--here", action="store_true", help="in this environment; nothing is installed")
    parser.add_argument("--write", action="store_true", help="put the rows into tests/zoo/README.md")
    parser.add_argument("--cache", default="~/.cache/ckptool-zoo", help="where environments and files are kept")
    found = parser.parse_args()
    unknown = set(found.groups) - set(environments.groups())
    if unknown or not (found.groups or found.all):
        parser.error(f"name some of these groups: {', '.join(environments.groups())}; or all of them, with --all")
    return found


def _libraries(python: Path, group: str) -> list[str]:
    command = [str(python), "-m", "tests.zoo.one", group]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(environments.REPOSITORY), "OMP_NUM_THREADS": "1"}


def _run(python: Path, group: str, library: str, folder: Path) -> dict[str, object]:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{library.replace(': ', '-')}.json"
    target.unlink(missing_ok=True)
    command = [str(python), "-m", "tests.zoo.one", group, library, str(target)]
    why = ""
    with target.with_suffix(".log").open("w") as log:
        try:
            done = subprocess.run(command, env=_environment(), stdout=log, stderr=log, timeout=SECONDS, check=False)
            why = f"exit code {done.returncode}, see {log.name}"
        except subprocess.TimeoutExpired:
            why = f"not done after {SECONDS} s"
    if target.exists():
        found: dict[str, object] = json.loads(target.read_text())
        return found
    return {"library": library, "version": None, "records": [], "error": why}


if __name__ == "__main__":
    sys.exit(main())
