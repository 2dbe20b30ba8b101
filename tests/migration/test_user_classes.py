"""``--model`` finds what the user names: in the current folder, as uvicorn does, or in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MigrationRefused, OutputFailed
from tests.loading.same import assert_same, saved
from tests.migration.refused import refused
from tests.scale import in_turn

ROOT = Path(__file__).parents[2]
NET = """
import torch
from {sizes} import SIZE

class Net(torch.nn.Linear):
    def __init__(self, n=SIZE):
        super().__init__(3, n)
"""


@pytest.fixture(autouse=True)
def unchanged() -> Any:
    """Fail if anything is left on Python's path, or imported."""
    path, known = list(sys.path), {"model", "sizes", "nets", "nets.model"} & set(sys.modules)
    yield
    assert sys.path == path
    assert {"model", "sizes", "nets", "nets.model"} & set(sys.modules) == known


def folder(path: Path, size: int = 2, *, package: bool = False) -> Path:
    """Write a model, and a module beside it that it imports."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.py").write_text(NET.format(sizes=".sizes" if package else "sizes"))
    (path / "sizes.py").write_text(f"SIZE = {size}\n")
    if package:
        (path / "__init__.py").write_text("")
    saved(nn.Linear(3, size).state_dict(), path / "x.pth")
    return path


def run(*words: str, cwd: Path) -> tuple[int, str]:
    """Run the console script: the folder that it lies in is on Python's path, and not the current one."""
    script = cwd.parent / "bin" / "ckptool"
    script.parent.mkdir(exist_ok=True)
    script.write_text("import sys\nfrom ckptool.__main__ import main\nsys.exit(main())\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, script, *words],
        cwd=cwd,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_finds_a_module_in_the_current_folder(tmp_path: Path) -> None:
    here = folder(tmp_path / "here")

    code, text = run("migrate", "x.pth", "y.pth", "--model", "model:Net", cwd=here)

    assert code == 0, text
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(here)
        found = type(torch.load(here / "y.pth", weights_only=False))
    assert (found.__module__, found.__name__) == ("model", "Net")
    for name in ("model", "sizes"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("package", "spec"), in_turn([False, True], ["nets/model.py:Net", "nets.model:Net"]))
def test_a_class_is_found_by_its_file_or_its_module(
    spec: str, package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "nets", package=package)
    monkeypatch.chdir(tmp_path)
    if "/" not in spec and not package:
        (tmp_path / "sizes.py").write_text("SIZE = 2\n")  # a folder of modules is not a folder on the path

    assert ckptool.check("nets/x.pth", model=spec).worst in (None, "info")
    ckptool.migrate("nets/x.pth", "y.pth", model=spec)

    monkeypatch.syspath_prepend(tmp_path if package or "/" not in spec else tmp_path / "nets")
    made = torch.load("y.pth", weights_only=False)
    assert type(made).__name__ == "Net"
    assert type(made).__module__ == ("nets.model" if package or "/" not in spec else "model")
    assert_same(made.state_dict(), torch.load("nets/x.pth"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("nets", "model", "sizes")]:
        del sys.modules[name]


def test_each_folder_has_modules_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = folder(tmp_path / "one", 2), folder(tmp_path / "other", 5)

    for here, there in ((one, other), (other, one), (one, other)):
        monkeypatch.chdir(here)
        for spec in ("model:Net", str(here / "model.py:Net"), "model.py:Net"):
            assert ckptool.check(here / "x.pth", model=spec).worst in (None, "info")
            assert ckptool.check(there / "x.pth", model=spec).worst == "warning"


def test_a_module_of_another_place_does_not_hide_the_one_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = folder(tmp_path / "one", 2), folder(tmp_path / "other", 5)
    monkeypatch.syspath_prepend(other)
    import model  # type: ignore[import-not-found]

    monkeypatch.chdir(one)
    assert ckptool.check("x.pth", model="model:Net").worst in (None, "info")
    assert sys.modules["model"] is model
    del sys.modules["model"], sys.modules["sizes"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("nothing.py:Net", "there is no file 'nothing.py'"),
        ("model.py:Other", "has no attribute 'Other'"),
        ("model.py", "no class after a ':'"),
        ("model", "no class after a ':'"),
        ("model:", "no class after a ':'"),
        ("broken.py:Net", "ZeroDivisionError"),
        ("ends.py:Net", "SystemExit"),
        ("random.py:Net", "rename"),
        ("model.py:SIZE", "not callable"),
        ("collections:OrderedDict", "no torch.nn.Module"),
    ],
)
def test_what_cannot_be_built_is_told_with_the_reason(
    spec: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = folder(tmp_path / "here")
    (here / "broken.py").write_text("1 / 0\n")
    (here / "ends.py").write_text("import sys\nsys.exit(3)\n")
    (here / "random.py").write_text("import torch\nNet = torch.nn.Linear\n")
    monkeypatch.chdir(here)

    with pytest.raises(MigrationRefused, match=reason) as caught:
        ckptool.migrate("x.pth", "y.pth", model=spec)

    assert caught.value.kind == "model-not-built"
    assert "path/to/file.py:Class" in str(caught.value.hint)
    assert not (here / "y.pth").exists()


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.LazyLinear(4)


def test_lazy_layers_take_the_sizes_of_the_file(tmp_path: Path) -> None:
    state = {f"a.{name}": tensor for name, tensor in nn.Linear(7, 4).state_dict().items()}
    saved(state, tmp_path / "x.pth")

    assert ckptool.check(tmp_path / "x.pth", model=f"{__name__}:Lazy").worst in (None, "info")
    ckptool.migrate(tmp_path / "x.pth", tmp_path / "y.pth", model=f"{__name__}:Lazy")

    assert_same(torch.load(tmp_path / "y.pth", weights_only=False).state_dict(), state)


class Refusing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def _load_from_state_dict(self, *given: Any) -> None:
        raise LookupError("no such thing")


def test_a_class_that_does_not_take_the_weights_says_why(tmp_path: Path) -> None:
    saved(nn.Linear(3, 2).state_dict(), tmp_path / "x.pth")

    for model in ("nowhere.odd:Net", "torch.nn:Identity"):
        refused(
            tmp_path / "x.pth",
            tmp_path / "y.pth",
            model=model,
            dry_run=True,
            match=r"cannot be built|does not take these weights",
        )
    refused(
        tmp_path / "x.pth",
        tmp_path / "y.pth",
        model=f"{__name__}:Refusing",
        match="does not take these weights; no such thing",
    )


class Forgetful(nn.Linear):
    """Saves other values than it was given."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def __getstate__(self) -> dict[str, Any]:
        weights = {"weight": self.weight, "bias": nn.Parameter(torch.full((2,), 7.0))}
        return {**super().__getstate__(), "_parameters": weights}  # type: ignore[misc]


def test_a_model_that_saves_other_weights_is_not_published(tmp_path: Path) -> None:
    saved(nn.Linear(3, 2).state_dict(), tmp_path / "x.pth")

    refused(tmp_path / "x.pth", tmp_path / "y.pth", model=f"{__name__}:Forgetful", match="'bias'", error=OutputFailed)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("are_equal", [True, False])
def test_two_values_for_what_a_class_ties_are_refused(are_equal: bool, tmp_path: Path) -> None:
    state = Tied().state_dict()
    state["b.weight"] = state["a.weight"] + (0 if are_equal else 1)
    saved(state, tmp_path / "x.pth")

    if are_equal:
        assert ckptool.migrate(tmp_path / "x.pth", tmp_path / "y.pth", model=f"{__name__}:Tied").verified
        return
    refused(
        tmp_path / "x.pth",
        tmp_path / "y.pth",
        model=f"{__name__}:Tied",
        kind="tied-values",
        match=r"ties 'a\.weight' and 'b\.weight'",
    )
