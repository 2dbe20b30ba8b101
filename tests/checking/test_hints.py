"""What a hint tells people to run works, and does what it is for."""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
import warnings
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptool import check
from tests.build import call, floats, named, ops, storage, tensor, torch_zip
from tests.corpus.test_corpus import FOLDER, ROWS
from tests.device.tags import real
from tests.program import VALID, invoke
from tests.scale import exhaustive, in_turn, one_of_twins, some

OURS = [path for path in sorted(VALID.iterdir()) if path.suffix != ".json"]


def run(finding: Any) -> str:
    """Run what a hint says, and return what was printed."""
    assert finding.command is not None
    assert finding.command not in (finding.hint or "")
    program, verb, *arguments = shlex.split(finding.command)
    assert program == "ckptool"
    extra = ["--force", "--json"] if verb == "migrate" else []
    result = invoke([verb, *arguments, *extra])
    assert result.exit_code == 0, (finding, result.output)
    return result.output


def run_all(path: Path, folder: Path) -> list[str]:
    """Run what is advised about a file, and return the codes of the findings that advise to migrate it."""
    copied = folder / path.name
    if copied != path:
        shutil.copyfile(path, copied)
    migrated = []
    for finding in check(copied).findings:
        if finding.command is None:
            continue
        printed = run(finding)
        if not finding.command.startswith("ckptool migrate "):
            continue
        migrated.append(finding.code)
        report = json.loads(printed)
        found = {one.code for one in check(report["target"]).findings}
        assert report["tensors"]
        assert found.isdisjoint({"CK202", "CK204"})
        if finding.code in ("CK301", "CK405", "CK501", "CK503"):
            assert finding.code not in found
        assert opened(report["target"]) is not None
    return migrated


def opened(path: str) -> object:
    """Open a file as everybody would."""
    if path.endswith(".safetensors"):
        return load_file(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path)


@pytest.mark.parametrize("path", one_of_twins(OURS, 3), ids=lambda path: path.name)
def test_every_command_in_a_hint_works_and_mends_it(path: Path, tmp_path: Path) -> None:
    run_all(path, tmp_path)


@exhaustive
def test_every_command_works_on_files_that_a_device_saved(tmp_path: Path) -> None:
    for path in real().files():
        assert "CK503" in run_all(path, tmp_path)


@pytest.mark.corpus
@pytest.mark.skipif(not ROWS, reason=f"no folder of real files at {FOLDER}")
@pytest.mark.parametrize("row", some(ROWS, 10), ids=lambda row: row["file"])
def test_every_command_works_on_real_files(row: dict[str, str], tmp_path: Path) -> None:
    run_all(FOLDER / row["file"], tmp_path)


def test_a_path_that_a_shell_would_take_apart_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my model; rm -rf $HOME.pth", "-x.pth", "it's.pth"):
        shutil.copyfile(VALID / "device-forged-cuda0-zip.pth", name)
        (finding,) = [one for one in check(name).findings if one.code == "CK503"]
        run(finding)


T = tensor(storage(location="cuda:0"))
RUNS = call(named("os", "system"), "true")
NAMESPACE = named("argparse", "Namespace") + b")\x81" + ops({"lr": 1.0}) + b"b"
ARRAY = call(
    named("numpy.core.multiarray", "_reconstruct"),
    named("numpy", "ndarray"),
    (0,),
    call(named("_codecs", "encode"), "b", "latin1"),
)
SUBCLASS = call(
    named("torch._tensor", "_rebuild_from_type_v2"),
    named("torch._utils", "_rebuild_wrapper_subclass"),
    named("torch.distributed.tensor", "DTensor"),
    (
        named("torch.distributed.tensor", "DTensor"),
        named("torch", "float32"),
        (4,),
        (1,),
        0,
        call(named("torch.serialization", "_get_layout"), "torch.strided"),
        call(named("torch", "device"), "cpu"),
        False,
    ),
    {"_local_tensor": T},
)
WHOLE = named("models", "Net") + b")\x81" + ops({"_parameters": {"w": T}, "_buffers": {}, "_modules": {}}) + b"b"

MENDED = {
    "a call among the weights": {"w": T, "x": RUNS},
    "calls deeper among the weights": {"model": {"w": T, "x": [RUNS], "y[0]": {"z": NAMESPACE}}, "epoch": 1},
    "a call among weights with a prefix": {"module.w": T, "module.v": T, "module.x": RUNS},
    "a call beside the weights": {"state_dict": {"w": T}, "x": RUNS},
    "settings beside the weights": {"state_dict": {"module.w": T}, "args": NAMESPACE, "optimizer": {}},
    "a whole model": WHOLE,
    "a whole model in a checkpoint": {"model": WHOLE, "epoch": 3},
    "weights that are averaged": {"ema": {"w": T}, "x": NAMESPACE},
}
"""Files that torch.load() refuses, and from which the weights can be taken."""

LEFT = {
    "tensors of a class of their own": {"w": SUBCLASS, "v": T},
    "arrays among the tensors": {"w": T, "x": ARRAY},
    "a state of random numbers": {"python": (3, (1, 2), None), "numpy": ("MT19937", ARRAY, 1), "cpu": T},
    "weights in objects": {"w": T, "x": named("odd", "Packed") + b")\x81" + ops({"w": T}) + b"b"},
    "objects alone": {"args": NAMESPACE},
    "stubs": {"module": {"w": tensor(storage(key="1", numel=0), (0,))}, "param_shapes": [{"w": (4,)}], "x": NAMESPACE},
}
"""Files of which no migration opens with torch.load() and has all the tensors that it takes."""


@pytest.mark.parametrize("name", MENDED)
def test_what_is_advised_opens_with_torch_load(name: str, tmp_path: Path) -> None:
    (tmp_path / "made.pth").write_bytes(torch_zip(MENDED[name], {"0": floats()}))

    assert "CK202" in run_all(tmp_path / "made.pth", tmp_path)


@pytest.mark.parametrize("name", LEFT)
def test_nothing_is_advised_that_would_not_help(name: str, tmp_path: Path) -> None:
    (tmp_path / "made.pth").write_bytes(torch_zip(LEFT[name], {"0": floats(), "1": b""}))
    refused = [one for one in check(tmp_path / "made.pth").findings if one.code == "CK202"]

    assert refused
    assert run_all(tmp_path / "made.pth", tmp_path) == []
    assert "open_checkpoint()" in (refused[0].hint or "")


def test_what_a_command_leaves_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "made.pth").write_bytes(torch_zip(MENDED["calls deeper among the weights"], {"0": floats()}))
    (finding,) = [one for one in check(tmp_path / "made.pth").findings if one.code == "CK202"]

    assert finding.hint == "Leave out what torch.load() refuses: x, y[0]."
    assert "--form state_dict --drop-unsupported" in (finding.command or "")


def with_state(value: torch.Tensor, **state: Any) -> nn.Parameter:
    made = nn.Parameter(value)
    made.__dict__.update(state)
    return made


def metadata(value: Any) -> OrderedDict[str, Any]:
    made = OrderedDict(a=torch.ones(2))
    made._metadata = value  # type: ignore[attr-defined]
    return made


ODD: dict[str, Callable[[], Any]] = {
    "numbers as names": lambda: {1: torch.ones(2), "1": torch.zeros(2)},
    "a name of three": lambda: {("a", 1): torch.ones(2)},
    "no name": lambda: {"": torch.ones(2)},
    "half a pair": lambda: {"\ud800": torch.ones(2)},
    "nested": lambda: {"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)},
    "a view of much": lambda: {"a": torch.ones(1000)[:1]},
    "tied": lambda: dict.fromkeys("ab", torch.ones(2)),
    "sparse": lambda: {"a": torch.eye(2).to_sparse()},
    "quantised": lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)},
    "empty": lambda: {"a": torch.ones(0)},
    "conjugate": lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()},
    "with a state": lambda: {"a": with_state(torch.ones(2), path=Path("x"))},
    "metadata that runs": lambda: metadata({"": {"version": Path("x")}}),
    "metadata of a class": lambda: metadata(Path("x")),
    "a class beside": lambda: {"a": torch.ones(2), "b": Path("x")},
    "a model": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "a wrapped model": lambda: nn.DataParallel(nn.Linear(2, 2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("save", "make"), in_turn([torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))], ODD.values())
)
def test_commands_for_odd_weights_work(
    make: Callable[[], Any], save: Callable[[Any, Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "odd.pth"
    save(make(), path)

    run_all(path, tmp_path)


@pytest.mark.parametrize(
    "names", [("gen", "disc"), ("student", "teacher"), ("netG", "netD"), ("actor", "critic")], ids="-".join
)
def test_no_command_takes_one_of_several_state_dicts(names: tuple[str, str], tmp_path: Path) -> None:
    models = {name: {"0.weight": torch.ones(2, at), "0.bias": torch.ones(at)} for at, name in enumerate(names, 3)}
    torch.save({**models, "args": Namespace(lr=0.1)}, tmp_path / "x.pth")
    report = check(tmp_path / "x.pth")

    assert not [one.command for one in report.findings if one.command and "--key" in one.command]
    assert [one.hint for one in report.findings if one.hint and "It holds 2 state dicts: take one" in one.hint]
    assert [one.hint for one in report.findings if one.code == "CK302"] == ["migrate takes one with `key=`."]


def test_safetensors_stay_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"module.w": torch.ones(2), "module.v": torch.ones(3)}, "x.safetensors")
    (found,) = [one for one in check("x.safetensors").findings if one.code == "CK301"]
    assert found.command == "ckptool migrate x.safetensors --form safetensors --strip-module"
    assert "torch.load" not in str(found.hint)
    assert load_file(json.loads(run(found))["target"]).keys() == {"w", "v"}
