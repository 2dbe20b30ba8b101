"""What a pickle asks for is said whatever it is packed in, and no member of an archive goes unseen."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import CheckReport, Limits, check, open_checkpoint
from tests import program
from tests.build import (
    call,
    floats,
    inline_tensor,
    legacy,
    named,
    ops,
    pickled,
    raw,
    storage,
    tar_file,
    tensor,
    torch_zip,
    torchscript,
    zip_file,
)
from tests.each import each
from tests.program import invoke

SYSTEM = call(named("os", "system"), "true")


class Nested:
    """Something that pickles itself as a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        import posix

        return posix.system, ("true",)


INNOCENT = ops(None)


def zipped(value: bytes) -> bytes:
    return torch_zip({"w": tensor(storage()), "x": value}, {"0": floats()})


def streamed(value: bytes) -> bytes:
    return legacy({"w": tensor(storage(rest=(None,))), "x": value}, [("0", 4, floats())])


def scripted(value: bytes) -> bytes:
    """Return what torch.jit.save writes, with one attribute more."""
    members = zipfile.ZipFile(io.BytesIO(torchscript()))
    found = {name: members.read(name) for name in members.namelist()}
    tree = found["archive/data.pkl"]
    assert tree.endswith(b"ub.")
    return zip_file(found | {"archive/data.pkl": tree[:-3] + ops("x") + value + b"ub."})


def exported(value: bytes) -> bytes:
    """Return an exported program: without weights, with inputs to try it with."""
    members = {"x/archive_format": b"pt2", "x/models/model.json": b"{}"}
    members |= {f"x/data/{kind}/model_{kind}_config.json": b'{"config": {}}' for kind in ("weights", "constants")}
    return zip_file(members | {"x/data/sample_inputs/model.pt": torch_zip(value)})


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "bare zip": zipped,
    "legacy": streamed,
    "gz of zip": lambda value: gzip.compress(zipped(value)),
    "gz of legacy": lambda value: gzip.compress(streamed(value)),
    "gz of pickle": lambda value: gzip.compress(pickled({"x": value})),
    "zip of one": lambda value: zip_file({"model.pth": zipped(value)}),
    "zip of two": lambda value: zip_file({"a.pth": zipped(INNOCENT), "b.pth": zipped(value)}),
    "zip of one with weights": lambda value: zip_file({"a.pth": zipped(INNOCENT), "b.pth": torch_zip({"x": value})}),
    "zip of a zip of two": lambda value: zip_file(
        {"c.pth": zipped(INNOCENT), "in.zip": zip_file({"a.pth": zipped(INNOCENT), "b.pth": zipped(value)})}
    ),
    "tar of one": lambda value: tar_file({"model.pth": zipped(value)}),
    "tar.gz of one": lambda value: gzip.compress(tar_file({"weights.th": streamed(value), "config.json": b"{}"})),
    "torchscript": scripted,
    "pt2": exported,
}


def run(path: Path, *options: str, code: int) -> str:
    return program.run("check", path, *options, code=code).stdout


def alarms(report: CheckReport) -> list[tuple[str, str]]:
    return [(one.code, one.message) for one in report.findings if one.severity != "info"]


@each("packing", PACKED)
def test_what_holds_only_tensors_is_quiet_in_all_of_them(packing: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(PACKED[packing](INNOCENT))

    assert alarms(check(path)) == []
    assert "nothing wrong found" in run(path, code=0)


def test_a_plain_pickle_is_refused_and_what_it_asks_for_is_said() -> None:
    assert alarms(check(pickled({"w": 1}))) == [
        ("CK202", "torch.load() refuses it: it was written by pickle.dump() and not by torch.save()")
    ]
    message = dict(alarms(check(pickled({"w": inline_tensor(), "x": SYSTEM}))))["CK202"]
    assert "it was written by pickle.dump()" in message
    assert "it asks for what is not allowed: os.system (byte " in message
    assert "torch.storage._load_from_bytes" in message


def test_names_that_are_seldom_met_are_not_lost_behind_usual_ones() -> None:
    usual = [named("numpy", "dtype"), named("numpy", "ndarray"), named("torch.nn.modules.linear", "Linear")]
    report = check(torch_zip([*usual, named("collections", "defaultdict"), SYSTEM]))

    messages = {one.code: one.message for one in report.findings}
    assert "2.6: os.system (data.pkl" in messages["CK202"]
    assert messages["CK201"] == "unpickling would import os.system (not imported here)"


@pytest.mark.parametrize("name", ["builtins.eval", "__builtin__.eval", "numpy.testing._private.utils.runstring"])
def test_the_package_alone_makes_no_name_familiar(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (message,) = [one.message for one in check(torch_zip(named(module, attribute))).findings if one.code == "CK201"]
    assert name in message


def test_the_command_that_is_given_writes_a_file_without_them(tmp_path: Path) -> None:
    path = tmp_path / "x.pth.gz"
    path.write_bytes(gzip.compress(torch_zip({"model": {"w": tensor(storage())}, "x": SYSTEM}, {"0": floats()})))
    (finding,) = [one for one in check(path).findings if one.code == "CK204"]

    assert finding.command is not None
    result = invoke([*shlex.split(finding.command)[1:], "--json"])
    assert alarms(check(json.loads(result.output)["target"])) == []


@pytest.mark.parametrize("name", ["__torch__.Net", "torch.jit._pickle.restore_type_tag"])
def test_names_of_torchscript_are_its_own_in_no_other_file(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert alarms(check(scripted(named(module, attribute)))) == []
    assert [code for code, _ in alarms(check(gzip.compress(zipped(named(module, attribute)))))] == ["CK204"]
    assert [code for code, _ in alarms(check(scripted(named("torch.jit", "load"))))] == ["CK204", "CK207"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_real_torchscript_and_a_real_exported_program_are_quiet() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.sizes = [1, 2]
            self.names = {"a": torch.ones(1)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.sizes[0] + self.names["a"]

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Net()), buffer)
    assert alarms(check(buffer.getvalue())) == []
    assert alarms(check(gzip.compress(buffer.getvalue()))) == []

    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Net(), (torch.ones(1, 2),)), buffer)
    report = check(buffer.getvalue())
    assert alarms(report) == []
    assert any("sample_inputs/model.pt::" in one.record for one in report.globals)


def test_every_pickle_of_an_exported_program_is_looked_at() -> None:
    config = {"config": {"w": {"path_name": "weight_0", "use_pickle": True, "tensor_meta": None}}}
    members = {"x/archive_format": b"pt2", "x/data/weights/model_weights_config.json": json.dumps(config).encode()}
    for name in ("weights/weight_0", "constants/opaque_obj_0", "constants/custom_obj_0", "sample_inputs/model.pt"):
        sound = members | {"x/data/weights/weight_0": torch_zip({}), "x/data/" + name: pickled({})}
        assert alarms(check(zip_file(sound))) == []
        assert "os.system" in dict(alarms(check(zip_file(sound | {"x/data/" + name: pickled(SYSTEM)}))))["CK204"]
        assert name in dict(alarms(check(zip_file(sound | {"x/data/" + name: b"\x80\x02c"}))))["CK114"]


TWICE = {
    "one that two entries speak of": ("weights", "weight_0", [False, True]),
    "the same the other way round": ("weights", "weight_0", [True, False]),
    "one of the constants": ("constants", "tensor_0", [False, True]),
    "weights as they were written before": ("weights", "model.pt", [False]),
    "constants as they were": ("constants", "model.pt", [False]),
    "weights of an old name": ("weights", "serialized_state_dict.pt", [False]),
}


@each("name", TWICE)
def test_a_tensor_of_an_exported_program_that_is_unpickled_as_well_is_no_data(name: str) -> None:
    kind, record, uses = TWICE[name]
    evil = torch_zip({"x": SYSTEM})
    meta = {"dtype": 1, "sizes": [{"as_int": len(evil)}], "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}}
    entries = {str(use): {"path_name": record, "use_pickle": use, "tensor_meta": meta} for use in uses}
    members = {"x/archive_format": b"pt2", "x/data/weights/model_weights_config.json": b'{"config": {}}'}
    members |= {f"x/data/{kind}/model_{kind}_config.json": json.dumps({"config": entries}).encode()}
    assert check(zip_file({**members, f"x/data/{kind}/{record}": evil})).grade in ("code", "system")


@pytest.mark.parametrize(
    "head", [b"\x1f\x9d", b"\x1f\x8b\x08\0", b"PK\3\4", b"\x04\x22\x4d\x18", b"\x80\x02cfoo\nbar\n(S'ls'\ntR."]
)
def test_the_bytes_of_weights_of_an_exported_program_are_no_pickles(head: bytes) -> None:
    weights = head.ljust(64, b"\x11")
    meta = {"dtype": 7, "sizes": [{"as_int": 16}], "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}}
    members = {"x/archive_format": b"pt2"}
    for kind, name in (("weights", "weight_0"), ("constants", "tensor_0"), ("constants", "custom_obj_0")):
        config = {"config": {"w": {"path_name": name, "use_pickle": False, "tensor_meta": meta}}}
        configs = {f"x/data/{kind}/model_{kind}_config.json": json.dumps(config).encode()}
        whole = members | {"x/data/weights/model_weights_config.json": b'{"config": {}}'} | configs
        found = dict(alarms(check(zip_file(whole | {f"x/data/{kind}/{name}": weights}))))
        is_unpickled = name == "custom_obj_0"  # whatever the settings say of it
        assert bool(found.keys() - {"CK132"}) is is_unpickled


# Archives of several


def test_each_member_with_a_problem_is_named_with_the_command_that_says_more(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(zip_file({"a.pth": zipped(SYSTEM), "good.pth": zipped(INNOCENT), "d/b.pth": streamed(SYSTEM)}))
    report = check(path)

    assert (report.form, report.members, report.verdict[:10]) == ("archive", 3, "1 error, 2")
    found = [one for one in report.findings if one.code == "CK115"]
    assert [one.message.partition(":")[0] for one in found] == ["member 'a.pth'", "member 'd/b.pth'"]
    for finding, member in zip(found, ("a.pth", "d/b.pth"), strict=True):
        assert finding.command == f"ckptool check {path}::{member}"
        assert finding.message.partition(": ")[2] in dict(alarms(check(f"{path}::{member}")))["CK204"]
    records = {one.record for one in report.globals if one.name == "os.system"}
    assert records == {"a.pth::archive/data.pkl", "d/b.pth"}
    assert "not allowed, a.pth::data.pkl, byte " in run(path, "--globals", code=1)


def test_a_member_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    broken = zipped(INNOCENT)[:-9]
    for others in ({"a.pth": zipped(INNOCENT)}, {"a.pth": zipped(INNOCENT), "b.pth": zipped(INNOCENT)}):
        path.write_bytes(zip_file(others | {"c.pth": broken}))
        (finding,) = [one for one in check(path).findings if one.severity == "error"]
        assert (finding.code, finding.hint, finding.command) == (
            "CK114",
            "Nothing is known of what it holds.",
            f"ckptool check {path}::c.pth",
        )
        assert "'c.pth' cannot be opened: " in finding.message
        run(path, code=1)


@pytest.mark.parametrize("name", ["readme", "__init__.py", "._a.pth"])
def test_other_files_in_an_archive_are_no_problem(name: str) -> None:
    content = {"readme": b"hello", "__init__.py": b"", "._a.pth": b"\0\5\x16\7\0\2\0\0Mac OS X        "}[name]
    assert alarms(check(zip_file({"a.pth": zipped(INNOCENT), name: content}))) == []


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (pickled(SYSTEM)[:-1], ["CK114", "CK205"]),
        (raw(b"x") + SYSTEM, ["CK114", "CK205"]),
        (b"\x80\x02\x82\x01.", ["CK114", "CK206"]),
    ],
)
def test_a_pickle_that_breaks_off_is_a_problem_whatever_its_name(content: bytes, codes: list[str]) -> None:
    report = check(zip_file({"a.pth": zipped(INNOCENT), "weights": b"\x80\x02" + content}))
    assert [code for code, _ in alarms(report)] == codes


def test_a_member_beyond_the_limits_is_a_problem_too() -> None:
    data = zip_file({"a.pth": zipped(INNOCENT), "b.bin": bytes(1 << 16)}, deflated=["b.bin"])
    report = check(data, limits=Limits(inflated_nbytes=1 << 10))
    assert [code for code, _ in alarms(report)] == ["CK114"]


def test_members_of_an_archive_in_an_archive_are_listed_as_they_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(zip_file({"in.zip": zip_file({"a.pth": zipped(INNOCENT), "b.pth": zipped(SYSTEM)})}))

    for origin in (path, f"{path}::in.zip"):
        with open_checkpoint(origin) as checkpoint:
            names = [member.name for member in checkpoint.members]
        assert names == ["in.zip::a.pth", "in.zip::b.pth"]
        found = dict(alarms(check(origin)))
        assert list(found) == ["CK115", "CK205"]
        assert "'in.zip::b.pth'" in found["CK115"]
        assert "in.zip::b.pth::" in found["CK205"]
    assert [code for code, _ in alarms(check(f"{path}::in.zip::b.pth"))] == ["CK204", "CK205"]


def test_the_verdict_does_not_claim_to_have_looked_at_values_of_members() -> None:
    report = check(zip_file({"a.pth": zipped(INNOCENT), "b.pth": zipped(INNOCENT)}), values=True)
    assert "every value looked at but those of 2 members" in report.verdict


def test_strict_looks_at_the_containers_of_members_too() -> None:
    data = zip_file({"a.pth": zipped(INNOCENT), "b.pth": streamed(INNOCENT) + b"x"})
    assert [code for code, _ in alarms(check(data))] == ["CK209"]
    assert [(one.code, one.severity) for one in check(data, strict=True).findings if one.severity != "info"] == [
        *(("CK115", "error"), ("CK209", "warning")),
    ]
