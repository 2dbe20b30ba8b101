"""How the command line ends, as a real process: interrupted, without a place to write to, and met by a bug."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.missing import on_windows
from tests.program import invoke
from tests.scale import in_turn

FIXTURE = str(Path(__file__).parents[2] / "fixtures" / "valid" / "state-dict-plain-cpu-zip.pth")
CKPTOOL = [sys.executable, "-m", "ckptool"]
POSIX = on_windows("it has no POSIX shell")


def run(command: list[str], **options: str) -> tuple[int, str]:
    """Run a command, and return its exit code and what it wrote to stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "CKPTOOL_TRACEBACK"} | options
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        preexec_fn=None if sys.platform == "win32" else heed_interrupts,
    )
    return done.returncode, done.stderr


def heed_interrupts() -> None:
    """Undo what shells do to commands in the background, which then ignore Ctrl-C; the tests may be such a command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def broken(statement: str, *arguments: str) -> list[str]:
    """Return a command that runs the command line after a statement."""
    code = f"import sys; sys.argv = {['ckptool', *arguments]!r}; {statement}; from ckptool.__main__ import main; main()"
    return [sys.executable, "-c", code]


@POSIX
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line_and_2() -> None:
    shell = f"{sys.executable} -m ckptool inspect '{FIXTURE}' > /dev/full"

    assert run(["sh", "-c", shell]) == (2, "Error: the output cannot be written: no space left on device\n")


def redirected(words: str, *streams: str) -> list[str]:
    """Return a command whose ``streams`` are closed (``>&-``) or full (``>/dev/full``)."""
    if sys.platform != "win32":
        return ["sh", "-c", f"{shlex.join(CKPTOOL)} {words} {' '.join(streams)}"]
    # There Python has none where none is given to it; and what nobody reads is full.
    full = "import os; read, write = os.pipe(); os.close(read)"
    for stream in streams:
        name = {"<": "stdin", ">": "stdout", "2": "stderr"}[stream[0]]
        full += f"; sys.{name} = None" if stream.endswith("&-") else f"; os.dup2(write, sys.{name}.fileno())"
    return broken(full, *shlex.split(words))


def test_a_closed_output_is_one_line_and_2() -> None:
    inspect = f"inspect {shlex.quote(FIXTURE)}"

    assert run(redirected(inspect, ">&-")) == (2, "Error: standard output is closed\n")
    assert run(redirected(inspect, "2>&-")) == (0, "")
    assert run(redirected("check --explain -", "<&-")) == (2, "Error: standard input is closed\n")


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS: it has no /dev/full")
@pytest.mark.parametrize(
    ("words", "streams"),
    [
        ("inspect absent.pth", ("2>/dev/full",)),
        ("inspect absent.pth", (">&-", "2>&-")),
        ("inspect --no-option", ("2>&-",)),
        ("inspect --no-option", (">/dev/full", "2>/dev/full")),
    ],
)
def test_what_nobody_hears_does_not_change_the_exit_code(words: str, streams: tuple[str, ...]) -> None:
    assert run(redirected(words, *streams)) == (2, "")


@pytest.mark.parametrize(
    "arguments",
    [["scan", "--help"], ["scan", FIXTURE], ["inspect", "--json", FIXTURE]],
)
def test_an_output_that_nobody_reads_ends_it_as_other_tools_end(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*CKPTOOL, *arguments], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)

    ended = -signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 2
    assert (done.returncode, done.stderr) == (ended, b"")


@POSIX
def test_an_interrupt_is_130_and_no_traceback() -> None:
    with subprocess.Popen(
        [*CKPTOOL, "check", "--explain", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=heed_interrupts,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"x" * 300_000)  # more than a pipe holds: it reads
        for _ in range(300):
            process.send_signal(signal.SIGINT)  # one that comes just before a system call waits for the next
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
                break
        assert process.poll() == 130
        assert process.stderr.read() == b""


@pytest.mark.parametrize("module", ["click", "ckptool.formats"])
def test_an_interrupt_while_modules_are_imported_is_130_and_no_traceback(module: str) -> None:
    finder = (
        "sys.meta_path.insert(0, type('Interrupted', (), {'find_spec': staticmethod("
        f"lambda name, *_: signal.raise_signal(signal.SIGINT) if name == {module!r} else None)}}))"
    )

    assert run(broken(f"import signal; {finder}", "inspect", FIXTURE)) == (130, "")


@pytest.mark.parametrize("error", ["ImportError(1)", "errors.CkptoolError('no')", "MemoryError()", "OSError(5, 'io')"])
def test_an_interrupt_that_a_package_makes_another_error_of_is_still_130(error: str) -> None:
    swallow = (
        "def opened(path):\\n try: signal.raise_signal(2)\\n except KeyboardInterrupt: pass\\n"
        f" import ckptool.errors as errors\\n raise {error}"
    )
    patch = "import ckptool.torch_ops.devices as seen; seen.devices = opened"

    assert run(broken(f'import signal; exec("{swallow}"); {patch}', "devices")) == (130, "")


def test_what_was_not_foreseen_is_one_line_that_asks_for_a_report() -> None:
    command = broken("import ckptool.cli.inspect as verb; verb.open_checkpoint = lambda path: 1 / 0", "inspect", "x")
    line = "Error: unforeseen: ZeroDivisionError: division by zero; report it with the output of CKPTOOL_TRACEBACK=1\n"

    assert run(command) == (2, line)
    code, shown = run(command, CKPTOOL_TRACEBACK="1")
    assert code == 2
    assert shown.startswith("Traceback")
    assert shown.endswith(line)


def test_too_little_memory_is_one_line() -> None:
    command = broken(
        "import ckptool.cli.inspect as verb; verb.open_checkpoint = lambda path: [0] * (1 << 60)", "inspect", "x"
    )

    assert run(command) == (2, "Error: there is not enough memory\n")


@pytest.mark.parametrize("arguments", [["check", "--values", FIXTURE], ["devices"]])
def test_too_little_memory_to_import_torch_is_said_in_two_lines(arguments: list[str]) -> None:
    pytest.importorskip("torch")
    if sys.platform == "win32":
        pytest.skip("Windows: it has no limits on memory for a process")
    code, shown = run(["sh", "-c", f"ulimit -v 300000; exec {shlex.join([*CKPTOOL, *arguments])}"])

    assert code == 2
    assert shown.startswith("Error: torch is installed, but cannot be imported: ")
    assert shown.count("\n") == 2


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "folder"

    code, shown = run([*CKPTOOL, "migrate", FIXTURE, "--out-dir", str(target)])
    assert (code, shown.count("\n")) == (2, 1)
    assert shown.startswith(f"Error: {tmp_path / 'file'}")
    assert shown.endswith((": not a directory\n", ": file exists\n"))


def test_rules_that_are_no_text_are_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "rules").write_bytes(b"\xff=x")
    code, shown = run([*CKPTOOL, "migrate", FIXTURE, "--rename-file", str(tmp_path / "rules"), "--dry-run"])

    assert code == 2
    assert "Invalid value for --rename-file: not a text file" in shown


def test_bad_usage_is_still_2_and_help_0() -> None:
    code, shown = run([*CKPTOOL, "inspect", "--no-such-option"])
    assert code == 2
    assert "No such option" in shown
    assert run([*CKPTOOL, "--help"]) == (0, "")


def coded(encoding: str, *words: str) -> tuple[str, str]:
    """Return what a verb prints in an encoding, and what it prints where that has everything."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([*CKPTOOL, *words], capture_output=True, env=environment, check=False)
    plain = invoke(words)
    assert (done.returncode, done.stderr) == (plain.exit_code, b"")
    return done.stdout.decode(encoding), plain.stdout


@pytest.mark.parametrize(
    ("words", "encoding"),
    in_turn(["inspect", "check", "migrate --dry-run", f"diff {FIXTURE}"], ["cp1252", "cp437", "cp932"]),
)
def test_what_an_encoding_does_not_have_is_printed_as_escapes(words: str, encoding: str, tmp_path: Path) -> None:
    odd = tmp_path / "モデル-→-ø.pth"
    shutil.copy(FIXTURE, odd)
    shown, plain = coded(encoding, *words.split(), str(odd), *(["x.pth"] if "migrate" in words else []))
    assert ("モデル" if encoding == "cp932" else r"\u30e2\u30c7\u30eb") in shown
    assert len(shown.splitlines()) == len(plain.splitlines())


def test_a_histogram_is_digits_where_there_are_no_blocks() -> None:
    pytest.importorskip("numpy")
    shown, plain = coded("cp437", "stat", FIXTURE)
    assert plain.translate(dict(zip(map(ord, "▁▂▃▄▅▆▇█"), "12345678", strict=True))) == shown
    assert plain != shown
