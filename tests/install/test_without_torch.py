"""What needs torch says so in one line where it is missing or broken, and the rest works without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptool
from ckptool.torch_ops import needed
from tests import build

COMMAND = 'pip install "ckptool[torch]"'
MISSING = f"Error: this needs torch, which is not installed: {COMMAND}\n"
NO_NUMPY = 'this needs numpy, which is not installed: pip install "ckptool[stat]"'

# As if it were not installed: what is None here cannot be imported.
HIDE = "import sys; sys.modules.update(torch=None, numpy=None); "

NEED_TORCH = [
    *("load", "load_into", "load_model", "predict_memory"),
    *("Cost", "LiveModel", "LoadReport", "Reload", "Serving"),
]

REFUSED = {
    "cast": ["migrate", "a.pth", "b.pth", "--dtype", "float16"],
    "cast, dry run": ["migrate", "a.pth", "b.pth", "--dtype", "float16", "--dry-run"],
    "built model": ["migrate", "a.pth", "b.pth", "--form", "model", "--model", "a:B"],
    "values": ["check", "--values", "a.pth"],
    "values of no file": ["check", "--values", "none.pth"],
    "device check": ["check", "--device-check", "a.pth"],
    "fit": ["check", "--model", "a:B", "a.pth"],
    "devices": ["devices"],
}
NEED_NUMPY = (["--rtol", "0.1", "other.pth"], ["--ignore-dtype", "wide.pth"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def write(name: str, kind: str, data: bytes) -> None:
        tree = {"w": build.tensor(build.storage("0", 4, kind))}
        (tmp_path / name).write_bytes(build.torch_zip(tree, {"0": data}))

    write("a.pth", "FloatStorage", build.floats())
    write("other.pth", "FloatStorage", bytes(8) + build.floats()[8:])
    write("wide.pth", "DoubleStorage", bytes(32))
    return tmp_path


def python(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(ckptool.__file__).parents[1])}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, f"{HIDE}from ckptool.cli import main; main()", *arguments)


def test_a_command_that_needs_torch_says_so_in_one_line(folder: Path) -> None:
    before = sorted(folder.iterdir())
    program = f"""{HIDE}
import json
from tests.program import invoke
for words in {list(REFUSED.values())!r}:
    done = invoke(words)
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
"""
    said = map(json.loads, python(folder, program).stdout.splitlines())

    assert dict(zip(REFUSED, said, strict=True)) == {case: [2, "", MISSING] for case in REFUSED}
    assert sorted(folder.iterdir()) == before


def test_training_names_the_extra_that_it_needs(folder: Path) -> None:
    done = run(folder, "fixtures", "out")

    assert done.returncode == 2
    assert done.stderr == MISSING.replace("[torch]", "[train]")


def test_a_name_that_needs_torch_raises_what_is_both_errors(folder: Path) -> None:
    program = f"""{HIDE}
import pickle
import ckptool
for name in {NEED_TORCH!r}:
    for ask in (lambda: getattr(ckptool, name), lambda: exec("from ckptool import " + name, {{}})):
        try:
            ask()
        except ckptool.MissingPackage as error:
            assert isinstance(error, ckptool.CkptoolError) and isinstance(error, ImportError)
            back = pickle.loads(pickle.dumps(error))
            print(back.kind, back.package, back.command, back)
"""
    done = python(folder, program)

    expected = f"missing-package torch {COMMAND} {MISSING.removeprefix('Error: ')}"
    assert (done.stderr, done.stdout) == ("", expected * 2 * len(NEED_TORCH))


def test_what_needs_no_torch_can_be_listed_and_explained_without_it(folder: Path) -> None:
    done = python(folder, f"{HIDE}import ckptool, pydoc; pydoc.render_doc(ckptool); print(*dir(ckptool))")

    assert done.stderr == ""
    listed = set(done.stdout.split())
    assert listed == {*dir(ckptool)} - {*NEED_TORCH}


def test_migrations_that_cast_nothing_need_no_torch(folder: Path) -> None:
    for target in (["b.safetensors"], ["b.pth", "--form", "state_dict"], ["c.pth", "--to", "cpu"]):
        done = run(folder, "migrate", "a.pth", *target)
        assert (done.returncode, done.stderr) == (0, "")
        assert "written, and read back by ckptool\n" in done.stdout
        assert run(folder, "diff", "-q", "a.pth", target[0], "--ignore-device").returncode == 0


def test_a_difference_is_counted_where_nothing_says_by_how_much(folder: Path) -> None:
    done = run(folder, "diff", "a.pth", "other.pth", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    (values,) = found["values"]
    (known,) = ckptool.diff(folder / "a.pth", folder / "other.pth").values

    assert (values["differing"], values["numel"], values["max_abs"]) == (known.differing, known.numel, None)
    assert found["not_compared"] == [f"by how much values differ: {NO_NUMPY}"]
    for options in NEED_NUMPY:
        done = run(folder, "diff", "a.pth", *options)
        assert (done.returncode, done.stderr.strip()) == (2, f"Error: {NO_NUMPY}")


def test_two_types_are_a_difference_whose_values_are_not_compared(folder: Path) -> None:
    done = run(folder, "diff", "a.pth", "wide.pth")

    assert (done.returncode, done.stderr) == (1, "")
    assert "dtype        w: float32 -> float64" in done.stdout
    assert f"not compared the values of 1 tensor of two types: {NO_NUMPY}\n" in done.stdout


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("OSError('libtorch_cpu.so: failed to map segment')", "OSError: libtorch_cpu.so: failed to map segment"),
        ("ImportError('undefined symbol: x\\nand more')", "ImportError: undefined symbol: x"),
        (
            "ModuleNotFoundError('No module named \\'sympy\\'', name='sympy')",
            "ModuleNotFoundError: No module named",
        ),
    ],
)
def test_a_torch_that_does_not_start_is_not_called_missing(raised: str, said: str, folder: Path) -> None:
    (folder / "torch.py").write_text(f"raise {raised}\n")
    show = "import sys; sys.path.insert(0, '.'); from ckptool.cli import main; main()"
    done = python(folder, show, "check", "--values", "a.pth")

    first = f"Error: torch is installed, but cannot be imported: {said}"
    assert done.returncode == 2
    fact, hint = done.stderr.splitlines()
    assert fact.startswith(first)
    assert hint == 'Hint: Run python -c "import torch" to see all that it says.'

    (folder / "numpy.py").write_text(f"raise {raised}\n")
    done = python(folder, show, "diff", "a.pth", "other.pth")
    assert done.returncode == 1
    assert f"by how much values differ: numpy is installed, but cannot be imported: {said}" in done.stdout


def test_other_packages_are_named_with_what_installs_them() -> None:
    with pytest.raises(ckptool.MissingPackage) as caught:
        needed("no_such_package.inside", "no-such-package", "no-such-package")

    assert caught.value.package == "no-such-package"
    assert caught.value.message == "this needs no-such-package, which is not installed: pip install no-such-package"
