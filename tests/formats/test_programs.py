"""What programs in archives do that reaches the system: TorchScript, exported programs, packages of source."""

from __future__ import annotations

import base64
import ctypes
import gzip
import io
import json
import os
import pickle
import re
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export.pt2_archive._package import load_pt2
from torch.jit.mobile import _load_for_lite_interpreter

from ckptool import CheckReport, check
from ckptool.fleet import row
from tests import build
from tests.build import pickled, zip_file
from tests.each import each
from tests.program import invoke


class Writes(torch.nn.Module):
    """Writes a file whenever it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        torch.save(torch.zeros(1), state[0])
        self.path = state[0]
        self.training = state[1]


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Saves(torch.nn.Module):
    """Writes a file whenever it is called."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, self.path)
        return x


class Canary:
    """Makes a folder where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


class Adds(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0) + x.shape[0]


def codes(report: CheckReport) -> set[str]:
    return {one.code for one in report.findings}


def rezipped(data: bytes, change: Callable[[str, bytes], tuple[str, bytes] | None], start: bytes = b"") -> bytes:
    """Return a zip behind other bytes, with its members changed, or left out."""
    stream = io.BytesIO(start)
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "a") as new:
        for name in old.namelist():
            if (kept := change(name, old.read(name))) is not None:
                new.writestr(*kept)
    return stream.getvalue()


def without_pickles(data: bytes) -> bytes:
    """Return an exported program of which nothing is unpickled."""
    return rezipped(data, lambda name, content: None if "sample_inputs" in name else (name, content))


def changed(data: bytes, change: Callable[[str], str]) -> bytes:
    """Return a zip with its text changed."""

    def of_text(name: str, content: bytes) -> tuple[str, bytes]:
        return name, change(content.decode()).encode() if name.endswith((".json", ".py")) else content

    return rezipped(data, of_text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_that_writes_a_file_when_it_is_loaded_is_an_error(tmp_path: Path) -> None:
    path, mark = tmp_path / "x.pt", tmp_path / "mark"
    torch.jit.script(Writes(str(mark))).save(str(path))
    torch.jit.load(str(path))
    assert mark.exists()

    report = check(path)
    assert "CK216" in codes(report)
    assert report.grade == row(str(path))["grade"] == "system"
    assert "which has torch.save(" in str(report.loading)
    assert "pickle.load() of a part of it only makes data" in str(report.loading)
    assert "CK216" in invoke(["inspect", str(path)]).output


@pytest.fixture(scope="module")
def exported() -> bytes:
    sizes = {"x": {0: torch.export.Dim("b", min=2, max=99)}}
    program = torch.export.export(Adds(), (torch.zeros(4, 3),), dynamic_shapes=sizes)
    stream = io.BytesIO()
    torch.export.save(program, stream)
    return stream.getvalue()


def test_a_symbolic_size_that_is_evaluated_as_text_is_an_error(exported: bytes, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"__import__('os').mkdir('{mark}')"

    def evil(program: str) -> str:
        return program.replace(formula, text)

    with zipfile.ZipFile(io.BytesIO(exported)) as archive:
        name = next(one for one in archive.namelist() if one.endswith("model.json"))
        program = archive.read(name).decode()
    at = program.index('"expr_str": "') + len('"expr_str": "')
    formula = program[at : program.index('"', at)]
    data = changed(exported, evil)
    with pytest.raises(Exception):  # noqa: B017 - what it is does not matter, it was evaluated
        torch.export.load(io.BytesIO(data))
    assert mark.exists()

    assert "CK216" in codes(check(data))
    assert "CK216" in codes(check(changed(exported, lambda one: evil(one).replace("expr_str", "expr\\u005fstr"))))
    assert "CK216" not in codes(check(exported))
    renamed = rezipped(changed(exported, evil), lambda name, one: (name.replace("model.json", "model.data"), one))
    mark.rmdir()
    with pytest.raises(Exception):  # noqa: B017 - as above
        torch.export.load(io.BytesIO(renamed))
    assert mark.exists()
    assert "CK216" in codes(check(renamed))


def test_an_operator_of_a_graph_that_leads_elsewhere_is_an_error(exported: bytes) -> None:
    for target in ("torch.serialization.os.system", "torch.ops.aten.from_file.default", "torch.ops.image.write_file"):
        data = changed(exported, lambda one: one.replace("torch.ops.aten.sum.dim_IntList", target))  # noqa: B023
        assert "CK216" in codes(check(data)), target
    given = of_model(nodes=[{"inputs": [{"arg": {"as_operator": "torch.ops.aten.from_file.default"}}]}])
    assert has_programs("p/models/model.json", given)


def with_constant(data: bytes, path: str, content: bytes, **more: bytes) -> bytes:
    """Return an exported program with a constant that its list says is a tensor of bytes; ``more`` is beside it."""
    meta = {
        "dtype": 1,
        "sizes": [{"as_int": len(content)}],
        "strides": [{"as_int": 1}],
        "storage_offset": {"as_int": 0},
        "device": {"type": "cpu", "index": None},
        "requires_grad": False,
        "layout": 7,
    }
    listed = {"x": {"path_name": path, "is_param": False, "use_pickle": False, "tensor_meta": meta}}
    config = json.dumps({"config": listed}).encode()
    stream = io.BytesIO(
        rezipped(data, lambda name, old: (name, config if name.endswith("_constants_config.json") else old))
    )
    with zipfile.ZipFile(stream, "a") as new:
        root = new.namelist()[0].partition("/")[0]
        for name, one in {f"data/constants/{path}": content, **more}.items():
            new.writestr(f"{root}/{name}", one)
    return stream.getvalue()


@pytest.mark.parametrize("path", ["opaque_obj_0", "opaque_obj_0/x"])
def test_an_object_that_is_listed_as_a_tensor_is_looked_at(path: str, exported: bytes, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = with_constant(exported, path, pickle.dumps(Canary(mark), 2))
    torch.export.load(io.BytesIO(data))
    assert mark.exists()
    assert check(data).grade == "system"


def test_a_pickle_that_is_a_storage_of_another_tree_is_looked_at(exported: bytes, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    canary = pickle.dumps(Canary(mark), 2)
    size = len(canary)
    tree = pickled({"w": build.tensor(build.storage("constants/opaque_obj_0", size, "ByteStorage"), (size,))})
    data = with_constant(exported, "opaque_obj_0", canary, **{"data.pkl": tree})
    torch.export.load(io.BytesIO(data))
    assert mark.exists()
    assert check(data).grade == "system"
    assert check(zip_file({"outer/x.pt2": data})).grade == "system"


LIBRARY = "torch.ctypes.cdll./proc/self/cwd/net"


def test_a_library_that_is_loaded_because_a_name_is_looked_up_is_an_error(
    exported: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced(name: str) -> bytes:
        return changed(
            exported, lambda one: one.replace('"torch_fn": "', f'"source_fn_stack": "x,{name}", "torch_fn": "')
        )

    loaded = []
    monkeypatch.setattr(ctypes.cdll, "_dlltype", loaded.append)
    torch.export.load(io.BytesIO(traced(LIBRARY)))
    assert loaded == ["/proc/self/cwd/net"]
    assert check(traced(LIBRARY)).grade == "system"
    assert check(traced("torch.nn.modules.linear.Linear;y,_operator.add;z,mine.cdll.net")).grade == "program"


def test_a_graph_that_is_nested_too_deep_to_be_read_is_an_error() -> None:
    assert has_programs("p/models/model.json", of_model(x=1)[:-1] + b', "y": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_a_module_beside_an_exported_program_may_be_imported(exported: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    path.write_bytes(without_pickles(exported))
    assert check(path).grade == "program"
    (tmp_path / "gmpy2.py").write_text("raise SystemExit")
    assert check(path).grade == "code"


def has_programs(name: str, data: bytes) -> bool:
    """Say whether the member of an archive does what reaches the system."""
    return any(act.grade not in ("program", "data") for act in check(zip_file({name: data})).acts)


def of_model(**fields: object) -> bytes:
    return json.dumps({"graph_module": fields}).encode()


SCRIPTS = {
    "torch.save(x, '/x')": True,
    "ops.aten.save(x, '/x')": True,
    "torch . from_file('/x')": True,
    "torch.\\\n  from_file('/x')": True,
    "f = torch\n    f.save(x, '/x')": True,
    "ops.image.write_file('/x', x)": True,
    "ops.torchaudio.sox_io_save_audio_file('/x')": True,
    "a = '\"'; torch.save(x, a); b = '\"'": True,
    "(torch).save(x, '/x')": True,
    "(torch  # comment\n     .save)(x, '/x')": True,
    "torch  # comment\n    y.save(x, '/x')": True,
    "ops.aten\n    y.save(x, '/x')": True,
    "(ops).aten.save(x, '/x')": True,
    "(ops.aten).save(x, '/x')": True,
    "getattr(torch, 'sa' 've')(x, '/x')": True,
    "getattr(ops.aten, '\\163ave')(x, '/x')": True,
    "f('\\\n', torch.save(x, '/x'), '')": True,
    '"""\\"""", torch.save(x, "/x"), "a"': True,
    "__torch__.torch.classes.aten.OpaqueObject.__new__(x)": True,
    "__torch__ . torch.\\\n  classes.aten.OpaqueObject.__new__(x)": True,
    "__torch__.torch\n    z = y.classes.aten.OpaqueObject": True,
    "__torch__\n    z = y.torch.classes.quantized.OpaqueObject": True,
    "getattr(getattr(__torch__, 'torch'), 'classes')": True,
    "getattr(__torch__.torch.classes, 'aten')": True,
    "__torch__.torch.classes.quantized.LinearPackedParamsBase.__new__(x)": False,
    "__torch__.torch.nn.modules.container.classes.Linear.__new__(x)": False,
    "'it was saved by torch.save()'": False,
    "getattr(self, 'torch')": False,
    "torch.add(x, x)  # not torch.save(x)": False,
    "ops.image.decode_png(x)": False,
    "ops.quantized.linear_prepack(x)": False,
    "(self).save(x)": False,
}


@each("line", SCRIPTS)
def test_operators_that_open_files_are_found_in_code(line: str) -> None:
    text = f"class Net(Module):\n  def forward(self, x: Tensor) -> Tensor:\n    y = {line}\n    return x\n"
    assert has_programs("m/code/__torch__.py", text.encode()) == SCRIPTS[line]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_object_of_a_class_in_c_that_unpickles_its_state_is_an_error(tmp_path: Path) -> None:
    path, mark, stream = tmp_path / "x.pt", tmp_path / "mark", io.BytesIO()
    torch.jit.save(torch.jit.script(Same()), stream)
    state = base64.b64encode(pickle.dumps(Canary(mark), 2))
    value = b"c__torch__.torch.classes.aten\nOpaqueObject\n)\x81X" + len(state).to_bytes(4, "little") + state + b"b"
    field = b"X\x08\0\0\0training"
    declared = b"  o : __torch__.torch.classes.aten.OpaqueObject\n  training : bool"

    def with_object(name: str, data: bytes) -> tuple[str, bytes]:
        data = data.replace(field, b"X\1\0\0\0o" + value + field) if name.endswith("/data.pkl") else data
        return name, data.replace(b"  training : bool", declared)

    path.write_bytes(rezipped(stream.getvalue(), with_object))
    torch.jit.load(str(path))
    assert mark.exists()

    report = check(path)
    assert {"CK205", "CK216"} <= codes(report)
    pickled = b"\x80\2c__torch__.torch.classes.mine\nReader\n)\x81X\1\0\0\0xb."
    assert check(zip_file({"x.pkl": pickled})).grade == "code"
    assert has_programs("m/bytecode.pkl", b"\x80\2X\x1e\0\0\0__torch__.torch.classes.mine.R.")
    assert not has_programs("m/bytecode.pkl", b"\x80\2X\x23\0\0\0__torch__.torch.classes.quantized.R.")


WRITING = {
    "(torch).save(x, {mark!r})",
    "(torch  # comment\n      .save)(x, {mark!r})",
    'print("""\\"""", torch.save(x, {mark!r}), "a")',
    "getattr(getattr(ops, 'aten'), 'sa' '\\166e')(x, {mark!r})",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("line", sorted(WRITING))
def test_code_that_torch_runs_is_found_however_it_is_written(line: str, tmp_path: Path) -> None:
    path, mark, stream = tmp_path / "x.pt", tmp_path / "mark", io.BytesIO()
    torch.jit.save(torch.jit.script(Same()), stream)
    statement = f"    {line.format(mark=str(mark))}\n    return"
    data = changed(stream.getvalue(), lambda code: code.replace("    return", statement))
    path.write_bytes(data)
    torch.jit.load(str(path))(torch.ones(1))
    assert mark.exists()
    assert check(path).grade == "system"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_are_found_by_names_in_any_case_as_torch_finds_them(tmp_path: Path) -> None:
    path, mark, stream = tmp_path / "x.pt", tmp_path / "mark", io.BytesIO()
    torch.jit.save(torch.jit.script(Writes(str(mark))), stream)
    path.write_bytes(rezipped(stream.getvalue(), lambda name, content: (name.upper(), content)))
    torch.jit.load(str(path))
    assert mark.exists()
    assert check(path).grade == "system"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_byte_code_without_its_source_is_looked_at(tmp_path: Path) -> None:
    path, mark, stream = tmp_path / "x.ptl", tmp_path / "mark", io.BytesIO()
    stream.write(torch.jit.script(Saves(str(mark)))._save_to_buffer_for_lite_interpreter())
    path.write_bytes(rezipped(stream.getvalue(), lambda name, content: None if "/code/" in name else (name, content)))
    _load_for_lite_interpreter(str(path))(torch.ones(1))
    assert mark.exists()
    assert check(path).grade == "system"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_in_a_flatbuffer_is_looked_at_wherever_it_lies(tmp_path: Path) -> None:
    path, mark = tmp_path / "x.ptl", tmp_path / "mark"
    data = bytes(torch._C._save_jit_module_to_bytes(torch.jit.script(Writes(str(mark)))._c, {}))
    path.write_bytes(data)
    torch.jit.load(str(path))
    assert mark.exists()
    assert check(path).grade == "system"
    assert "CK216" in codes(check(path))
    byte_code = bytes(torch.jit.script(Saves("x"))._save_to_buffer_for_lite_interpreter(_use_flatbuffer=True))
    for one in (data, byte_code):
        (tmp_path / "x.mar").write_bytes(zip_file({"a.ptl": one, "b.pkl": b"\x80\2N."}))
        assert check(tmp_path / "x.mar").grade == "system"
    path.write_bytes(bytes(torch._C._save_jit_module_to_bytes(torch.jit.script(Same())._c, {})))
    assert [act.grade for act in check(path).acts] == ["program"]


PREFIXES = {
    "script": b"#!/bin/sh\n",
    "pickle": b"\x80\2N.",
    "safetensors": (2).to_bytes(8, "little") + b"{}",
    "gzip": gzip.compress(b"x"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_program_is_found_in_a_zip_behind_other_bytes(prefix: str, tmp_path: Path) -> None:
    path, mark, stream = tmp_path / "x.pt", tmp_path / "mark", io.BytesIO()
    torch.jit.save(torch.jit.script(Writes(str(mark))), stream)
    path.write_bytes(rezipped(stream.getvalue(), lambda name, content: (name, content), PREFIXES[prefix]))
    torch.jit.load(str(path))
    assert mark.exists()
    assert check(path).grade == "system"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_program_in_a_zip_that_can_be_read_in_two_ways_is_let_through_by_no_gate(
    compression: int, tmp_path: Path
) -> None:
    model, written = tmp_path / "model.pt", tmp_path / "written"
    torch.jit.script(Writes(str(written))).save(str(model))
    twice = tmp_path / "twice.pt"
    with zipfile.ZipFile(model) as source, zipfile.ZipFile(twice, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.writestr(name, source.read(name))
    torch.jit.load(str(twice))
    assert written.exists()

    assert check(twice).grade == "code"
    assert invoke(["check", "--fail-on", "system", str(twice)]).exit_code == 2


def test_a_large_program_hides_no_other_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.formats.runnable.programs._MOST_READ", 1000)
    code = b"class Net(Module):\n  def forward(self, x: Tensor) -> Tensor:\n    torch.save(x, '/x')\n    return x\n"
    path = tmp_path / "x.zip"
    path.write_bytes(zip_file({"m/code/a.json": b" " * 1001, "m/code/__torch__.py": code, "m/data.pkl": b"\x80\2N."}))
    report = check(path)
    assert report.grade == "system"
    assert "1 program" in next(one.message for one in report.findings if one.code == "CK209")


HARD = {
    "m/code/a.py": b'save "' + b"\\a" * 500_000,
    "m/code/b.py": b'save """' + b'"\\' * 500_000,
    "m/a.json": b'{"expr_str": "' + b"\\n" * 500_000,
    "m/b.json": b'{"expr_str": "' + b"a" * 1_000_000 + b'"}',
    "m/d.json": b'{"expr_str": "' + b"1." * 500_000 + b'"}',
    "m/e.json": b'{"expr_str": "' + b". 1_" * 250_000 + b'"}',
    "m/c.json": b'{"expr_str": "\'' + b"\\\\'" * 300_000 + b'"}',
}


@pytest.mark.parametrize("name", HARD)
def test_text_that_is_no_program_takes_no_more_than_its_size(name: str) -> None:
    start = time.process_time()
    has_programs(name, HARD[name])
    assert time.process_time() - start < 10


def test_operators_of_byte_code_are_found() -> None:
    for name, opens in (("aten::save", True), ("aten::add", False), ("image::read_file", True)):
        size = len(name).to_bytes(4, "little")
        for behind in (b".", b"q\x01", b"qA", b"X\0\0\0\0"):
            assert has_programs("m/bytecode.pkl", b"\x80\x02X" + size + name.encode() + behind) == opens


FORMULAS = {
    "Symbol('s77', positive=True, integer=True)": True,
    "Add(Mul(Integer(2), Symbol('s0')), Integer(1))": True,
    "2*s0 + Max(1, s1)//2": True,
    "floor(s0*0.5)": True,
    "eval('1')": False,
    "(1).__class__": False,
    "[exec(x) for x in [1]]": False,
    "S('__import__(1)')": False,
    "lambda: 1": False,
    "(eval)('1')": False,
    "Max(s0, 1, key=sympify)": False,
    "Mul(Float('0.5', precision=53), OpaqueUnaryFn_sqrt(Symbol('s0')))": True,
    "FloorDiv((s0 + 1), (2)) % 4": True,
    "S(\"o\"+\"pen('/x', 'w')\")": False,
    "Max(\"\\x6fpen('/x', 'w')\", 1)": False,
    "Symbol('o' + 'pen')": False,
    "S(Symbol('x').name)": False,
    "S(srepr(s0))": False,
    "9**9**9**9": False,
    "((9**64)**64)**64": False,
    "1 << 99999999": False,
    "(s0 + s1 + s2 + s3)**300": False,
    "Mul(" + ", ".join(f"Add(s{n}, Integer({n}))" for n in range(40)) + ")": False,
    "*".join(["(s0 + s1)"] * 1500) + "*(s0 + s1 + s2)**60": False,
    "Mod(Pow(Symbol('s0'), Integer(4000)), Integer(7))": False,
    "floor(Float('1e100000000'))": False,
    "Float()": False,
    "floor(asin(Float('0.5', 20000000)))": False,
    "sqrt(Integer(" + "9" * 4000 + "))": False,
    "Max(" + ", ".join(f"s{n}*s{n + 1} + {n}" for n in range(30)) + ")": True,
    "Max(" + ", ".join(f"s{n}*s{n + 1} + {n}" for n in range(100)) + ")": False,
    "FloorDiv(Symbol('9**9**9').name, 1)": False,
    "round(s0, 99999999)": False,
    "round(s0, ndigits=99999999)": False,
    "RoundDecimal(5, -99999999)": False,
    "RShift(1, 99999999)": False,
    "Eq((10 + 2*6**Rational(1, 2))**Rational(1, 2), s0)": False,
    "Eq(cos(acos(-1)/61), 0)": False,
    "Pow(Integer(9), Pow(Integer(9), Integer(9)))": False,
    "floor(exp(exp(20)))": False,
    "2*(s0 + 1)**2 + s1**3 + Pow(Symbol('s2', integer=True), Integer(-1))": True,
    "Symbol('open(1)')": False,
    "Max('open', 1)": False,
    "Max(open, 1)": False,
    "s0.func(1)": False,
    "(S)(s0)": False,
    "\uff4fpen(s0)": False,
    "[Abs() for Abs in [init_session]]": False,
    "[Abs() if 1 else 1for Abs in [init_session]]": False,
}


@each("formula", FORMULAS)
def test_a_formula_only_reckons(formula: str) -> None:
    text = of_model(as_expr={"expr_str": formula, "hint": None})
    assert has_programs("p/models/model.json", text) != FORMULAS[formula]


GUARDS = {
    "2 <= L['x'].size()[0] and L['x'].size()[0] <= 99": True,
    "Mod(L['args'][0][0].size()[1], 16) == 0": True,
    "__import__('os').system('true')": False,
    "open('/x', 'w')": False,
    "(eval)('1')": False,
    "[eval][0]('1')": False,
    "max('1', '2', key=eval)": False,
    "L['x'].stride()[0] == L['d']['b 1x1/d'] or math.isnan(L['y'])": True,
    "torch._sym_sqrt(torch.sym_float(L['x'].size()[0])) >= 2": True,
    "L['x'].a.size()[0] & 3 | 1 < 2": True,
    "(L['x'].size()[0] + 1) % 2 == 0 and not (L['f'] is None)": True,
    "torch.os.system('true')": False,
    "torch.sym_float.__globals__['os']": False,
    "L['x'].system('true')": False,
    "'true'.format(L['x'])": False,
    "max(*L['x'])": False,
    "max(1, 2, key=L['f'])": False,
    "-" * 50_000 + "1 == 1": False,
    "1 + " * 4000 + "1 == 1": False,
    "not " * 4000 + "1": False,
    "1 if 1else 0": True,
    "torch.os.system ('true')": False,
    "1)\nfrom os import system as size\nsize('true'": False,
    "(torch.os.system)('true')": False,
    "f'{open(chr(47))}'": False,
    "''f'{open(chr(47))}'": False,
    "\uff4fpen('/x', 'w')": False,
    "[f('true') for f in [torch.os.system]]": False,
    "[f('true') if 1 else ...for f in [L['x'].system]]": False,
    "[f('true') if 1 else 1.for f in [L['x'].system]]": False,
    "[f('true') if 1 else 1.e5jfor f in [L['x'].system]]": False,
    "[f('true') if 1 else 1.5for f in [L['x'].system]]": False,
    "[f('true') if 1 else 'a'for f in [L['x'].system]]": False,
    "torch.ctypes.cdll['/x.so'] == 1": False,
    "\" + __import__('os').system('true') + \" == 1": False,
    "L['torch']['for'].size()[0] == 1": True,
}


@each("guard", GUARDS)
def test_a_guard_only_compares(guard: str) -> None:
    assert has_programs("p/models/model.json", of_model(guards_code=[guard])) != GUARDS[guard]


TARGETS = {
    "torch.ops.aten.add.Tensor": True,
    "torch.ops.aten.__and__.Scalar": True,
    "torch.ops.higher_order.cond": True,
    "torch.sym_max": True,
    "torch._functorch.predispatch._add_batch_dim": True,
    "_operator.floordiv": True,
    "math.trunc": True,
    "add": True,
    "torch.ops.image.write_file.default": False,
    "torch.ops.import_module": False,
    "torch.ops.import_module.__call__": False,
    "torch.ops.__class__.import_module": False,
    "torch.ops.load_library.__call__": False,
    "torch.hub.load": False,
    "torchvision.io.write_file": False,
    "_operator.methodcaller": False,
    "_operator.call": False,
    "math.__loader__.load_module": False,
}


@each("target", TARGETS)
def test_an_operator_only_computes(target: str) -> None:
    for found in ({"nodes": [{"target": target}]}, {"arg": {"as_operator": target}}):
        assert has_programs("p/models/model.json", of_model(**found)) != TARGETS[target]


LAYOUTS = {
    '[1, {"type": "builtins.dict", "context": "[\\"a\\"]", "children_spec": []}]': True,
    '[1, {"context": "[{\\"__enum__\\": true, \\"fqn\\": \\"mypkg:Colour\\", \\"name\\": \\"RED\\"}]"}]': False,
    '[1, {"context": "{\\"__enum__\\": true, \\"fqn\\": \\"antigravity\\", \\"name\\": \\"\\"}"}]': False,
    '[1, {"context": "[{\\"__enum__\\": true, \\"fqn\\": \\"ctypes:cdll\\", \\"name\\": \\"./x.so\\"}]"}]': False,
    '[1, {"context": "[{\\"__enum__\\": 1, \\"\\\\u0066qn\\": \\"ctypes:cdll\\", \\"name\\": \\"./x.so\\"}]"}]': False,
    '[1, {"context": "[\\"a\\", \\"b c/d\\", \\"[]\\", \\"null\\"]"}]': True,
    '[1, {"context": "[\\"a:__import__(0)\\"]"}]': False,
    '[1, {"context": "[[\\"a=x\\"]]"}]': False,
    '{"default_factory_module": "builtins", "default_factory_name": "list"}': True,
    '{"default_factory_module": "os", "default_factory_name": "abort"}': False,
    '{"as_string": "a(b)"}': False,
    "[" * 100_000 + "]" * 100_000: False,
}


@each("layout", LAYOUTS)
def test_a_layout_of_arguments_imports_nothing_that_reaches_the_system(layout: str) -> None:
    assert has_programs("p/models/model.json", of_model(out_spec=layout)) != LAYOUTS[layout]


@each("name", ["torch.add", "x y"])
def test_a_name_of_a_value_is_one_variable(name: str) -> None:
    for found in ({"as_tensor": {"name": name}}, {"forward_arg_names": [name]}, {"as_sym_int": {"as_name": name}}):
        assert has_programs("p/models/model.json", of_model(**found))
    assert not has_programs("p/models/model.json", of_model(fqn=name))


@each("name", ["x", "b_b_running_mean", "x=__import__('os').abort()", "x: eval(1)", "a\nb"])
def test_a_name_is_no_code(name: str) -> None:
    for found in (
        {"as_tensor": {"name": name}},
        {"forward_arg_names": [name]},
        {"tensor_values": {name: {"dtype": 7}}},
    ):
        assert has_programs("p/models/model.json", of_model(**found)) == (not re.fullmatch(r"[\w.]+", name))


class Sizes(torch.nn.Module):
    """Has sizes of many kinds, branches, and inputs in lists and dicts."""

    def forward(
        self, x: torch.Tensor, given: dict[str, list[torch.Tensor]], n: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        count: Any = n.item()
        torch._check(count >= 2)
        torch._check(count <= x.shape[0])
        halves = torch.zeros(torch.sym_max(x.shape[0] // 2, x.shape[1] % 4) + int(x.shape[0] * 0.7) + x.shape[0] ** 2)
        rows = torch.vmap(lambda row: row.sum() * 2)(x)
        with torch.no_grad():
            found = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        return {"a b": halves, "c/d": rows + given["k 1x1"][0], "e": found[:count] + x.view(-1, 2).sum()}


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_what_torch_exports_is_a_program_that_computes(tmp_path: Path) -> None:
    auto = torch.export.Dim.AUTO
    inputs = (torch.ones(6, 8), {"k 1x1": [torch.ones(6)]}, torch.tensor(3))
    sizes = {"x": {0: auto, 1: auto}, "given": {"k 1x1": [{0: auto}]}, "n": None}
    program = torch.export.export(Sizes(), inputs, dynamic_shapes=sizes)
    dim = torch.export.Dim("d", min=2, max=64)
    multiple = torch.export.export(Same(), (torch.ones(8),), dynamic_shapes=({0: 4 * dim},))
    for number, one in enumerate((program, program.run_decompositions(), multiple)):
        path = tmp_path / f"{number}.pt2"
        torch.export.save(one, path)
        assert check(path).grade == "program"
        assert row(str(path))["grade"] == "program"


def test_a_package_of_source_says_that_its_code_runs(tmp_path: Path) -> None:
    from torch.package import PackageExporter

    path = tmp_path / "x.pt"
    with PackageExporter(str(path)) as exporter:
        exporter.save_source_string("mypkg.net", "import os\nVALUE = 1\n")
        exporter.save_pickle("model", "model.pkl", {"w": 1})
    report = check(path)
    assert report.error is not None
    finding = next(one for one in report.findings if one.code == "CK217")
    assert "mypkg.net" in finding.message
    assert report.grade == "code"
    assert "runs code of mypkg" in report.verdict


def test_native_code_in_an_exported_program_is_said_to_run(exported: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    path.write_bytes(exported)
    assert check(path).grade == "program"
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/data/aotinductor/net/made.wrapper.cpp", "int main() {}")
    with pytest.raises(RuntimeError):  # it goes about making a runner of it
        torch.export.load(str(path))

    report = check(path)
    finding = next(one for one in report.findings if one.code == "CK217")
    assert "data/aotinductor/net" in finding.message
    assert report.grade == "code"
    assert "which has native code in data/aotinductor/net" in str(report)


def test_native_code_beside_the_folders_for_it_is_said_to_run(exported: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    path.write_bytes(exported)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/data/aotinductor/net.wrapper.so", b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"net\.wrapper\.so"):  # it goes about making a runner of it
        load_pt2(str(path))
    assert check(path).grade == "code"


SETTINGS = {
    "plain": ("encoder:\n  _target_: os.mkdir\n  path: x\n", "system", "os.mkdir"),
    "in one line": ('encoder: {"_target_": "subprocess.Popen", args: [ls]}\n', "system", "subprocess.Popen"),
    "spelled by numbers": ('encoder:\n  "\\x5ftarget\\u005f": os.mkdir\n', "system", "os.mkdir"),
    "over two lines": ('encoder:\n  ? "_tar\\\n    get_"\n  : os.mkdir\n', "system", "cannot be followed"),
    "folded": ("encoder:\n  _target_: >-\n    os.mkdir\n", "system", "cannot be followed"),
    "by an alias": ("a: &a os.mkdir\nencoder:\n  _target_: *a\n", "system", "cannot be followed"),
    "a key by an alias": ("a: &a _target_\nencoder:\n  *a : os.mkdir\n", "system", "cannot be followed"),
    "by another value": ("a: os.mkdir\nencoder:\n  _target_: ${a}\n", "system", "cannot be followed"),
    "the class": ("target: os.mkdir\n", "system", "os.mkdir"),
    "honest": ("target: nemo.A\n# _target_ is called\nx:\n  _target_: torch.nn.ReLU # it is\n", "code", "nemo.A"),
    "nothing": ("encoder:\n  _target_: null\n  labels: ['my_target_x', \"\\u2581\"]\n", "data", None),
}


@pytest.mark.parametrize("which", SETTINGS)
def test_what_settings_have_called_is_told(which: str, tmp_path: Path) -> None:
    text, grade, told = SETTINGS[which]
    weights = io.BytesIO()
    torch.save({"w": torch.ones(3)}, weights)
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in (("./model_config.yaml", text.encode()), ("./model_weights.ckpt", weights.getvalue())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

    report = check(path)
    assert report.grade == grade
    code = {"system": "CK216", "code": "CK217"}.get(grade)
    assert [code] == [one.code for one in report.findings if one.code in ("CK216", "CK217")] or code is None
    assert told is None or any(told in one.message for one in report.findings)
    assert ("CK216" in invoke(["inspect", str(path)]).output) == (grade == "system")
