"""
A pool of processes: what their work raises, and what they have of this process.

That each item is answered, whoever dies, and that nothing is left, is asked of ``scan`` and ``migrate``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli.pool import Processes, Tell
from ckptool.errors import CkptoolError, SourceChanged


def fail(items: Sequence[str], tell: Tell) -> None:
    for item in items:
        if item == "ours":
            raise SourceChanged("it was changed", path="a.pth", hint="Read it again.")
        raise MemoryError if item == "memory" else KeyError(item)


def facts_of_process(items: Sequence[str], tell: Tell) -> None:
    has_names = Path("/proc/self/fd").is_dir()
    open_files = [os.path.realpath(f"/proc/self/fd/{number}") for number in range(256)] if has_names else []
    tell(0, (os.getpid(), os.environ.get("OMP_NUM_THREADS"), open_files))
    del items


def answer(work: Callable[..., None], item: str, pool: Processes) -> Any:
    ((_, found),) = (one for some in pool.answers(work, partial(next, iter([item]), None)) for one in some)
    return found


def test_one_that_ends_while_it_has_nothing_to_do_costs_nothing() -> None:
    with Processes(1) as pool:
        process, _, _ = answer(facts_of_process, "one", pool)
        os.kill(process, signal.SIGTERM)  # on Windows, which has no signals, it is ended at once
        assert answer(facts_of_process, "two", pool)[0] != process


@pytest.mark.parametrize(
    ("item", "kind", "text"),
    [
        ("ours", "source-changed", "it was changed"),
        ("memory", "out-of-memory", "there is not enough memory"),
        ("other", "unforeseen", "KeyError: 'other'"),
    ],
)
def test_what_work_raises_is_raised(item: str, kind: str, text: str) -> None:
    with pytest.raises(CkptoolError) as raised, Processes(2) as pool:
        answer(fail, item, pool)

    assert (raised.value.kind, raised.value.message) == (kind, text)
    if item == "ours":
        assert (type(raised.value), raised.value.path, raised.value.hint) == (SourceChanged, "a.pth", "Read it again.")


def test_processes_have_their_share_of_the_processors_and_nothing_of_ours_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("ckptool.cli.pool.processors", lambda: 8)
    with Processes(3) as pool:
        with (tmp_path / "ours").open("w") as stream:
            os.set_inheritable(stream.fileno(), True)
            _, threads, open_files = answer(facts_of_process, "x", pool)
        (tmp_path / "ours").unlink()  # Windows removes none that another process has

    assert threads == "2"
    assert str(tmp_path / "ours") not in open_files
