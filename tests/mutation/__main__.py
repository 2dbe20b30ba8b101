"""
``python -m tests.mutation [MODULE …]``: each bounds check of the reader and the writers made wrong, one at a time.

A mutant is killed by a test that fails, or takes too long. The tests run once first, to learn which of them reach which
line; then, for each mutant, those that reach its line, the quick ones first, in a fork that holds the mutant's code.
Prints what survived, and exits 1 if less than 90 in 100 of a module's mutants are killed.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Mutant, mutants

ROOT = Path(__file__).parents[2]
MODULES = (
    "archives/archive",
    "archives/compressed",
    "archives/tars",
    "archives/zip_directory",
    "archives/zips",
    "checkpoints/contents",
    "formats/directories/dcp/ranks",
    "formats/directories/nanotron",
    "formats/directories/rank_files/parts",
    "formats/packed",
    "formats/plain_pickle",
    "formats/pt2",
    "formats/safetensors",
    "formats/sharded",
    "formats/strict_json",
    "formats/torch_legacy",
    "formats/torch_tar",
    "formats/torch_zip",
    "formats/torchscript",
    "formats/torchscript_json",
    "migration/in_place/run",
    "migration/in_place/zip_edit",
    "migration/output",
    "migration/output/editing",
    "migration/output/opening",
    "migration/output/parts",
    "migration/transfer",
    "migration/zip_writer",
    "pickles/machine",
    "pickles/numpy_values",
    "pickles/opcodes",
    "pickles/reader",
    "sources/checksums",
    "sources/files",
    "sources/journal",
    "sources/pool",
    "sources/siblings",
    "sources/source",
    "tensors/pieces",
    "tensors/reading",
    "tensors/rebuild",
    "tensors/storage_ids",
    "tensors/tensor",
    "tensors/tiling",
)  # fmt: skip
TESTS = (
    "tests/against_torch/test_joblib_files.py", "tests/archives", "tests/bounds", "tests/checkpoints/test_contents.py",
    "tests/formats/test_dcp_index.py", "tests/formats/test_dcp_index_bounds.py", "tests/formats/test_dtensor_parts.py",
    "tests/formats/test_nanotron.py", "tests/formats/test_rank_files.py", "tests/formats/test_packed.py",
    "tests/formats/test_plain_pickle.py",
    "tests/formats/test_pt2.py", "tests/formats/test_safetensors.py", "tests/formats/test_sharded.py",
    "tests/formats/test_torch_legacy.py", "tests/formats/test_torch_tar.py", "tests/formats/test_torch_zip.py",
    "tests/formats/test_torchscript.py", "tests/formats/test_torchscript_json.py",
    "tests/hostile/test_hostile_zips.py", "tests/migration/test_outputs.py", "tests/migration/test_folders.py",
    "tests/migration/test_in_place.py", "tests/migration/test_in_place_bounds.py",
    "tests/migration/test_in_place_crashes.py", "tests/migration/test_output_bounds.py",
    "tests/migration/test_power_loss.py", "tests/remote/test_file_objects.py", "tests/pickles/test_pickles.py",
    "tests/sources", "tests/tensors/test_pieces.py", "tests/tensors/test_rebuild.py", "tests/tensors/test_tensors.py",
)  # fmt: skip
"""The quick ones that look at files in this process."""
QUIET = (
    "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutation", "-W", "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip
BUDGET, OVERHEAD = 8.0, 0.004
"""
Seconds of tests for one mutant, as they take without it, and what pytest adds to each.

All seconds are of the processor: on a busy machine fewer tests would run, and slow ones would count as endless.
"""
SECONDS = 30.0
"""After which a mutant counts as killed: a check that ends a loop can make it endless."""
WAITING = 4
"""So many times longer it may take by the clock: a mutant can also make threads wait for ever."""
GOAL = 0.9

Reach = tuple[dict[str, dict[int, list[str]]], dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="MODULE")
    asked = parser.parse_args()
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        return run(asked.modules)


def path_of(module: str) -> Path:
    """Return the file of a module, or of a package that is itself one."""
    place = ROOT / "ckptool" / module
    return place / "__init__.py" if place.is_dir() else place.with_name(f"{place.name}.py")


def run(modules: list[str]) -> int:
    """Judge all mutants of the modules; return 1 if too many of one survive."""
    import pytest
    from hypothesis import Phase, settings

    settings.register_profile("mutation", deadline=None, derandomize=True, max_examples=50, phases=[Phase.generate])
    with redirect_stdout(io.StringIO()):
        pytest.main([*QUIET, "--collect-only", *TESTS])  # what is imported here, no fork imports again
    for module in modules:
        import_module(f"ckptool.{module.replace('/', '.')}")  # or no mutant is planted in what is imported late
    reached, seconds = _in_fork(lambda: _measure(modules), 3600)
    print(f"{len(seconds):,} tests in {sum(seconds.values()):.0f} s")
    bad = False
    whole: Counter[str] = Counter()
    for module in modules:
        excused = {key[1:] for key in EQUIVALENT if key[0] == module}
        counts: Counter[str] = Counter()
        met: set[tuple[str, str, str]] = set()
        for mutant in mutants(path_of(module).read_text("utf-8")):
            key = (mutant.function, mutant.before, mutant.after)
            verdict = "equivalent" if key in excused else _judge(module, mutant, reached, seconds)
            counts[verdict] += 1
            met.add(key)
            if verdict in ("survived", "unreached"):
                place = f"{path_of(module).relative_to(ROOT)}:{mutant.where} {mutant.function}"
                print(f"  {verdict} {place}: {mutant.before}  ->  {mutant.after}", flush=True)
        bad |= _tell(module, counts) < GOAL
        if excused - met:
            print(f"  said to be equivalent, and not there: {excused - met}")
            bad = True
        whole += counts
    _tell("all", whole)
    return 1 if bad else 0


def _tell(what: str, counts: Counter[str]) -> float:
    """Print what became of some mutants, and return the share that was killed."""
    killed, total = counts["killed"] + counts["timeout"], counts.total() - counts["equivalent"]
    found = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{what}: {killed} of {total} killed ({found})", flush=True)
    return killed / total if total else 1.0


def _judge(module: str, mutant: Mutant, reached: dict[str, Any], seconds: dict[str, float]) -> str:
    reaching = {test for line in mutant.lines for test in reached[module].get(line, ())}
    if not reaching:
        return "unreached"
    try:
        return str(_in_fork(lambda: _verdict(module, mutant, _chosen(module, reaching, seconds)), SECONDS))
    except TimeoutError:
        return "timeout"
    except ChildProcessError:  # a mutant may close what its process reports with
        return "killed"


def _chosen(module: str, tests: set[str], seconds: dict[str, float]) -> list[str]:
    """
    Return some seconds' worth of tests.

    The module's own come first; then of each function one example, then of each another, the quick ones first.
    """
    own = ("tests/bounds/", f"/test_{Path(module).name}.py::")
    turns: dict[str, int] = defaultdict(int)
    ordered: list[tuple[bool, int, float, str]] = []
    for took, test in sorted((seconds.get(test, 0.0), test) for test in tests):
        function = test.partition("[")[0]
        ordered.append((not any(mark in test for mark in own), turns[function], took, test))
        turns[function] += 1
    ordered.sort()
    spent = accumulate(took + OVERHEAD for *_, took, _ in ordered)
    return [test for (*_, test), so_far in zip(ordered, spent, strict=True) if so_far <= BUDGET] or [ordered[0][-1]]


def _verdict(module: str, mutant: Mutant, tests: list[str]) -> str:
    import pytest

    _plant(module, mutant)
    try:
        return "survived" if pytest.main([*QUIET, "-x", *tests]) == pytest.ExitCode.OK else "killed"
    except Exception:  # noqa: BLE001 - what fails when objects are deleted fails in pytest itself
        return "killed"


def _plant(module: str, mutant: Mutant) -> None:
    """Give every function of a module the code that it would have if the mutant were its source."""
    path = str(path_of(module))
    gc.unfreeze()  # what pytest has frozen is not among all objects
    planted = {_place(code): code for code in _codes(compile(mutant.tree, path, "exec"))}
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == path:
            function.__code__ = planted[_place(function.__code__)]


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _measure(modules: list[str]) -> Reach:
    """Run all tests, and return which of them reach each line of the modules, and how long each takes."""
    import coverage
    import pytest

    paths = {module: str(path_of(module)) for module in modules}
    measured = coverage.Coverage(data_file=None, config_file=False, include=list(paths.values()))
    seconds: dict[str, float] = defaultdict(float)

    class Watch:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            measured.switch_context(nodeid)
            seconds[nodeid] -= time.process_time()

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            seconds[nodeid] += time.process_time()

    measured.start()
    code = pytest.main([*QUIET, *TESTS], plugins=[Watch()])
    measured.stop()
    assert code == pytest.ExitCode.OK, "the tests fail without any mutant"
    data = measured.get_data()
    lines = {module: data.contexts_by_lineno(path) for module, path in paths.items()}
    return {
        module: {line: [name for name in names if name] for line, names in found.items()}
        for module, found in lines.items()
    }, dict(seconds)


def _in_fork(work: Callable[[], Any], seconds: float) -> Any:
    """
    Return what a fork makes of this, all output of which is lost.

    Raises:
        TimeoutError: It takes longer than so many seconds of the processor, or far longer by the clock.
        ChildProcessError: It ended without a word.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)  # whoever it starts ends with it; a session of its own would end with a terminal of a test
        signal.setitimer(signal.ITIMER_PROF, seconds)
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(quiet, number)
        try:
            try:
                answer = True, work()
            except Exception:  # noqa: BLE001 - whatever it is, the parent fails with it
                answer = False, traceback.format_exc()
            with os.fdopen(writing, "wb") as stream:
                stream.write(pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(writing)
    told = b""
    end = time.monotonic() + WAITING * seconds
    with os.fdopen(reading, "rb", buffering=0) as stream:
        while select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
            more = stream.read(1 << 20)
            told += more
            if not more:
                break
        else:
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if time.monotonic() >= end or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
        raise TimeoutError
    if not told:
        raise ChildProcessError
    fine, answer = pickle.loads(told)
    if not fine:
        raise RuntimeError(answer)
    return answer


if __name__ == "__main__":
    sys.exit(main())
