"""Long texts in a file make reports neither large nor slow, and machines can still read these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool import LimitExceeded
from tests.build import call, floats, named, ops, pickled, storage, tensor, torch_zip, zip_file
from tests.formats.said import refused
from tests.process import run_within
from tests.scale import scaled, step, times

MIB = 1 << 20
T = tensor(storage())
FLOATS = {"0": floats()}
FLOAT = named("torch", "float32")


def run(path: Path, *arguments: str, nbytes: int = 512 * MIB) -> bytes:
    """Return what a command prints that may have so much memory."""
    out = path.with_name("out")
    with out.open("wb") as stream:
        done = run_within(nbytes, *arguments, path, stdout=stream, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    return out.read_bytes()


@scaled
def test_json_of_a_long_text_says_how_long_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    count = times(10, 60) * MIB
    members = {"a/data.pkl": pickled({"w": T, "note": "\x01" * count}), "a/data/0": floats(), "a/version": b"3"}
    path.write_bytes(zip_file(members, deflated=["a/data.pkl"]))

    printed = run(path, "inspect", "--json")
    (extra,) = json.loads(printed)["extras"]
    assert extra["value"] == "\x01" * 65_536 + f"… ({count:,} characters)"
    assert len(printed) < 1 * MIB
    assert json.loads(run(path, "check", "--json", "--deep"))["verdict"]


@scaled
def test_json_of_a_thousand_texts_is_written_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    count = times(300, 800)
    tree = {"w": T, **{f"note{number}": "\x01" * 65_536 for number in range(count)}}
    members = {"a/data.pkl": pickled(tree), "a/data/0": floats(), "a/version": b"3"}
    path.write_bytes(zip_file(members, deflated=["a/data.pkl"]))

    # The text alone takes six times as much as its values.
    printed = run(path, "inspect", "--json", nbytes=times(192, 512) * MIB)
    assert [len(extra["value"]) for extra in json.loads(printed)["extras"]] == [65_536] * count


def test_json_in_pieces_is_the_json_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(torch_zip({"w": T, "ü": {}, "x": [1, 2.5, None, {"a": (True,)}]}, FLOATS))

    for more in ([], [str(path)], [str(tmp_path / "missing")]):
        done = subprocess.run(
            [sys.executable, "-m", "ckptool", "inspect", "--json", str(path), *more], capture_output=True, check=False
        )
        assert done.stdout.decode().replace(os.linesep, "\n") == json.dumps(json.loads(done.stdout)) + "\n"


def test_metadata_is_cut_in_json(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    header = json.dumps({"__metadata__": {"a": "b" * 100_000, "c" * 100_000: "d"}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    assert json.loads(run(path, "inspect", "--json"))["metadata"] == {
        "a": "b" * 65_536 + "… (100,000 characters)",
        "c" * 65_536 + "… (100,000 characters)": "d",
    }


@scaled
def test_one_long_name_does_not_make_every_line_long(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(torch_zip({"a" * 65_000: T, **{f"w{number}": T for number in range(2_000)}}, FLOATS))

    for arguments in ([], ["--table", "github"], ["--columns", "name,shared_with"])[:: step(3)]:
        printed = run(path, "inspect", *arguments)
        assert b"w1999" in printed
        assert len(printed) < 8 * MIB, arguments
        assert arguments or b"a" * 65_000 in printed


def test_names_that_share_memory_are_not_listed_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    long = {f"{number}" + "a" * 60_000: T for number in range(20)}
    path.write_bytes(torch_zip({**long, **{f"w{number}": T for number in range(300)}}, FLOATS))

    printed = run(path, "inspect", "--json")
    assert len(printed) < 4 * MIB
    assert all(sum(map(len, one["shared_with"])) <= 4096 for one in json.loads(printed)["tensors"])


@pytest.mark.parametrize(
    "tree",
    [
        {"w": tensor(storage(location="a" * 5_000))},
        {"w": tensor(storage("a" * 5_000))},
        {"w": T, "x": ops("a" * 5_000) + ops("b") + b"\x93"},
        {"w": T, "x": ops("a") + ops("b" * 5_000) + b"\x93"},
        {"w": call(named("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"), T, FLOAT, "a" * 5_000, True)},
    ],
)
def test_what_stands_beside_tensors_is_short(tree: object) -> None:
    caught = refused(torch_zip(tree, FLOATS, protocol=4), LimitExceeded)
    assert (caught.kind, caught.needed) == ("name-too-long", 5_000)


def test_an_error_that_quotes_the_file_is_cut() -> None:
    header = f'{{"w":{{"dtype":"{"a" * 1_000_000}","shape":[1],"data_offsets":[0,4]}}}}'.encode()
    caught = refused(len(header).to_bytes(8, "little") + header + bytes(4))
    assert len(str(caught)) < 70_000
    assert str(caught).endswith("characters)")
