"""``ckptool.fleet``: functions of one checkpoint that any engine can map, and what they say of a file that is bad."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ckptool
from ckptool import Cancellation, Cancelled, Limits, fleet, migrate
from ckptool.checking import scan as rows
from ckptool.checking.scan import ScanOptions
from ckptool.cli import on_ray
from ckptool.cli.options import RayCommand, ray_option
from ckptool.errors import CkptoolError
from tests.each import each
from tests.program import invoke, run

FIXTURES = Path(__file__).parents[2] / "fixtures"
FINE = FIXTURES / "valid" / "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"
CUT = FIXTURES / "invalid" / "truncated-zip.pth"
COMMAND = 'pip install "ckptool[ray]"'


def test_the_module_is_there_when_it_is_asked_for() -> None:
    code = "import ckptool; assert 'fleet' in dir(ckptool); print(ckptool.fleet.__all__); import ckptool.fleet"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == f"{fleet.__all__}\n"


@pytest.mark.parametrize("name", fleet.__all__)
def test_a_function_goes_to_another_process_by_its_name(name: str) -> None:
    function = getattr(fleet, name)

    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__module__ == "ckptool.fleet"


@each("path", [FINE, CUT, FIXTURES / "none.pth"])
def test_a_row_is_the_one_of_scan(path: Path) -> None:
    expected = rows.row(str(path), ScanOptions(check=True, digest=True))
    found = fleet.row(path, check=True, digest=True)

    assert {**found, "scanned_ns": 0} == {**expected, "scanned_ns": 0}
    assert json.loads(json.dumps(found)) == found


def test_a_migration_is_done_and_said(tmp_path: Path) -> None:
    report = migrate(FINE, tmp_path / "a.safetensors", strip_module=True)
    found = fleet.migrate_one(FINE, tmp_path / "b.safetensors", strip_module=True)

    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    assert json.loads(json.dumps(found)) == found == {
        "path": str(FINE),
        "target": str(tmp_path / "b.safetensors"),
        "form": "safetensors",
        "format": "safetensors",
        "tensors": report.tensors,
        "nbytes": (tmp_path / "b.safetensors").stat().st_size,
        "written": True,
        "verified": True,
        "error": None,
    }  # fmt: skip
    planned = fleet.migrate_one(FINE, tmp_path / "c.pth", dry_run=True)
    assert (planned["written"], planned["verified"], planned["error"]) == (False, False, None)
    assert not (tmp_path / "c.pth").exists()


def test_a_migration_that_fails_says_why_and_raises_nothing(tmp_path: Path) -> None:
    target = tmp_path / "there.pth"
    target.write_bytes(b"something")
    kinds = {}
    for source, options in ((CUT, {}), (FINE, {}), (FINE, {"dtype": ""}), (FINE, {"key": "none", "force": True})):
        found = fleet.migrate_one(source, target, **options)  # type: ignore[arg-type]
        assert (found["path"], found["target"], found["written"]) == (str(source), None, False)
        assert json.loads(json.dumps(found)) == found
        error = found["error"]
        assert isinstance(error, dict)
        assert error["message"]
        kinds[error["kind"]] = error["type"], bool(error["hint"])

    assert kinds == {
        "truncated-zip": ("TruncatedFile", True),
        "output-exists": ("OutputExists", True),
        "unforeseen": ("ValueError", False),
        "no-state-dict": ("WeightsNotFound", True),
    }
    assert target.read_bytes() == b"something"
    assert list(tmp_path.iterdir()) == [target]


def test_a_cancellation_is_raised(tmp_path: Path) -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    limits = Limits(cancellation=cancellation)
    with pytest.raises(Cancelled):
        fleet.row(FINE, limits=limits)
    with pytest.raises(Cancelled):
        fleet.migrate_one(FINE, tmp_path / "a.pth", limits=limits)


@pytest.mark.parametrize("recipe", ["dask", "spark"])
def test_a_recipe_prints_the_rows(recipe: str) -> None:
    package, path = {"dask": "distributed", "spark": "pyspark"}[recipe], Path(__file__).parent / "recipes"
    if find_spec(package) is None or (recipe == "spark" and shutil.which("java") is None):
        pytest.skip(f"there is no {package}, or no Java that it needs: pip install dask[distributed] pyspark")
    command = [sys.executable, str(path / f"{recipe}_rows.py"), str(FINE), str(CUT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]

    assert [{**one, "scanned_ns": 0} for one in found] == [{**fleet.row(one), "scanned_ns": 0} for one in (FINE, CUT)]


ADDRESSES = {
    ("--ray",): ("local", ()),
    ("--ray", "runs", "more"): ("local", ("runs", "more")),
    ("--ray", "auto", "runs"): ("auto", ("runs",)),
    ("runs", "--ray", "head.example:6379"): ("head.example:6379", ("runs",)),
    ("--ray", "ray://head:10001", "runs"): ("ray://head:10001", ("runs",)),
    ("--ray=[::1]:6379", "runs"): ("[::1]:6379", ("runs",)),
    ("--ray", "s3://bucket/runs"): ("local", ("s3://bucket/runs",)),
    ("runs", "--", "--ray"): (None, ("runs", "--ray")),
}


@each("given", ADDRESSES)
def test_an_address_may_follow_the_option_or_a_path(given: tuple[str, ...]) -> None:
    @click.command(cls=RayCommand)
    @click.argument("paths", nargs=-1)
    @ray_option("Work")
    def command(paths: tuple[str, ...], ray: str | None) -> None:
        click.echo(repr((ray, paths)))

    assert CliRunner().invoke(command, given).output == f"{ADDRESSES[given]!r}\n"


@pytest.mark.parametrize("verb", ["scan", "migrate"])
def test_without_ray_nothing_begins(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    more = ["-o", str(tmp_path / "rows.jsonl")] if verb == "scan" else ["--out-dir", str(tmp_path)]
    result = invoke([verb, str(FINE), "--ray", "auto", *more])

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: this needs ray, which is not installed: {COMMAND}\n"
    assert not list(tmp_path.iterdir())


def test_migrations_on_ray_are_those_of_several_files() -> None:
    result = run("migrate", FINE, "--ray", code=2)
    assert "--ray is for --out-dir, or a folder of several files" in result.stderr


def test_a_worker_refuses_what_it_could_get_wrong(tmp_path: Path) -> None:
    with pytest.raises(CkptoolError, match=r"a node of the cluster has ckptool .*, and here is 9\.9") as other:
        on_ray._run("9.9", None, list, [])
    with pytest.raises(CkptoolError, match="a node of the cluster does not have this folder") as gone:
        on_ray._run(ckptool.__version__, str(tmp_path / "gone"), list, [])

    assert (other.value.kind, gone.value.kind) == ("other-version", "no-folder")
