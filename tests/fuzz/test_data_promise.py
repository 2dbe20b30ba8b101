"""What is graded ``data`` only makes data: some of ``tests.fuzz.data_promise`` in every run, more with --full."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool.pickles.constructions import BY_NAME, ROWS
from ckptool.pickles.judge import Judge
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource
from tests.build import call, legacy, named, ops, pickled, torch_zip
from tests.fuzz.data_promise import Maker, as_it_was, is_data
from tests.fuzz.trees import read, walk, written
from tests.scale import exhaustive, scaled, times

pytest.importorskip("resource", reason="Windows: it has no limits on memory for a process")
ROOT = Path(__file__).parents[2]
FILES = times(120, 3000)


@pytest.fixture(scope="module")
def maker() -> Maker:
    return Maker()


@scaled
def test_what_is_graded_data_only_makes_data() -> None:
    # In a process of its own, which forks: no thread of the tests' is lost in it.
    command = [sys.executable, "-m", "tests.fuzz.data_promise", "--count", str(FILES)]
    done = subprocess.run([*command, "--seed", "20261126"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 faults of 0 kinds" in done.stdout
    tried = re.search(r"([0-9,]+) of them data, ([0-9,]+) loads", done.stdout)
    assert tried is not None
    assert int(tried[1].replace(",", "")) > FILES / 10
    assert int(tried[2].replace(",", "")) > FILES


FAULTY = {
    "a command": (call(named("os", "system"), "true"), "os.system"),
    "code": (call(named("builtins", "exec"), "1"), "exec "),
    "a file": (call(named("builtins", "open"), "/dev/null"), "open"),
    "a module": (named("antigravity_of_no_one", "x"), "antigravity_of_no_one"),
    "a signal": (call(named("os", "abort")), "ends with SIGABRT"),
    "an end": (call(named("os", "_exit"), 3), "ends with exit 3"),
    "an exit": (call(named("sys", "exit")), "BaseException SystemExit"),
    "a class that changes": (named("argparse", "Namespace") + ops((None, {"touched": 1})) + b"b", "changed argparse"),
    "defaults that change": (
        named("torch._utils", "_rebuild_parameter") + ops((None, {"__defaults__": (7,)})) + b"b",
        "changed torch._utils",
    ),
    "memory": (call(named("builtins", "bytearray"), 1 << 44), "MemoryError"),
    "time": (call(named("fractions", "Fraction"), "1e400000000"), "takes too long"),
    "random numbers": (call(named("torch", "manual_seed"), 7), "changed generator of torch"),
}
CHILD = """
import sys
from pathlib import Path
from tests.fuzz.loaders import Children, File
children = Children(["argparse", "torch._utils", "fractions", "builtins", "os", "sys"], [])
folder = Path(sys.argv[1])
for path in sorted(folder.iterdir()):
    files = [File(b"N.", "pickle"), File(path.read_bytes(), path.suffix[1:]), File(b"K\\1.", "pickle")]
    print(path.stem, sorted({fault.what for fault in children.faults(files)}), sep="|")
"""


@exhaustive
def test_what_it_is_looking_for_is_found(tmp_path: Path) -> None:
    for number, (name, (value, _)) in enumerate(FAULTY.items()):
        kind, make = (("pickle", pickled), ("zip", torch_zip), ("legacy", legacy))[number % 3]
        (tmp_path / f"{name}.{kind}").write_bytes(make({"x": value}))  # type: ignore[operator]
    (tmp_path / "nothing.pickle").write_bytes(pickled({"x": 1}))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )

    found = dict(line.split("|", 1) for line in done.stdout.splitlines())
    assert found.pop("nothing") == "[]"
    assert found.keys() == FAULTY.keys()
    for name, (_, expected) in FAULTY.items():
        assert expected in found[name], (name, found[name])


@exhaustive
def test_honest_files_come_through_reading_and_writing(maker: Maker) -> None:
    chance = random.Random(1)
    for number, seed in enumerate(maker.honest):
        for protocol in (0, 2, 4):
            data = written(seed.root, chance, protocol)
            again = written(read(data), random.Random(number), protocol)
            assert read(again).kind == seed.root.kind
    files = [as_it_was(maker, seed, chance) for seed in maker.honest]
    assert {file.kind for file in files} == {"pickle", "zip", "legacy"}
    assert sum(is_data(file.data) for file in files[::9]) > len(files[::9]) / 2


@exhaustive
def test_each_row_of_the_table_is_tried(maker: Maker) -> None:
    tried: set[str] = set()
    for seed in maker.honest:
        file = as_it_was(maker, seed, random.Random(1))
        names = {".".join(node.said) for node in walk(seed.root) if node.kind == "name"}
        if names & BY_NAME.keys() - tried and is_data(file.data):
            tried |= names
    for row in ROWS:
        assert tried & set(row.names), row.names


@exhaustive
def test_no_argument_is_too_odd_for_the_judge(maker: Maker) -> None:
    chance, tried = random.Random(1), set[str]()
    calls = [call(named(*row.names[0].rsplit(".", 1))) for row in ROWS]
    size = call(named("torch", "Size"), (0,))
    odd = [*calls, size, *map(ops, (None, 1 << 70, -1, 1.5, "x", (), [], {}, (1,), (None,) * 5))]
    for seed in maker.honest:
        names = {node.said[1] for node in walk(seed.root) if node.kind == "name"}
        if names <= tried:
            continue
        tried |= names
        pickled = read_pickle(BytesSource(b"\x80\4(" + b"".join(odd) + written(seed.root, chance, 2)[2:-1] + b"t."))
        for made in {one.func: one for one in pickled.calls[len(calls) + 1 :]}.values():
            args = made.args
            for index in range(len(args)):
                for one in pickled.root[: len(odd) : 3]:
                    made.args = (*args[:index], one, *args[index + 1 :])
                    assert all(Judge().verdicts(pickled))
            made.args = args
