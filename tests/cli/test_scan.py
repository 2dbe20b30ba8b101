"""``ckptool scan``: a row for each checkpoint, whatever becomes of the processes that make them."""

from __future__ import annotations

import errno
import json
import multiprocessing.context
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from ckptool import check, migrate
from ckptool.fleet import row
from ckptool.formats.listing import targets
from tests.program import INVALID, OURS, VALID, invoke, run, validated
from tests.scale import exhaustive, times
from tests.workers import do_first

ALL = [*OURS, *sorted(INVALID.iterdir())]
FINE = VALID / "lenet-state-dict-cpu-zip.pth"
CUT = INVALID / "lfs-pointer.pth"
CORPORA = [Path(__file__).parents[3] / "shared" / name for name in ("corpus-dirs", "corpus")]
TENSOR_HEAD = b'{"schema": "ckptool.tensors/1", '


def scan(*arguments: object, code: int = 0, given: bytes | None = None) -> Result:
    return run("scan", "--jobs", 1, *arguments, code=code, input=given)


def rows(text: str) -> dict[str, dict[str, Any]]:
    """Return valid rows by path, without the time at which they were made."""
    found = [validated(json.loads(line), "scan") for line in text.splitlines()]
    for one in found:
        del one["scanned_ns"]
    assert len({one["path"] for one in found}) == len(found)
    return {one["path"]: one for one in found}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder of checkpoints, one of which cannot be opened, and of a file that is none."""
    place = tmp_path / "runs"
    (place / "below").mkdir(parents=True)
    for file in (FINE, CUT):
        shutil.copy(file, place / file.name)
    for number in range(6):
        shutil.copy(FINE, place / "below" / f"{number}.pth")
    (place / "README.md").write_text("# About these models\n")
    return place


@pytest.mark.parametrize("path", ALL[::9], ids=lambda path: path.name)
def test_a_row_says_what_inspect_and_check_say(path: Path) -> None:
    found = row(path, check=True)
    validated(json.loads(json.dumps(found)), "scan")
    counts = Counter(one.code for one in check(path).findings)
    said = json.loads(invoke(["inspect", "--json", path]).stdout)

    assert found["findings"] == counts
    if "error" in said:
        assert found["error"]["kind"] == said["error"]["kind"]  # type: ignore[index]
        return
    assert (found["format"], found["form"]) == (said["format"], said["form"])
    assert found["tensors"] == said["summary"]["tensors"] == len(said["tensors"])
    assert (found["parameters"], found["numel"]) == (said["summary"]["parameters"], said["summary"]["numel"])
    assert found["parameters"] == next((one["numel"] for one in said["state_dicts"] if one["is_weights"]), None)
    assert found["dtypes"] == said["summary"]["dtypes"]
    glanced = row(path)["findings"]
    assert Counter(one["code"] for one in said["findings"]) <= Counter(glanced) <= counts
    weights = [one for one in said["state_dicts"] if one["is_weights"]]
    assert (found["weights_nbytes"] is not None) == bool(weights)
    for one in said["state_dicts"]:
        assert one["role"] in found["roles"]  # type: ignore[operator]


def test_every_checkpoint_below_has_one_line_and_the_sum_is_said(folder: Path) -> None:
    listed = f"{folder}/below\n{folder}/gone.pth\n".encode()
    result = scan(folder, "-", code=2, given=listed)

    found = rows(result.stdout)
    paths = [FINE.name, CUT.name, *(f"below/{number}.pth" for number in range(6)), "gone.pth"]
    assert sorted(found) == sorted(str(folder / one) for one in paths)
    assert {one["error"]["kind"] for one in found.values() if one["error"]} == {"lfs-pointer", "missing"}
    assert "8 checkpoints" in result.stderr
    assert "7 fine, 1 not opened" in result.stderr
    assert "not here     1 pointer" in result.stderr
    assert "passed over  1 file of other kinds" in result.stderr


@pytest.mark.parametrize("gate", [[], ["--fail-on", "system"]])
def test_a_file_that_was_not_fetched_is_counted_as_not_here(gate: list[str]) -> None:
    found = json.loads(invoke(["scan", CUT, "--jobs", "1", "--summary", "--json", *gate]).stdout)
    assert (found["not_here"], found["checkpoints"], found["severities"]) == (1, 0, {})


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_may_be_in_an_encoding_that_its_first_bytes_tell(encoding: str, folder: Path) -> None:
    odd = folder / "モデル.pth"
    shutil.copy(FINE, odd)
    listed = f"{odd}\r\n\r\n{folder / 'below' / '1.pth'}\r\n".encode(encoding)

    assert set(rows(scan("-", given=listed).stdout)) == {str(odd), str(folder / "below" / "1.pth")}


def test_a_row_for_each_tensor_joins_the_row_of_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    output, listed = tmp_path / "rows.jsonl", tmp_path / "tensors.jsonl"
    listed.write_bytes(TENSOR_HEAD + b'"torn')
    adam = folder / "adam.pth"
    state = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, "optimizer": state}, adam)
    scan(folder, "-o", output, "--tensors", listed, code=2)
    tensors = [validated(json.loads(line), "tensors") for line in listed.read_text().splitlines()]
    whole = {(one["path"], one["scanned_ns"]): one for one in map(json.loads, output.read_text().splitlines())}

    assert {key: row["tensors"] for key, row in whole.items() if row["tensors"]} == Counter(
        (one["path"], one["scanned_ns"]) for one in tensors
    )
    (found,) = [one for one in tensors if one["name"] == "model.w"]
    assert (found["path"], found["role"], found["dtype"], found["device"]) == (str(adam), "model", "bfloat16", "cpu")
    assert (found["shape"], found["numel"], found["nbytes"], found["layout"]) == ([2, 3], 6, 12, "strided")
    assert {one["role"] for one in tensors if one["path"] == str(adam)} == {"model", "optimizer"}
    before = listed.read_bytes()
    scan(folder, "-o", output, "--tensors", listed, code=2)
    assert listed.read_bytes() == before


DIES = (
    "import os\nfrom ckptool.checking import scan as w\nrow = w.row\n"
    "w.row = lambda path, *a, **k: os.kill(os.getpid(), 9) if path.endswith({!r}) else row(path, *a, **k)\n"
)


def test_a_worker_that_dies_costs_the_file_that_it_is_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = rows(scan(folder / "below").stdout)
    output = folder.parent / "rows.jsonl"
    with monkeypatch.context() as deadly:
        do_first(DIES.format("3.pth"), folder.parent / "first", deadly)
        result = scan(folder / "below", "-o", output, code=2)
    found = rows(output.read_text())

    lost = str(folder / "below" / "3.pth")
    assert found.pop(lost)["error"] == {
        "kind": "worker-ended", "type": None, "message": "the process that worked at it was ended by signal 9, Killed"
    }  # fmt: skip
    assert unbroken.pop(lost)["error"] is None
    assert found == unbroken
    assert "5 fine, 1 not opened" in result.stderr
    scan(folder / "below", "-o", output)
    assert [json.loads(line)["path"] for line in output.read_text().splitlines()].count(lost) == 2


@pytest.mark.parametrize("room", [0, 1])
def test_where_the_system_starts_no_more_processes_those_that_are_there_do_all(
    room: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, start = [None] * room, multiprocessing.context.SpawnProcess.start

    def start_or_not(process: Any) -> None:
        if not left:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left.pop()
        start(process)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", start_or_not)
    result = run("scan", "--jobs", 3, folder / "below", code=0 if room else 2)

    assert len(rows(result.stdout)) == 6 * room
    assert ("Error: worker processes do not start: resource temporarily unavailable\n" in result.stderr) is (not room)


def test_processes_that_cannot_begin_are_one_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do_first("import os; os._exit(3)", folder.parent / "first", monkeypatch)

    said = scan(folder, code=2).stderr
    assert said == "Error: worker processes do not start: the last one ended with exit code 3\n"


@pytest.mark.parametrize("after", range(1, 1 + times(1, 3)))
def test_a_killed_run_goes_on_where_it_was(after: int, folder: Path) -> None:
    (folder / "more").mkdir()
    for number in range(30):  # rows are taken several at a time
        shutil.copy(FINE, folder / "more" / f"{number}.pth")
    unbroken = rows(scan(folder, code=2).stdout)
    output = folder.parent / "rows.jsonl"
    command = [sys.executable, "-m", "ckptool", "scan", str(folder), "--jobs", "1", "-o", str(output)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not output.exists() or output.read_bytes().count(b"\n") < after:
            time.sleep(0.001)
            assert process.poll() is None
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert process.returncode == -signal.SIGKILL
    while any(Path(f"/proc/{one}/cmdline").exists() and Path(f"/proc/{one}/cmdline").read_bytes() for one in workers):
        time.sleep(0.001)  # they end by themselves
    begun = output.read_bytes()
    output.write_bytes(begun[: -1 - 40 * after])  # a line that was torn

    result = scan(folder, "-o", output, code=2)

    assert rows(output.read_text()) == unbroken
    assert output.read_bytes().startswith(begun[: begun[: -1 - 40 * after].rfind(b"\n") + 1])
    known = begun[: -1 - 40 * after].count(b"\n")
    assert (f"skipped      {known} checkpoint" in result.stderr) == bool(known)


def test_what_has_changed_or_was_not_asked_for_is_looked_at_again(folder: Path) -> None:
    output = folder.parent / "rows.jsonl"
    scan(folder / "below", "-o", output)
    first = output.read_text()
    scan(folder / "below", "-o", output)
    assert output.read_text() == first

    (folder / "below" / "2.pth").write_bytes(FINE.read_bytes() + b"\0")
    scan(folder / "below", "-o", output)
    changed = output.read_text()[len(first) :]
    assert [path.rpartition("/")[2] for path in rows(changed)] == ["2.pth"]

    scan(folder / "below", "--digest", "-o", output)
    asked = rows(output.read_text()[len(first) + len(changed) :])
    assert len(asked) == 6
    assert len({one["digest"] for one in asked.values()}) == 1
    scan(folder / "below", "-o", output)
    assert output.read_text().count("\n") == 6 + 1 + 6


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_lies_in_the_folder_of_a_checkpoint_is_found_also_by_the_next_run(is_whole: bool, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "rows.jsonl"
    migrate(FINE, run, form="dcp")
    (run / "older" / "first").mkdir(parents=True)
    shutil.copy(FINE, run / "export.pth")
    shutil.copy(FINE, run / "older" / "first" / "0.pth")
    if not is_whole:
        (run / ".metadata").unlink()
    paths = [str(run), str(run / "export.pth"), str(run / "older" / "first" / "0.pth")]

    scan(run, "-o", output, code=0 if is_whole else 2)
    first, *others = output.read_bytes().splitlines(keepends=True)
    assert json.loads(first)["path"] == str(run)
    output.write_bytes(first + others[0][:-1])
    result = scan(run, "-o", output, code=0 if is_whole else 2)

    assert list(rows(output.read_text())) == paths
    assert "skipped      1 checkpoint that" in result.stderr
    assert [bool(one["error"]) for one in rows(output.read_text()).values()] == [not is_whole, False, False]


@pytest.mark.parametrize(
    "content",
    [b"PK\3\4 a checkpoint", b"{}\n", b'{"schema": "ckptool.scan/1"}', b'{"schema": "ckptool.scan/1", "path": 1}\n'],
)
def test_nothing_is_appended_to_a_file_of_something_else(content: bytes, tmp_path: Path) -> None:
    output = tmp_path / "model.pth"
    output.write_bytes(content)

    said = scan(FINE, "-o", output, code=2).stderr

    assert "line 1 is n" in said
    assert output.read_bytes() == content


@exhaustive
@pytest.mark.corpus
@pytest.mark.parametrize("corpus", CORPORA, ids=lambda path: path.name)
def test_the_real_ones(corpus: Path) -> None:
    if not corpus.is_dir():
        pytest.skip(f"there is no {corpus}")
    result = invoke(["scan", str(corpus)])
    found = rows(result.stdout)

    assert len(found) > 50
    assert not [one for one in found.values() if one["error"] and one["error"]["type"] is None]
    assert {one.path for one in targets([str(corpus)], recursive=True) if one.is_meant} <= found.keys()


VERSIONS = {
    "text": ("2.4.0", "2.4.0"),
    "a number": (3, "3"),
    "one too large to tell": (10**1000, None),
    "infinity": (float("inf"), None),
    "no number": (True, None),
}


@pytest.mark.parametrize(("version", "known"), VERSIONS.values(), ids=VERSIONS)
def test_whatever_stands_for_a_version_the_row_is_there(version: object, known: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"fairseq_version": version, "model": {"w": torch.ones(2)}}, path)

    made = row(path)

    assert made["error"] is None
    assert made["writer"] == (known and {"name": "fairseq", "version": known})
