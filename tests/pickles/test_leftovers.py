"""What stands under the value that a pickle gives is no error for any reader: a note, and what it called is said."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch

from ckptool import check, open_checkpoint
from tests.build import MAGIC_NUMBER, call, floats, legacy, named, ops, pickled, storage, tensor, torch_zip
from tests.program import invoke

SYSTEM = call(named("os", "system"), "true")


@pytest.mark.parametrize("data", [b"K\1K\2.", b"((K\1(K\2.", b"K\1K\1K\2.", b"]K\2."])
def test_the_value_is_the_one_that_python_gives(data: bytes) -> None:
    with open_checkpoint(b"\x80\2" + data) as found:
        assert found.root == pickle.loads(data) == 2
        assert "left under the one that the pickle gives" in found.notes[0]


@pytest.mark.parametrize("pack", [lambda tree: torch_zip(tree, {"0": floats()}), lambda tree: pickled(tree)])
def test_a_call_under_the_value_is_no_error_of_the_file_and_is_listed(pack: object) -> None:
    assert callable(pack)
    report = check(pack(SYSTEM + ops({"epoch": 1})))
    codes = {one.code: one.message for one in report.findings}

    assert report.error is None
    assert codes["CK101"] == "1 value left under the one that the pickle gives"
    assert "os.system('true')" in codes["CK205"]


def test_tensors_above_what_is_left_are_read() -> None:
    tree = {"w": tensor(storage())}
    with open_checkpoint(torch_zip(SYSTEM + ops(tree), {"0": floats()})) as checkpoint:
        assert checkpoint.tensors["w"].read() == floats()
    streamed = legacy(SYSTEM + ops({"w": tensor(storage(rest=(None,)))}), [("0", 4, floats())])
    with open_checkpoint(streamed) as checkpoint:
        assert checkpoint.tensors["w"].read() == floats()
        assert checkpoint.notes == ("1 value left under the one that the pickle gives",)


@pytest.mark.parametrize(
    "data",
    [
        b"Vbuiltins\nVprint\n\x93(VRUN\ntR.",
        b"S'x'\n0(S'RUN'\nibuiltins\nprint\n.",
        b"I1\n(S'RUN'\nibuiltins\nprint\n0](K\1e.",
        b"cbuiltins\nprint\n(S'RUN'\ntRVtext\n.",
    ],
)
def test_pickles_that_begin_with_text_are_recognised(data: bytes) -> None:
    report = check(data)

    assert report.format == "pickle"
    assert [act.text for act in report.acts if act.how == "calls"] == ["builtins.print('RUN')"]


def test_a_computed_magic_number_is_said_and_the_stream_is_read() -> None:
    whole = legacy({"w": tensor(storage(rest=(None,)))}, [("0", 4, floats())])
    first = len(pickled(MAGIC_NUMBER))
    computed = pickled(call(named("builtins", "eval"), hex(MAGIC_NUMBER))) + whole[first:]
    report = check(computed)

    assert report.format == "torch_legacy"
    assert {one.code: one.message for one in report.findings}["CK101"] == (
        "its magic number is not there, but computed by a call"
    )
    assert any("builtins.eval(" in one.message for one in report.findings if one.code == "CK205")
    with open_checkpoint(computed) as checkpoint:
        assert checkpoint.tensors["w"].read() == floats()
    assert torch.load(io.BytesIO(whole), weights_only=True)["w"].shape == (4,)


@pytest.mark.parametrize("broken", [SYSTEM + b"\xff.", SYSTEM + b"0R.", SYSTEM + b"\x82\1."])
def test_a_refused_file_lists_what_it_names_and_calls_up_to_there(broken: bytes, tmp_path: Path) -> None:
    for data in (b"\x80\x02" + broken, torch_zip(broken), legacy(broken)):
        path = tmp_path / "x"
        path.write_bytes(data)
        report = check(path)

        assert report.error is not None
        assert [one.name for one in report.globals if one.name == "os.system"]
        assert "CK205" in {one.code for one in report.findings}
        assert "global       os.system not allowed" in invoke(["check", "--globals", str(path)]).output
    assert [one.name for one in check(b"cos\nsystem\n(S'x'\ntR\xff").globals] == ["os.system"]


def test_inspect_says_it_at_the_head(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(torch_zip({"x": SYSTEM}))
    lines = invoke(["inspect", str(path)]).output.splitlines()
    (first,) = [line for line in lines if "CK205" in line]

    assert first.startswith("  error        CK205 unpickling calls os.system('true')")
    assert lines.index(first) == min(number for number, line in enumerate(lines) if " CK" in line)
