"""
Other systems: each verb makes of the fixtures what it makes here, and tests pass there as they do here.

Without torch and numpy, which do not start everywhere. A Windows Python runs under Wine; a macOS is simulated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import golden
from tests.install.test_small_install import PYTHONS, python_of
from tests.machines.wine import ROOT, Unavailable, Windows

MAKE = ["-m", "tests.golden", "--print", "--bare", "--every", "4"]

PASS_ON_WINDOWS = [
    *(
        "tests/archives",
        "tests/names",
        "tests/checkpoints",
        "tests/sources/test_files.py",
        "tests/sources/test_windows.py",
    ),
    *("tests/formats/test_every_format.py", "tests/formats/test_broken_folders.py", "tests/cli/test_verbs.py"),
    *("tests/migration/test_any_system.py", "tests/migration/test_outputs.py"),
]
"""A part of those that need neither torch nor numpy; CONTRIBUTING.md has the command for all of them."""


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windows]:
    try:
        made = Windows(tmp_path_factory.mktemp("windows"))
    except Unavailable as reason:
        pytest.skip(f"no Wine, or no Python for it: {reason}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def here() -> dict[str, golden.Fact]:
    return made_by(sys.executable)


def made_by(python: str | Path, **environment: str) -> dict[str, golden.Fact]:
    """Return the facts of a Python, as `tests.golden` makes them."""
    command = [str(python), *MAKE]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return golden.by_command(done.stdout.splitlines())


def same(here: dict[str, golden.Fact], there: dict[str, golden.Fact]) -> None:
    changed = list(golden.differences(here, there))
    assert not changed, "\n".join([f"{len(changed)} of {len(here)}", *changed[:20]])


@pytest.mark.install
def test_every_verb_makes_of_the_fixtures_on_windows_what_it_makes_here(
    here: dict[str, golden.Fact], windows: Windows
) -> None:
    running = windows.start(*MAKE)
    text, _ = running.communicate()
    assert running.returncode == 0, text[-4000:]
    there = golden.by_command(line for line in text.splitlines() if line.startswith("{"))

    # Edits in place are refused there, and leave the file as it is.
    edits = {command for command in here if "--in-place" in command}
    assert edits
    for command in edits:
        (fixture,) = Path(ROOT, "fixtures").glob(f"*valid/{command.split()[3].removeprefix('OUT/of-')}")
        assert (there[command]["exit"], there[command]["files"]) == (1, {"": golden.digest(fixture)})
    same(*({command: fact for command, fact in facts.items() if command not in edits} for facts in (here, there)))


@pytest.mark.install
def test_tests_pass_on_windows(windows: Windows) -> None:
    running = windows.start("-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", "C:\\t", *PASS_ON_WINDOWS)
    text, _ = running.communicate()
    assert running.returncode == 0, text[-8000:]


@pytest.mark.exhaustive
def test_every_verb_makes_of_the_fixtures_on_a_simulated_macos_what_it_makes_here(here: dict[str, golden.Fact]) -> None:
    macos = [Path(__file__).with_name("macos"), ROOT]
    same(here, made_by(sys.executable, PYTHONPATH=os.pathsep.join(map(str, macos))))


@pytest.mark.install
@pytest.mark.parametrize("version", [version for version in PYTHONS if version != "3.11"])
def test_every_verb_makes_of_the_fixtures_on_other_pythons_what_it_makes_here(
    here: dict[str, golden.Fact], version: str, tmp_path: Path
) -> None:
    # The oldest Python has the oldest packages that are promised.
    pins = "minima.txt" if version == PYTHONS[0] else "constraints.txt"
    python = python_of(version)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--python-version", version]
    packages = ["click", "tabulate", "safetensors", "zstandard"]
    subprocess.run([*command, "--target", tmp_path, "-c", ROOT / "tests" / pins, *packages], check=True)
    same(here, made_by(python, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])))
