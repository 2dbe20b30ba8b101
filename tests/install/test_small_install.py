"""The wheel in new environments, one for each Python that is here: small, and it does all that needs no torch."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests import build

pytestmark = pytest.mark.install

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "fixtures" / "valid" / "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
"""The releases that the package says it runs on, and the next one."""

BROUGHT_NBYTES = 3 << 20
"""What pip brings with it."""
SMALL_NBYTES = 11_500_000
"""All of it; half is what Python compiles, and most so in 3.11."""

# Tests of readers and writers that make their files themselves, byte by byte.
NEED_NO_TORCH = [
    "archives/test_tars.py",
    "bounds/test_archives.py",
    "bounds/test_pickle_limits.py",
    "checkpoints/test_contents.py",
    "formats/test_every_format.py",
    "formats/test_packed.py",
    "formats/test_plain_pickle.py",
    "formats/test_torch_zip.py",
    "formats/test_torchscript.py",
    "names/test_match_keys.py",
    "pickles/test_pickles.py",
    "sources/test_checksums.py",
    "sources/test_files.py",
    "test_errors.py",
]


def run(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees nothing of this checkout, nor of this environment's packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=folder, env=kept | environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that runs one pip for all environments, so none needs one; what it downloads is kept here."""
    folder = tmp_path_factory.mktemp("pip")
    made = run(sys.executable, "-m", "venv", folder / "environment", folder=folder)
    assert made.returncode == 0, made.stderr

    def call(environment: Path | None, *arguments: str | Path) -> str:
        where = ["--python", _python_in(environment)] if environment else []
        command = [_python_in(folder / "environment"), "-m", "pip", *where, *arguments]
        done = run(*command, folder=folder, PIP_CACHE_DIR=str(folder / "cache"))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture(scope="module")
def wheel(pip: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(None, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (found,) = folder.glob("*.whl")
    return found


def _python_in(environment: Path) -> Path:
    return environment / "bin" / "python"


def _pythons(version: str) -> Iterator[Path]:
    yield from sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    found = shutil.which(f"python{version}")
    if found is not None:
        yield Path(found)


def python_of(version: str) -> Path:
    """Return an interpreter of a release that can make environments."""
    for python in _pythons(version):
        asked = run(python, "-c", "import venv, sys; print(*sys.version_info[:2], sep='.')", folder=Path.home())
        if asked.stdout.strip() == version:
            return python
    pytest.skip(f"no Python {version} here")


@pytest.fixture(scope="module", params=PYTHONS)
def environment(
    request: pytest.FixtureRequest,
    wheel: Path,
    pip: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Return a new environment with the wheel, and what pip brings with it."""
    python = python_of(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    made = run(python, "-m", "venv", "--without-pip", folder / "environment", folder=folder)
    assert made.returncode == 0, made.stderr
    pip(folder / "environment", "install", "--quiet", wheel)
    return folder / "environment"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    shutil.copy(FIXTURE, tmp_path / "lenet.pth")
    for name, kind, data in (
        ("a.pth", "FloatStorage", build.floats()),
        ("other.pth", "FloatStorage", bytes(16)),
        ("wide.pth", "DoubleStorage", bytes(32)),
    ):
        tree = {"w": build.tensor(build.storage("0", 4, kind))}
        (tmp_path / name).write_bytes(build.torch_zip(tree, {"0": data}))
    return tmp_path


def test_the_metadata_says_what_is_needed_and_what_for(wheel: Path) -> None:
    found = _metadata(wheel)
    required = [line.replace(" ", "") for line in found.get_all("Requires-Dist", [])]

    def names(extra: str | None) -> set[str]:
        marks = f"extra=={extra!r}".replace("'", '"') if extra else None
        taken = [line.replace("'", '"').partition(";") for line in required]
        return {name for name, _, mark in taken if (mark == marks if marks else not mark)}

    assert names(None) == {"safetensors>=0.4.3", "click>=8.1", "tabulate>=0.9"}
    assert names("torch") == {"torch>=2.1", "numpy>=1.26"}
    assert set(found.get_all("Provides-Extra", [])) == {
        "torch",
        "train",
        "serve",
        "stat",
        "zstd",
        "remote",
        "hub",
        "parquet",
        "ray",
        "transformers",
        "test",
    }
    assert names("torch") <= names("train") & names("serve") & names("test")
    releases = [line.rpartition(" ")[2] for line in found.get_all("Classifier", []) if ":: Python :: 3." in line]
    assert releases == PYTHONS[:-1]
    assert found["Requires-Python"] == f">={PYTHONS[0]}"
    assert found["License-Expression"] == "Apache-2.0"
    assert "Intended Audience :: Science/Research" in found.get_all("Classifier", [])
    assert found.get_payload()


def test_no_index_takes_a_build_that_does_not_know_the_repository(wheel: Path) -> None:
    found = _metadata(wheel)

    assert "Private :: Do Not Upload" in found.get_all("Classifier", [])
    assert found.get_all("Project-URL") is None


def test_what_is_uploaded_has_links_that_lead_somewhere_and_is_the_same_each_time(
    pip: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = "https://example.org/someone/ckptool"
    monkeypatch.setenv("CKPTOOL_REPOSITORY", repository)
    built = []
    for name in ("first", "second"):
        pip(None, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / name, ROOT)
        built += list((tmp_path / name).glob("*.whl"))
    found = _metadata(built[0])
    description = str(found.get_payload())

    assert built[0].read_bytes() == built[1].read_bytes()
    assert all(link.startswith(("https://", "#")) for link in re.findall(r"\]\(([^)]*)\)", description))
    assert f"]({repository}/blob/v{found['Version']}/docs/inspect.md)" in description
    assert "pip install ckptool " in description
    assert "clone" not in description
    assert "constraints" not in description
    assert {line.partition(", ")[0] for line in found.get_all("Project-URL", [])} >= {"Source", "Issues", "Changelog"}
    assert not [line for line in found.get_all("Classifier", []) if line.startswith("Private")]


def test_the_source_archive_holds_the_checkout_and_is_the_same_each_time(
    pip: Callable[..., str], tmp_path: Path
) -> None:
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    checkout = set(run(*asked, folder=ROOT).stdout.splitlines())
    if not checkout:
        pytest.skip("not in a checkout of its own")
    pip(None, "install", "--quiet", "--target", tmp_path / "hatchling", "hatchling")
    built = []
    for name in ("first", "second"):
        command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path / name]
        done = run(*command, folder=ROOT, PYTHONPATH=str(tmp_path / "hatchling"))
        assert done.returncode == 0, done.stderr
        built += list((tmp_path / name).iterdir())
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert names == {*checkout, "PKG-INFO"}  # with tests and fixtures: the tests pass from it
    assert built[0].read_bytes() == built[1].read_bytes()


def _metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}

    assert "ckptool/py.typed" in names
    assert {"ckptool/cli/page/assets/page.html", "ckptool/cli/page/assets/main.js"} < set(names)
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ckptool"}


def test_an_installation_is_small(environment: Path, pip: Callable[..., str]) -> None:
    listed = json.loads(pip(environment, "list", "--format", "json"))
    (packages,) = environment.glob("lib/python*/site-packages")

    assert {entry["name"] for entry in listed} == {"ckptool", "safetensors", "click", "tabulate"}
    sizes = {file: file.stat().st_size for file in packages.rglob("*") if file.is_file()}
    own = sum(size for file, size in sizes.items() if file.relative_to(packages).parts[0].startswith("ckptool"))
    assert sum(sizes.values()) - own < BROUGHT_NBYTES
    assert sum(sizes.values()) < SMALL_NBYTES


def test_all_that_needs_no_torch_works(environment: Path, files: Path) -> None:
    def ckptool(*arguments: str, code: int = 0) -> str:
        done = run(environment / "bin" / "ckptool", *arguments, folder=files)
        assert (done.returncode, done.stderr) == (code, ""), arguments
        return done.stdout

    assert ckptool("--version").startswith("ckptool, version ")
    module = run(_python_in(environment), "-m", "ckptool", "--version", folder=files)
    assert module.stdout == ckptool("--version")
    ckptool("example")
    assert "DistributedDataParallel" in ckptool("example.pth")
    assert "module.conv1.weight" in ckptool("inspect", "lenet.pth")
    assert "every byte was read; all 16 records match" in ckptool("check", "--deep", "lenet.pth")
    for target, *options in (
        ("same.pth", "--form", "same"),
        ("cpu.pth", "--to", "cpu"),
        ("weights.pth", "--form", "state_dict", "--strip-module"),
        ("weights.safetensors", "--strip-module"),
    ):
        assert "written, and read back by ckptool\n" in ckptool("migrate", "lenet.pth", target, *options)
        same = ckptool("diff", "lenet.pth", target, "--ignore-wrappers", "--ignore-device")
        assert same.endswith("the same: 10 tensors\n")
        assert "nothing wrong found" in ckptool("check", "--deep", target)
    assert "values       w: 3 of 4; first at [1]" in ckptool("diff", "a.pth", "other.pth", code=1)
    assert ckptool("check", "--explain", "No module named 'models'")


@pytest.mark.parametrize("environment", PYTHONS[:1], indirect=True)
def test_numpy_alone_lets_the_reference_library_read_back(
    environment: Path, pip: Callable[..., str], files: Path
) -> None:
    beside = files / "numpy"
    pip(environment, "install", "--quiet", "--target", beside, "numpy")
    done = run(
        environment / "bin" / "ckptool", "migrate", "a.pth", "a.safetensors", folder=files, PYTHONPATH=str(beside)
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "written, and read back by ckptool and safetensors " in done.stdout


def test_the_readers_pass_their_tests(environment: Path, pip: Callable[..., str], tmp_path: Path) -> None:
    if not environment.parent.name.startswith((PYTHONS[0], PYTHONS[-1])):
        pytest.skip("the oldest Python runs them, and the next one")
    pip(environment, "install", "--quiet", "pytest", "pytest-xdist", "hypothesis")
    # Beside no ``ckptool`` folder, so that what is installed is what is tested.
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    tests = [f"tests/{name}" for name in NEED_NO_TORCH]
    done = run(_python_in(environment), "-m", "pytest", "-q", "-x", *tests, folder=tmp_path)

    assert done.returncode == 0, done.stdout[-4000:]
    where = run(_python_in(environment), "-c", "import ckptool; print(ckptool.__file__)", folder=tmp_path).stdout
    assert where.startswith(str(environment))
