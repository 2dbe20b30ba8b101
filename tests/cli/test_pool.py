"""A pool of processes: each item is answered, whoever dies, and nothing is left when it is closed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli.pool import Processes, Tell
from ckptool.errors import CkptoolError, SourceChanged
from tests.cli.test_process import heed_interrupts
from tests.workers import ROOT, do_first

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


def double(items: Sequence[int], tell: Tell) -> None:
    for number, item in enumerate(items):
        tell(number, f"about {item}", more=True)
        tell(number, 2 * item)


def fail(items: Sequence[str], tell: Tell) -> None:
    for item in items:
        if item == "ours":
            raise SourceChanged("it was changed", path="a.pth", hint="Read it again.")
        if item == "memory":
            raise MemoryError
        raise KeyError(item)


def facts_of_process(items: Sequence[str], tell: Tell) -> None:
    open_files = [os.path.realpath(f"/proc/self/fd/{number}") for number in range(256)]
    tell(0, (os.getpid(), os.environ.get("OMP_NUM_THREADS"), open_files))
    del items


def sleep(items: Sequence[float], tell: Tell) -> None:
    tell(0, os.getpid(), more=True)
    time.sleep(items[0])
    tell(0, None)


def answers(work: Callable[..., None], items: Sequence[Any], count: int = 2, **options: Any) -> list[Any]:
    with Processes(count) as pool:
        return list(each(pool, work, items, **options))


def each(pool: Processes, work: Any, items: Sequence[Any], **options: Any) -> Iterator[Any]:
    with closing(pool.answers(work, partial(next, iter(items), None), **options)) as found:
        for some in found:
            yield from some


def test_each_item_is_answered_in_full() -> None:
    found = answers(double, range(100), most=32)

    assert sorted(item for item, _ in found) == sorted([*range(100)] * 2)
    for item in range(100):
        assert [answer for one, answer in found if one == item] == [f"about {item}", 2 * item]


def test_one_that_ends_while_it_has_nothing_to_do_costs_nothing() -> None:
    with Processes(1) as pool:
        ((_, (process, _, _)),) = each(pool, facts_of_process, ["one"])
        os.kill(process, signal.SIGKILL)
        assert dict(each(pool, double, [4]))[4] == 8


@pytest.mark.parametrize(
    ("item", "kind", "text"),
    [
        ("ours", "source-changed", "it was changed"),
        ("memory", "out-of-memory", "there is not enough memory"),
        ("other", "unforeseen", "KeyError: 'other'"),
    ],
)
def test_what_work_raises_is_raised(item: str, kind: str, text: str) -> None:
    with pytest.raises(CkptoolError) as raised:
        answers(fail, [item])

    assert (raised.value.kind, raised.value.message) == (kind, text)
    if item == "ours":
        assert (type(raised.value), raised.value.path, raised.value.hint) == (SourceChanged, "a.pth", "Read it again.")


def test_processes_have_their_share_of_the_processors_and_nothing_of_ours_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("ckptool.cli.pool.processors", lambda: 8)
    with (tmp_path / "ours").open("w") as stream:
        os.set_inheritable(stream.fileno(), True)
        ((_, (_, threads, open_files)),) = answers(facts_of_process, ["x"], count=3)

    assert threads == "2"
    assert str(tmp_path / "ours") not in open_files


def test_processes_that_cannot_begin_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do_first("import os; os._exit(3)", tmp_path / "first", monkeypatch)
    with pytest.raises(CkptoolError, match="worker processes do not start: the last one ended with exit code 3"):
        answers(double, range(4))


@pytest.mark.parametrize("room", [0, 1])
def test_where_the_system_starts_no_more_those_that_are_there_do_all(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import multiprocessing.context

    left, start = [None] * room, multiprocessing.context.SpawnProcess.start

    def start_or_not(process: Any) -> None:
        if not left:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left.pop()
        start(process)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", start_or_not)
    if room:
        assert len(answers(double, range(9), count=3)) == 18
    else:
        with pytest.raises(CkptoolError, match="worker processes do not start: resource temporarily unavailable"):
            answers(double, range(9), count=3)


def test_when_nobody_takes_answers_any_more_no_process_is_left() -> None:
    with Processes(2) as pool:
        found = pool.answers(sleep, partial(next, iter([100.0, 100.0]), None))
        processes: list[int] = []
        while len(processes) < 2:
            processes += [answer for _, answer in next(found)]
        found.close()
        assert not any(is_alive(one) for one in processes)


PARENT = """
import os, sys
from functools import partial
from ckptool.cli.pool import Processes
from tests.cli.test_pool import sleep
if __name__ == "__main__":
    with Processes(2) as pool:
        for some in pool.answers(sleep, partial(next, iter([100.0, 100.0]), None)):
            for _, answer in some:
                print(answer, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_they_work_for(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT.replace("100.0", "3.0"))
    command = [sys.executable, str(tmp_path / "parent.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        workers = [int(process.stdout.readline()) for _ in range(2)]
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # what a terminal does
        else:
            process.kill()
        process.wait()
        said = process.stderr.read()

    until = time.monotonic() + 60
    while any(is_alive(one) for one in workers):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert said.count("KeyboardInterrupt") == (how == signal.SIGINT)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
