"""``--ray`` on a real cluster of two nodes: the rows, files, reports and exit codes are those of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import __version__
from tests.fleet import kills
from tests.fleet.cluster import COMMAND, ROOT, Cluster
from tests.migration.kills import assert_same
from tests.migration.kills import run as migrations
from tests.remote.buckets import KEY, SECRET, bucket
from tests.scale import times

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason=f"Ray is not installed: {COMMAND}")

VALID = ROOT / "fixtures" / "valid"
FINE = VALID / "lenet-state-dict-cpu-zip.pth"
DEADLY = """
import os
from ckptool.checking import scan as rows
row = rows.row
def deadly(path, *arguments, **options):
    if path.endswith("deadly.pth"):
        os.kill(os.getpid(), 9)
    return row(path, *arguments, **options)
rows.row = deadly
"""
"""What workers import first: they end at files of this name."""
OTHERS = """
import pathlib
pathlib.Path({!r}).write_text(__file__)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    imports = tmp_path_factory.mktemp("imports")
    (imports / "sitecustomize.py").write_text(DEADLY)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("EC2_METADATA_DISABLED", "true")):
            patch.setenv(f"AWS_{name}", value)  # which each node has
        with Cluster(imports) as started:
            yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kills.copy_files(tmp_path / "runs" / "below", 60)
    return tmp_path / "runs"


def run(cluster: Cluster | None, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as one who uses the cluster does."""
    environment = cluster.environment if cluster is not None else {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ckptool", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def rows(text: str) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    by_path = {one["path"]: {**one, "scanned_ns": 0} for one in found}
    assert len(by_path) == len(found)
    return by_path


def test_rows_and_totals_are_the_same(cluster: Cluster, folder: Path) -> None:
    here = run(None, "scan", "runs", cwd=folder.parent)
    there = run(cluster, "scan", "--ray", cluster.address, "runs", cwd=folder.parent)

    assert len(rows(here.stdout)) == 60
    assert rows(there.stdout) == rows(here.stdout)
    assert (there.returncode, there.stderr) == (here.returncode, here.stderr)


def test_rows_of_tensors_and_digests_are_the_same(cluster: Cluster, folder: Path) -> None:
    found = []
    for number, on in enumerate(([], ["--ray", cluster.address])):
        output, tensors = folder.parent / f"{number}.jsonl", folder.parent / f"{number}-tensors.jsonl"
        run(cluster, "scan", folder, *on, "--digest", "--deep", "-o", output, "--tensors", tensors)
        lines = [json.loads(line) for line in tensors.read_text().splitlines()]
        scanned = {one["path"]: one["scanned_ns"] for one in map(json.loads, output.read_text().splitlines())}
        assert all(one["scanned_ns"] == scanned[one["path"]] for one in lines)
        found.append((rows(output.read_text()), Counter(json.dumps({**one, "scanned_ns": 0}) for one in lines)))

    assert found[0] == found[1]
    assert found[0][1].total() > 300


def test_a_deadly_file_costs_its_own_row_alone(cluster: Cluster, folder: Path) -> None:
    expected = rows(run(None, "scan", folder).stdout)
    deadly = folder / "below" / "deadly.pth"
    shutil.copy(FINE, deadly)
    result = run(cluster, "scan", folder, "--ray", cluster.address)

    found = rows(result.stdout)
    lost = found.pop(str(deadly))
    assert lost["error"] == {
        "kind": "worker-ended", "type": None, "message": "the process on Ray that worked at it ended"
    }  # fmt: skip
    assert lost["nbytes"] == deadly.stat().st_size
    assert found == expected


@pytest.mark.parametrize("whose", ["worker", "own"])
def test_what_was_killed_goes_on_where_it_was(whose: str, cluster: Cluster, folder: Path) -> None:
    expected = rows(run(None, "scan", folder).stdout)
    output = folder.parent / "rows.jsonl"
    process = kills.scan(cluster, str(folder), "--ray", cluster.address, "-o", str(output))
    while not output.exists() or not output.read_bytes().count(b"\n"):
        time.sleep(0.001)
        assert process.poll() is None
    for pid in cluster.at_work() if whose == "worker" else [process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=100)
    result = run(cluster, "scan", folder, "--ray", cluster.address, "-o", output)

    assert rows(output.read_text()) == expected
    assert "skipped " in result.stderr


def test_no_row_is_lost_or_there_twice_while_workers_are_killed(tmp_path: Path) -> None:
    with Cluster() as cluster:
        found = kills.run(cluster, tmp_path, times(24, 240), seed=1)

    assert found.kills == times(24, 240)


def test_migrations_write_the_same_bytes_and_say_the_same(cluster: Cluster, tmp_path: Path) -> None:
    sources = [*sorted(VALID.glob("*.pth"))[::9], ROOT / "fixtures" / "invalid" / "truncated-zip.pth"]
    options = ["--to", "cpu", "--strip-wrappers", "--jsonl", "--out-dir", "out"]
    found = {}
    for place, on in (("here", []), ("there", ["--ray", cluster.address])):
        (tmp_path / place).mkdir()
        done = run(cluster, "migrate", *sources, *options, *on, cwd=tmp_path / place)
        files = {path.name: path.read_bytes() for path in (tmp_path / place / "out").iterdir()}
        found[place] = done.returncode, done.stdout, done.stderr, files

    assert found["there"] == found["here"]
    assert found["here"][0] == 2
    assert len(found["here"][3]) >= len(sources) // 2


def test_a_migration_whose_worker_ends_is_done_by_another(cluster: Cluster, folder: Path) -> None:
    sources = sorted((folder / "below").glob("*.pth"))
    for place in ("here", "there"):
        command = [sys.executable, "-m", "ckptool", "migrate", *sources, "--to", "cpu", "--out-dir", place, "--quiet"]
        command += ["--ray", cluster.address] if place == "there" else []
        process = subprocess.Popen(command, env=cluster.environment, cwd=folder, stdout=-1, stderr=-1, text=True)
        killed: list[int] = []
        while place == "there" and not killed:
            killed = cluster.at_work() if (folder / place).is_dir() and any((folder / place).iterdir()) else []
            assert process.poll() is None
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        printed, said = process.communicate(timeout=120)
        (folder / f"{place}.txt").write_text(f"{process.returncode}\n{printed}{said}".replace(place, "out"))

    assert (folder / "there.txt").read_text() == (folder / "here.txt").read_text()
    here, there = ({path.name: path.read_bytes() for path in (folder / one).iterdir()} for one in ("here", "there"))
    assert there == here
    assert len(here) > 40


FORMS = {"shards": ("--max-shard-size", "100KB"), "items": ("--form", "dcp", "--max-shard-size", "100KB")}


@pytest.mark.parametrize("form", FORMS)
def test_the_files_of_a_folder_are_those_of_one_process(form: str, cluster: Cluster, tmp_path: Path) -> None:
    torch.save({f"{number}.weight": torch.randn(64, 64) for number in range(40)}, tmp_path / "large.pth")
    options = [*FORMS[form], "--json", "--dtype", "float16", "--add-prefix", "layers"]
    found = []
    for place, on in (("here", []), ("there", ["--ray", cluster.address])):
        (tmp_path / place).mkdir()
        done = run(cluster, "migrate", "../large.pth", "out", *options, *on, cwd=tmp_path / place)
        found.append((done.returncode, done.stdout.replace(str(tmp_path / place), ""), done.stderr))

    assert found[1] == found[0]
    assert found[0][0] == 0
    assert_same(tmp_path / "here" / "out", tmp_path / "there" / "out")
    assert len(list((tmp_path / "there" / "out").iterdir())) > 4


def test_an_error_at_one_file_of_a_folder_is_the_error(cluster: Cluster, tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    torch.save({"a": torch.randn(64, 64), "b": weight, "c": torch.randn(64, 64)}, tmp_path / "large.pth")
    data = bytearray((tmp_path / "large.pth").read_bytes())
    data[data.index(weight.numpy().tobytes()) + 5] ^= 1
    (tmp_path / "large.pth").write_bytes(data)
    options = ["large.pth", "out", "--max-shard-size", "1KB"]
    here = run(cluster, "migrate", *options, cwd=tmp_path)
    there = run(cluster, "migrate", *options, "--ray", cluster.address, cwd=tmp_path)

    assert "is damaged: its CRC-32 is" in here.stderr
    assert (there.returncode, there.stderr, there.stdout) == (here.returncode, here.stderr, here.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["large.pth"]


def test_no_file_of_a_folder_is_lost_while_workers_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    found = migrations(kills.OnCluster(cluster), tmp_path, times(6, 60), seed=1)

    assert found.kills == times(6, 60)


def test_what_is_far_away_has_the_same_rows_and_files(cluster: Cluster) -> None:
    pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')
    sources = {f"/b/runs/{path.name}": path.read_bytes() for path in sorted(VALID.glob("*.pth"))[::5]}
    paths = [f"s3:/{name}" for name in list(sources)[::4]]
    found = []
    for on in ([], ["--ray", cluster.address]):
        with bucket(dict(sources)) as (store, _):
            scanned = run(cluster, "scan", "s3://b/runs", "--endpoint", store.url, *on)
            arguments = [*paths, "--to", "cpu", "--out-dir", "s3://b/cpu", "--endpoint", store.url, "--quiet", *on]
            migrated = run(cluster, "migrate", *arguments)
            run(cluster, "migrate", paths[0], "s3://b/cpu/dcp", "--form", "dcp", "--endpoint", store.url, *on)
            written = {name: content for name, content in store.files.items() if name.startswith("/b/cpu/")}
        rows_there = {path: {**one, "version": None, "etag": None} for path, one in rows(scanned.stdout).items()}
        found.append((rows_there, scanned.stderr, scanned.returncode, migrated.stdout, migrated.stderr, written))

    assert found[1] == found[0]
    assert len(found[0][0]) == len(sources)
    assert len(found[0][5]) == len(paths) + 2


def test_nothing_is_imported_from_the_folder_in_which_it_is_called(folder: Path) -> None:
    marker = folder.parent / "ran"
    for name in ("json", "torch", "numpy", "ckptool", "sitecustomize"):
        (folder / f"{name}.py").write_text(OTHERS.format(str(marker)))
    start = f"import sys; sys.path[0] = {str(ROOT)!r}; from ckptool.__main__ import main; main()"
    command = [sys.executable, "-c", start, "scan", "below", "--ray", "--jobs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )

    assert len(rows(done.stdout)) == 60
    assert not marker.exists()


def test_a_ray_that_is_started_here_ends_with_a_process_that_is_killed(folder: Path) -> None:
    mark = f"FLEET_TEST={os.getpid()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLEET_TEST": str(os.getpid())}
    command = [sys.executable, "-m", "ckptool", "scan", str(folder), "--ray"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(marked(mark)) > 3
        process.kill()
    until = time.monotonic() + 30
    while left := marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.1)


def marked(mark: str) -> list[bytes]:
    """Return the commands of processes that have this in their environment, but Ray's agents, which end later."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append((place / "cmdline").read_bytes().rstrip(b"\0"))
        except OSError:  # it has ended, or is not ours
            continue
    return [one for one in found if one and not one.endswith(b"Agent")]


def test_what_cannot_be_reached_is_one_error(tmp_path: Path) -> None:
    done = run(None, "scan", FINE, "--ray", "127.0.0.1:1")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: nothing answers at 127.0.0.1:1\nHint: Give the address that 'ray start' printed.\n"


def test_a_cluster_of_another_version_is_one_error(cluster: Cluster) -> None:
    start = "import ckptool; ckptool.__version__ = '9.9'; from ckptool.__main__ import main; main()"
    command = [sys.executable, "-c", start, "scan", str(FINE), "--ray", cluster.address]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    fact = f"a node of the cluster has ckptool {__version__}, and here is 9.9"
    assert done.stderr == f"Error: {fact}\nHint: Install the same on all of them.\n"
