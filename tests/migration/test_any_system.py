"""What is written on any system: files and folders that are open are replaced, and what killed processes left goes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from ckptool import migrate, open_checkpoint, system
from ckptool.cli.pool import Lost, Processes, Tell
from tests.migration.test_outputs import dead_pid, names_in
from tests.program import VALID, invoke, run

FIXTURE = VALID / "checkpoint-compiled-forged-cuda0-legacy.pth"
FORMS = {"out.pth": "same", "out.safetensors": "safetensors", "shards": "safetensors", "dcp": "dcp"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copy(FIXTURE, tmp_path / "source.pth"))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_written_and_replaced(name: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / name
    more = ["--max-shard-size", "4KB"] if name == "shards" else []
    words = ["migrate", source, target, "--to", "cpu", "--form", FORMS[name], *more]
    run(*words)
    once = {one: one.read_bytes() for one in target.rglob("*")} if target.is_dir() else target.read_bytes()
    assert "exists already" in run(*words, code=2).stderr
    run(*words, "--force")

    assert names_in(tmp_path) == {"source.pth", name}
    assert once == ({one: one.read_bytes() for one in target.rglob("*")} if target.is_dir() else target.read_bytes())
    run("inspect", target)


def test_a_file_that_is_open_is_replaced_and_its_readers_keep_it(source: Path, tmp_path: Path) -> None:
    old = source.read_bytes()
    with open_checkpoint(source) as opened:
        before = opened.tensors["model._orig_mod.norm.weight"].read()
        migrate(source, source, to="cpu", force=True)
        assert opened.tensors["model._orig_mod.norm.weight"].read() == before

    assert source.read_bytes() != old
    assert names_in(tmp_path) == {"source.pth"}


@pytest.mark.skipif(sys.platform != "win32", reason="elsewhere nothing keeps others from reading")
def test_a_file_that_another_program_lets_nobody_read_is_said_to_be_open(source: Path) -> None:
    import _winapi

    held = _winapi.CreateFile(str(source), _winapi.GENERIC_READ, 0, 0, _winapi.OPEN_EXISTING, 0, 0)
    try:
        said = run("inspect", source, code=2).stderr
    finally:
        _winapi.CloseHandle(held)

    assert "another program has it open" in said
    assert "Make it readable" not in said


@pytest.mark.skipif(sys.platform != "win32", reason="elsewhere they are names as any others")
@pytest.mark.parametrize("name", ["out:1.safetensors", "con.pth", "NUL", "aux.safetensors", "C:com1.pth"])
def test_a_name_that_would_be_no_file_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    said = run("migrate", source, name if ":c" in name else tmp_path / name, code=2).stderr

    assert "Windows takes the name for a device, or for a stream of another file" in said
    assert names_in(tmp_path) == {"source.pth"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_editors_and_shells_write_is_read_in_any_of_their_encodings(
    encoding: str, source: Path, tmp_path: Path
) -> None:
    baseline, policy, names = (tmp_path / one for one in ("baseline.json", "policy.toml", "names.txt"))
    written = run("check", source, "--json", "--digest", code=1).stdout
    baseline.write_bytes(written.replace("\n", "\r\n").encode(encoding))
    policy.write_bytes("# Größe\r\nignore = ['CK202']\r\n".encode(encoding))
    names.write_bytes("# Größe\r\nmodel=größer\r\n".encode(encoding))

    run("check", source, "--baseline", baseline)
    assert "CK202" in run("check", source, "--policy", policy).stdout
    run("migrate", source, tmp_path / "out.safetensors", "--rename-file", names, "--allow-unmatched")


@pytest.mark.skipif(sys.platform != "win32", reason="names are bytes elsewhere")
@pytest.mark.parametrize("code_page", ["oem", "mbcs"])
def test_a_list_that_dir_printed_names_its_files(code_page: str, source: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copy(source, tmp_path / "Größe é.pth"))
    listed = tmp_path / "list.txt"
    listed.write_bytes(f"{odd}\r\n".encode(code_page))

    assert json.loads(run("scan", "--from", listed).stdout)["path"] == str(odd)


@pytest.mark.skipif(sys.platform != "win32", reason="elsewhere it is replaced")
def test_a_file_that_another_program_keeps_for_itself_is_said_and_stays(source: Path, tmp_path: Path) -> None:
    target = Path(shutil.copy(source, tmp_path / "out.pth"))
    with target.open("rb"):  # which shares no deletion
        said = run("migrate", source, target, "--to", "cpu", "--force", code=2).stderr

    assert "another program has it open" in said
    assert target.read_bytes() == source.read_bytes()
    assert names_in(tmp_path) == {"source.pth", "out.pth"}


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(source: Path, tmp_path: Path) -> None:
    left, live, aside = (
        tmp_path / f".{name}.ckptool-{pid}-00c0ffee{end}"
        for name, pid, end in (
            ("out.pth", dead_pid(), ".part"),
            ("out.pth", os.getpid(), ".part"),
            ("old.pth", dead_pid(), ".old"),
        )
    )
    for one in (left, live, aside):
        shutil.copy(source, one)
    folder = tmp_path / f".folder.ckptool-{dead_pid()}-00c0ffee.part"
    folder.mkdir()
    shutil.copy(source, folder / "__0_0.distcp")
    assert system.is_alive(os.getpid())
    run("migrate", source, tmp_path / "out.pth", "--to", "cpu")
    run("migrate", source, tmp_path / "folder", "--form", "dcp")
    assert "exists already" in run("migrate", source, tmp_path / "old.pth", "--to", "cpu", code=2).stderr

    assert names_in(tmp_path) == {"source.pth", "out.pth", "folder", live.name, "old.pth"}
    assert (tmp_path / "old.pth").read_bytes() == source.read_bytes()


def test_a_lock_is_seen_by_others_and_keeps_nobody_from_reading(tmp_path: Path) -> None:
    path = tmp_path / "part"
    fd = system.open_new(str(path), 0o666)
    try:
        os.write(fd, b"text")
        assert system.lock(fd) is True
        asks = "import sys; from ckptool import system; print(system.lock(system.open_writing(sys.argv[1])))"
        done = subprocess.run([sys.executable, "-c", asks, str(path)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"
        reading = system.open_reading(str(path))
        assert system.read_at(reading, 10, 0) == b"text"
        os.close(reading)
    finally:
        os.close(fd)


def test_rows_are_appended_and_a_torn_one_is_taken_back(source: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    run("scan", "--jobs", 1, "-o", rows, source)
    one = rows.read_bytes()
    rows.write_bytes(one + one[:100])
    shutil.copy(source, tmp_path / "other.pth")
    run("scan", "--jobs", 2, "-o", rows, source, tmp_path / "other.pth")

    found = [json.loads(line)["path"] for line in rows.read_bytes().splitlines()]
    assert found == [str(source), str(tmp_path / "other.pth")]
    assert rows.read_bytes().startswith(one)


def end_at_three(items: Sequence[str], tell: Tell) -> None:
    for number, item in enumerate(items):
        if item == "3":
            os._exit(7)
        tell(number, item)


def test_a_process_that_ends_costs_what_it_is_at_and_nothing_else() -> None:
    with Processes(2) as pool:
        found = dict(one for some in pool.answers(end_at_three, partial(next, iter("012345"), None)) for one in some)

    assert found.pop("3") == Lost("worker-ended", "the process that worked at it ended with exit code 7")
    assert found == {item: item for item in "01245"}


def test_several_processes_write_what_one_does(source: Path, tmp_path: Path) -> None:
    for jobs in (1, 2):
        run("migrate", source, tmp_path / f"by-{jobs}", "--max-shard-size", "4KB", "--jobs", jobs)

    by_one, by_two = ({one.name: one.read_bytes() for one in (tmp_path / f"by-{jobs}").iterdir()} for jobs in (1, 2))
    assert by_one == by_two


def test_no_more_processes_are_asked_for_than_can_be_waited_for() -> None:
    with Processes(1000) as pool:
        assert pool.workers == (61 if sys.platform == "win32" else 1000)
    assert not multiprocessing.active_children()


WORDS = [
    "plain.pth", "a b.pth", "an example's.pth", "a&b.pth", "(1).pth", "a;b", "a,b", "a=b", "", "~", "a\\b", "a b\\",
    'say "no"', "a^b", "@x", "#1", "ü.pth",
]  # fmt: skip


def test_a_command_that_is_printed_gives_the_shell_its_words() -> None:
    prints = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    line = f"{subprocess.list2cmdline(prints) if os.name == 'nt' else system.command_line(*prints)} "
    done = subprocess.run(line + system.command_line(*WORDS), shell=True, capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == WORDS


def test_an_edit_in_place_is_done_or_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    old = source.read_bytes()
    result = invoke(["migrate", source, "--in-place", "--to", "cpu"])

    assert (result.exit_code, source.read_bytes() == old) == ((0, False) if system.CAN_EDIT else (1, True))
    assert system.CAN_EDIT or "files are not edited in place on Windows\nHint: Write a copy" in result.stderr
    assert names_in(tmp_path) == {"source.pth"}


def test_without_a_journal_there_is_nothing_to_undo_whatever_the_system(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for can_edit in (system.CAN_EDIT, False):
        monkeypatch.setattr(system, "CAN_EDIT", can_edit)
        said = run("recover", source, code=2).stderr
        assert said == f"Error: {source}: it has no journal: no edit in place of it was cut off\n"
        assert "no such file" in run("recover", tmp_path / "absent.pth", code=2).stderr

    (tmp_path / ".source.pth.ckptool-undo").touch()  # as one that was begun elsewhere
    assert "Recover it on Linux or macOS, where it was edited." in run("recover", source, code=1).stderr


@pytest.mark.skipif(sys.platform != "win32", reason="names are free")
def test_a_name_that_windows_does_not_have_is_an_error(source: Path, tmp_path: Path) -> None:
    said = run("migrate", source, tmp_path / "a?.pth", "--to", "cpu", code=2).stderr

    assert said.endswith("a?.pth: cannot be written: Windows has no such names\n")
    assert names_in(tmp_path) == {"source.pth"}
