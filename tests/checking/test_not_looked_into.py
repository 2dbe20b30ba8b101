"""What of a folder or an archive is not looked into is said; bytes in texts and further arrays are looked into."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
import zlib
from base64 import b64encode, encodebytes, urlsafe_b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from ckptool import check, scan
from tests import build
from tests.build import (
    call,
    floats,
    legacy,
    named,
    pickled,
    safetensors,
    storage,
    tar_file,
    tensor,
    torch_zip,
    zip_file,
)
from tests.each import each
from tests.program import invoke, run
from tests.scale import exhaustive, some, times

EVIL = pickled(call(named("os", "system"), "true"))
GOOD = safetensors({"w": floats()})
WEIGHTS = torch_zip({"w": tensor(storage())}, {"0": floats()})
HDF5 = b"\x89HDF\r\n\x1a\n"
LAMBDA = b'{"class_name": "Functional", "config": {"layers": [{"class_name": "Lambda"}]}}'


def written(place: Path, files: dict[str, bytes]) -> Path:
    return build.written(place, {"model.safetensors": GOOD, **files})


def codes(path: Path) -> set[str]:
    return {one.code for one in check(path).findings if one.severity != "info"}


def exit_code(path: Path, *options: str) -> int:
    return invoke(["check", str(path), *options]).exit_code


def serialized(payload: bytes, **more: object) -> bytes:
    return json.dumps({"policy_class": {":type:": "abc", ":serialized:": b64encode(payload).decode()}, **more}).encode()


def test_a_scan_from_python_says_which_folders_it_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inside, outside = build.written(tmp_path / "in", {"model.safetensors": GOOD}), tmp_path / "out"
    build.written(outside, {"other.safetensors": GOOD})
    (inside / "linked").symlink_to(outside, target_is_directory=True)

    assert len(list(scan(inside))) == 1
    assert (
        f"left out: 1 folder of version control or of tools, or behind links that lead elsewhere: {inside / 'linked'}"
        in (caplog.text)
    )


IN_TEXT = {
    "as stable-baselines3 has it": serialized(EVIL),
    "in lines": json.dumps({"a": [1, {"b": encodebytes(EVIL * 3).decode()}]}).encode(),
    "without a name for it": json.dumps([b64encode(EVIL).decode()]).encode(),
    "in the alphabet of addresses": json.dumps({"x": urlsafe_b64encode(EVIL + b"\xfb\xff" * 30).decode()}).encode(),
    "with other characters between": json.dumps({":serialized:": "!!".join(b64encode(EVIL).decode())}).encode(),
    "with escapes": serialized(EVIL).replace(b"g", rb"\u0067", 40),
    "behind blanks": b" \n" * 300 + serialized(EVIL),
    "behind blanks and with other characters": serialized(b"\0").replace(
        b': "AA==', b" " * 200 + b': "' + b"!!".join(b64encode(EVIL)[at : at + 1] for at in range(len(b64encode(EVIL))))
    ),
    "with other escapes": serialized(b"\0").replace(b"AA==", "\\u00e9".join(b64encode(EVIL).decode()).encode()),
    "with an escaped backslash": serialized(EVIL).replace(b'": "gA', rb'": "\u005cgA'),
    "with an escaped quote": serialized(EVIL).replace(b'": "gA', rb'": "g\u0022A'),
    "behind a mark": b"\xef\xbb\xbf  " + serialized(EVIL),
    "of protocol 0": serialized(b"cos\nsystem\n(S'true'\ntR."),
    "of protocol 4": serialized(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."),
    "packed": serialized(gzip.compress(EVIL)),
    "behind much else": b'{"words": ['
    + b'"a word of many", ' * 900_000
    + b'""]'
    + b', "x": "'
    + b64encode(EVIL)
    + b'"}',
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=exhaustive if "much" in name else ()) for name in IN_TEXT])
def test_a_pickle_that_a_text_of_json_has_as_base64_is_looked_into(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_bytes(zip_file({"data": IN_TEXT[name], "policy.pth": WEIGHTS}, deflated=["data"]))
    (tmp_path / "model.tar").write_bytes(tar_file({"data": IN_TEXT[name], "policy.pth": WEIGHTS}))
    for path in (tmp_path / "model.zip", tmp_path / "model.tar", written(tmp_path / "x", {"any": IN_TEXT[name]})):
        assert "CK205" in codes(path)
        assert exit_code(path, "--fail-on", "system") == 1


def test_json_that_is_read_in_parts_has_no_objects(tmp_path: Path) -> None:
    data = b" " * ((1 << 24) - 60) + serialized(EVIL).replace(b"gA", b"!gA")
    (tmp_path / "a.zip").write_bytes(zip_file({"data": data, "policy.pth": WEIGHTS}))
    assert exit_code(tmp_path / "a.zip", "--fail-on", "code") == 1
    words = json.dumps({"serialized": 5, "x": ["a word of many"] * (1 << 20)}).encode()
    assert codes(written(tmp_path / "x", {"vocabulary.json": words})) == set()


IN_TABLES = {
    "a table": b"id,name,model\n1,first,abc\n2,second," + b64encode(EVIL) + b"\n",
    "lines of a log": b"a word\n" * 9 + encodebytes(pickled(tuple(range(99)))[:-1] + b"0" + EVIL[2:]),
    "fields with quotes": b'x;y\r\n"' + urlsafe_b64encode(EVIL) + b'";"9"\r\n',
}


@pytest.mark.parametrize("name", IN_TABLES)
def test_a_pickle_that_another_text_has_as_base64_is_looked_into(name: str, tmp_path: Path) -> None:
    place = written(tmp_path / "x", {"results.csv": IN_TABLES[name]})
    assert "CK205" in codes(place)
    for path in (place, place / "results.csv"):  # a file has one verdict
        assert exit_code(path, "--fail-on", "system") == 1
        assert exit_code(path, "-r", "--fail-on", "system") == 1
    assert invoke(["scan", place, "--fail-on", "system", "--jobs", "1"]).exit_code == 1


def two_tars(between: bytes = b"") -> bytes:
    return tar_file({"weights.pth": WEIGHTS}) + between + tar_file({"evil.pkl": EVIL})


TARS = {
    "one behind the other": two_tars(),
    "with zeros between": two_tars(bytes(512 * 99)),
    "packed": gzip.compress(two_tars(b"A" * 512)),
}


@pytest.mark.parametrize("name", TARS)
def test_a_tar_behind_a_tar_is_not_looked_into_and_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.tar").write_bytes(TARS[name])
    for path in (tmp_path / "model.tar", written(tmp_path / "x", {"more.tar": TARS[name]})):
        assert "CK209" in codes(path)
        assert exit_code(path, "--fail-on", "system") == 1


def test_what_an_honest_text_has_is_said_and_others_are_no_finding(tmp_path: Path) -> None:
    code = pickled(call(named("cloudpickle.cloudpickle", "_make_function"), 1))
    (tmp_path / "a.zip").write_bytes(zip_file({"data": serialized(code), "policy.pth": WEIGHTS}))
    assert codes(tmp_path / "a.zip") == {"CK206"}
    words = {
        "a" * 40: "gASVabcdefghijklmnopqrstuvw",
        "image": b64encode(b"\x89PNG" + bytes(99)).decode(),
        "t": "gA" * 30,
    }
    others = [b64encode(bytes([first]) + b"an honest text of some length").decode() for first in range(256)]
    text = json.dumps({**words, "others": others, "vocabulary": [f"tokenizer_word_number_{n}" for n in range(999)]})
    assert codes(written(tmp_path / "x", {"tokenizer.json": text.encode()})) == set()


def two_arrays(first: np.ndarray, second: bytes = EVIL) -> bytes:
    file = BytesIO()
    np.save(file, first)
    np.save(file, np.array([None]))
    begin = file.getvalue().rindex(b"\n") + 1
    return file.getvalue()[:begin] + second


ARRAYS = {
    "floats": np.ones((3, 4), np.float32),
    "none": np.ones((0, 4)),
    "a number": np.array(1.0),
    "texts": np.array(["a", "bcd"]),
    "dates": np.array(["2026-01-01"], "M8[s]"),
    "fields": np.zeros(3, [("a", "<f4"), ("<f4", "<i8", (2,))]),
    "in columns": np.asfortranarray(np.ones((2, 3), np.int8)),
    "objects": np.array([{"a": 1}, "x"], object),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_second_array_in_a_file_is_looked_into(name: str, tmp_path: Path) -> None:
    data = two_arrays(ARRAYS[name])
    (tmp_path / "a.npy").write_bytes(data)
    assert "CK205" in codes(tmp_path / "a.npy")
    assert "CK205" in codes(written(tmp_path / "x", {"a.npy": data, "b.npz": zip_file({"b.npy": data})}))
    many = BytesIO()
    for _ in range(40):
        np.save(many, ARRAYS[name])
    assert codes(written(tmp_path / "y", {"many.npy": many.getvalue()})) <= {"CK206"}


@each(
    ("payload", "count"),
    [(EVIL, 1), (EVIL, 3), (gzip.compress(EVIL), 1), (pickled(call(named("builtins", "eval"), "1")), 1)],
)
def test_a_pickle_behind_arrays_is_looked_into(payload: bytes, count: int, tmp_path: Path) -> None:
    several = BytesIO()
    for _ in range(count):
        np.save(several, ARRAYS["floats"])
    data = several.getvalue() + payload
    expected = {"CK205"} if not payload.startswith(b"\x1f\x8b") else set()  # no loader unpacks what is behind an array
    assert codes(written(tmp_path / "x", {"a.npy": data})) == expected | {"CK209"}


MANY = times(300, 1300)
SLOW = {
    "headers of numpy": b"\x93NUMPY\1\0\1\0(" * 100 * MANY,
    "headers of numpy, and pickles": b"\x93NUMPY\1\0\1\0((N." * 100 * MANY,
    "escaped backslashes": b'{"a": "' + b"\\u005c" * 250 * MANY + b'"}',
    "escaped line ends": b'{"a": "\\u0041' + b"\\n" * 1000 * MANY + b'"}',
    "escaped characters of all kinds": b'{"serialized": "%s"}'
    % (b"".join(b"\\u00%02x" % n for n in range(35, 92)) * 5 * MANY),
}


@pytest.mark.parametrize("name", SLOW)
def test_odd_headers_and_escapes_take_time_and_memory_by_their_size(name: str, tmp_path: Path) -> None:
    place = written(tmp_path / "x", {"a.json": SLOW[name]})
    start = time.process_time()
    check(place)
    assert time.process_time() - start < 3
    if name.startswith("escaped"):
        tracemalloc.start()
        try:
            check(place)
            assert tracemalloc.get_traced_memory()[1] < (12 << 20) + 8_000 * MANY
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "part"),
    [("a.yaml", b"&"), ("MLmodel", b'#" code\n'), ("config.json", b'"\\'), ("model_config.yaml", b"&")],
)
def test_odd_settings_take_time_by_their_size(name: str, part: bytes, tmp_path: Path) -> None:
    place = written(tmp_path / "x", {name: part * (1 << 16), "a.py": b""})
    start = time.process_time()
    check(place)
    assert time.process_time() - start < 3


# Python's gzip goes on behind zeros, as tapes leave them.
@each(("first", "zeros"), [*((b"", zeros) for zeros in (1, 4, 512, 70_000)), (EVIL[:20], 4), (pickled(1), 4)])
def test_what_follows_zeros_in_a_gzip_is_looked_into(first: bytes, zeros: int, tmp_path: Path) -> None:
    rest = EVIL[20:] if first == EVIL[:20] else EVIL
    data = gzip.compress(first) + bytes(zeros) + gzip.compress(rest)
    assert gzip.decompress(data) == first + rest
    assert "CK205" in codes(written(tmp_path / "x", {"cache.pkl.gz": data}))


def test_weights_in_a_gzip_are_those_that_python_reads(tmp_path: Path) -> None:
    other = torch_zip({"w": tensor(storage())}, {"0": bytes(range(16))})
    first = tar_file({"config.json": b"{}", "weights.th": WEIGHTS})[:-1024].rstrip(b"\0")
    first += bytes(-len(first) % 512)
    data = gzip.compress(first) + bytes(4) + gzip.compress(tar_file({"weights.th": other}))
    (tmp_path / "model.tar.gz").write_bytes(data)
    done = invoke(["migrate", str(tmp_path / "model.tar.gz"), str(tmp_path / "o.safetensors")])
    assert done.exit_code != 0 or (tmp_path / "o.safetensors").read_bytes().endswith(bytes(range(16)))


def beyond() -> bytes:
    return b"\x80\4\x8e" + (80 << 20).to_bytes(8, "little") + bytes(80 << 20) + b"0" + EVIL[2:]


def behind_other_bytes() -> bytes:
    found = bytearray(zip_file({"df": EVIL}))
    found[22:26] = b"\7\0\0\0"
    return b"A" * ((1 << 26) + 100) + found


BEYOND: dict[str, Callable[[], bytes]] = {
    "scaler.joblib": lambda: zlib.compress(beyond()),
    "embeddings.dat": lambda: gzip.compress(beyond(), 1),
    "frame.dat": behind_other_bytes,
    "cache.dat": lambda: b"N." * 60_000 + EVIL,
}


@pytest.mark.parametrize("name", some(BEYOND, 3))
def test_a_file_of_a_folder_that_is_more_than_is_looked_at_is_said(name: str, tmp_path: Path) -> None:
    place = written(tmp_path / "x", {name: BEYOND[name]()})
    report = check(place)
    assert {"CK205", "CK209"} & {one.code for one in report.findings}
    assert "what other files of the folder run is said above" in report.loading[0]


def gzip_of_any_head(data: bytes) -> bytes:
    """Return a gzip whose head says that a checksum of the head follows, which is wrong: Python does not look at it."""
    packed = gzip.compress(data)
    return packed[:3] + b"\2" + packed[4:10] + b"\0\0" + packed[10:]


OTHER_PROGRAMS = {
    "a model of Keras": {"m.h5": HDF5 + bytes(600) + b"model_config\0" + LAMBDA},
    "the same under any name": {"m": HDF5 + bytes(2 << 20) + b"model_config\0" + LAMBDA},
    "the same behind a block": {"m.hdf5": bytes(512) + HDF5 + b"model_config\0" + LAMBDA},
    "a new one": {"m.keras": zip_file({"metadata.json": b"{}", "config.json": LAMBDA, "model.weights.h5": HDF5})},
    "TensorFlow": {"saved_model/saved_model.pb": b"\x08\1"},
    "HyperPyYAML": {"hyperparams.yaml": b"x: !apply:os.system ['true']\n"},
    "HyperPyYAML that makes objects": {"hyperparams.yaml": b"a: 1\nmodel: !new:os.system\n"},
    "PyYAML": {"args.yml": b'!!python/object/apply:os.system ["true"]\n'},
    "PyYAML with whole tags": {"args.yml": b'!<tag:yaml.org,2002:python/object/apply:os.system> ["true"]\n'},
    "PyYAML with escapes": {"args.yml": b'!!pyth%6fn/object/apply:os.system ["true"]\n'},
    "PyYAML of 16 bits": {"args.yaml": 'a: !!python/object/apply:os.system ["true"]\n'.encode("utf-16")},
    "PyYAML with a prefix": {"a/b/args.yml": b'%TAG ! tag:x\n---\n!apply:os.system ["true"]\n'},
    "Hydra": {"conf/config.yaml": b"model:\n  _target_: os.system\n  command: 'true'\n"},
    "Hydra in JSON": {"config.json": b'{"model": {"_target_": "os.system", "command": "true"}}'},
    "Hydra with escapes": {"args.json": rb'{"a": {"_t\u0061rget_": "os.system"}}'},
    "PyYAML behind a comment": {"a.yml": '# a\u0085!!python/object/apply:os.system ["true"]\n'.encode()},
    "PyYAML in a text": {"a.yml": b'{a: "x\n# ", b: !!python/object/apply:os.system ["true"]}\n'},
    "Hydra behind a number": {"a.yml": rb'{"\x0a#": 1, _target_: os.system}'},
    "PyYAML of a wide #": {"a.yml": 'a: 1\n\u2323: !!python/object/apply:os.system ["true"]\n'.encode("utf-16")},
    "PyYAML with a mark": {"a.yml": b'\xef\xbb\xbf%TAG ! x:py\n---\n!thon/object/apply:os.system ["true"]\n'},
    "Hydra with numbers": {"a.yaml": rb'"\U0000005ftarget_": os.system'},
    "Hydra in two lines": {"a.yaml": b'? "_tar\\\n   get_"\n: os.system'},
    "Hydra and a comment": {"a.yaml": b"? _target_ # the name\n: os.system"},
    "Hydra elsewhere": {"a.yaml": b"a: &k _target_\nb:\n  *k : os.system"},
    "SQLite": {"cache.db": b"SQLite format 3\0" + bytes(84) + b64encode(EVIL)},
    "SQLite of a framework": {"optuna.sqlite3": b"SQLite format 3\0" + EVIL},
    "SQLite under any name": {"a/b": b"SQLite format 3\0" + bytes(99)},
    "TorchServe": {"t.mar": zip_file({"MAR-INF/MANIFEST.json": b"{}", "handler.py": b"import os"})},
    "MLflow": {"MLmodel": b"flavors:\n  python_function:\n    loader_module: evilmod\n", "code/evilmod.py": b"1"},
    "MLflow with a tag": {"MLmodel": b"loader_module: !!str evilmod\n"},
    "MLflow in two lines": {"MLmodel": b"loader_module: >-\n  evilmod\n"},
    "MLflow with numbers": {"MLmodel": rb'"loader_m\x6fdule": evilmod'},
    "MLflow with code": {"MLmodel": b"loader_module: mlflow.sklearn\ncode: code\n", "code/x.py": b"1"},
    "MLflow from a name": {"MLmodel": b"model_code_path: nullable.py\n", "nullable.py": b"1"},
    "a gzip that Python unpacks": {"a.dat": gzip_of_any_head(b"a") + gzip_of_any_head(EVIL)},
    "MLflow from code": {"MLmodel": b"flavors:\n  python_function:\n    model_code_path: m.py\n", "m.py": b"1"},
}


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_a_program_of_another_kind_is_said(name: str, tmp_path: Path) -> None:
    for place in (written(tmp_path / "x", OTHER_PROGRAMS[name]), tmp_path / "x.zip"):
        if place.suffix:
            place.write_bytes(zip_file({"model.pth": WEIGHTS, **OTHER_PROGRAMS[name]}))
        assert {"CK209", "CK114"} & codes(place)
        assert codes(place) <= {"CK209", "CK114", "CK217"}
        assert exit_code(place, "--fail-on", "system") == 1
        assert "runs nothing" not in str(check(place).loading).partition("; what other")[2]


NAMED = {
    "auto_map": {"config.json": b'{"auto_map": {"AutoModel": "modeling_x.Net"}}', "modeling_x.py": b"class Net: pass"},
    "auto_map in a list": {"tokenizer_config.json": b'{"auto_map": ["t.Tok", null]}', "t.py": b"class Tok: pass"},
    "auto_map elsewhere": {"config.json": b'{"auto_map": {"AutoModel": "someone/else--modeling_x.Net"}}'},
    "auto_map with escapes": {
        "config.json": rb'{"auto_map": {"AutoModel": "modelin\u0067_x.Net"}}',
        "modeling_x.py": b"",
    },
    "a folder below": {"a/config.json": b'{"auto_map": {"AutoModel": "x.y.Net"}}', "a/x/y.py": b"class Net: pass"},
    "a package": {"config.json": b'{"auto_map": {"AutoModel": "pkg.Net"}}', "pkg/__init__.py": b"class Net: pass"},
    "a name with a hyphen": {"config.json": b'{"auto_map": {"A": "my-net.Net"}}', "my-net.py": b""},
    "a name with a slash": {"config.json": rb'{"auto_map": {"A": "x\/\/y.Net"}}', "x/y.py": b""},
    "settings of NeMo for a class": {"model_config.yaml": b'---\n  "target": somebodys.package.Net\n'},
    "settings of NeMo in a line": {"model_config.yaml": b"{a: 1, target: somebodys.package.Net}"},
    "settings of NeMo": {"model_config.yaml": b"model:\n  _target_: somebodys.package.Net\n"},
    "sentence-transformers": {"modules.json": b'[{"idx": 0, "type": "mod.T"}]', "mod.py": b"class T: pass"},
    "diffusers": {"model_index.json": b'{"_class_name": "P", "unet": ["my_unet", "N"]}', "unet/my_unet.py": b""},
    "a handler": {"handler.py": b"class EndpointHandler: pass"},
    "generation": {"custom_generate/generate.py": b"def generate(): pass"},
}


@pytest.mark.parametrize("name", NAMED)
def test_source_that_settings_name_is_a_warning(name: str, tmp_path: Path) -> None:
    place = written(tmp_path / "x", NAMED[name])
    assert "CK217" in codes(place)
    assert codes(place) <= {"CK217", "CK164", "CK165"}
    assert exit_code(place, "--fail-on", "system") == 0
    for verb in (["check", "-r"], ["scan", "--jobs", "1"]):
        assert invoke([*verb, str(place), "--fail-on", "code"]).exit_code == 1
    (tmp_path / "x.zip").write_bytes(zip_file({"model.pth": WEIGHTS, **NAMED[name]}))
    assert "CK217" in codes(tmp_path / "x.zip")


def test_honest_files_beside_a_model_are_no_finding(tmp_path: Path) -> None:
    honest = {
        "train.py": b"import torch\n",
        "model.py": b"class Model: pass\n",
        "config.json": b'{"model_type": "bert", "architectures": ["BertModel"], "train": "model", "auto_map": {}}',
        "adapter_config.json": b'{"auto_mapping": null, "peft_type": "LORA"}',
        "old/config.json": b'{"auto_map": {"AutoModel": "modeling_gone.Net"}}',
        "modules.json": b'[{"idx": 0, "type": "sentence_transformers.models.Transformer"}]',
        "hparams.yaml": b"# made with !new: tags once\nlr: 0.1\nshape: !!python/tuple [1, 2]\nsay: what!\n",
        "tf_model.h5": HDF5 + bytes(5000) + b"weight_names",
        "words.txt": b"an_honest_word_of_some_length\n" * 999 + b"gASVabcdefghijklmnopqrstuvw\n" + b"gA" * 40,
        "config/train.yaml": b"# _target_: os.system\nmy_target_: a\n_target_dir: b\nsay: the _target_ of it\n",
        "config/tests/model_config.yaml": b"loss:\n  target: 0.5\n  target_: 1\n",
        "README.md": b"Use `!apply:` or `!!python/object` in YAML.",
        "x^2": b"x^2 + y^2 is a text",
        "MLmodel": b"flavors:\n  python_function:\n    loader_module: mlflow.pytorch\n    model_code_path: null\n"
        b"  sklearn:\n    code: null\n    source_code: a.py\n",
        ".gitattributes": b"*.bin filter=lfs\n",
        "broken.dat": gzip.compress(bytes(99))[:-9],
    }
    place = written(tmp_path / "x", honest)
    assert check(place).findings == ()
    assert exit_code(place) == 0


def test_a_link_that_leads_out_of_a_folder_is_said(tmp_path: Path) -> None:
    place = written(tmp_path / "x", {"below/a.txt": b"text", ".git/evil.pkl": EVIL})
    outside = written(tmp_path / "outside", {"evil.pkl": EVIL})
    links = {
        "cache.dat": "../outside/evil.pkl",
        "linked": "../outside",
        "below/deep.dat": str(outside / "evil.pkl"),
        "seen": "below",
        "seen.txt": "below/a.txt",
        "dangling": "../nothing",
        "round": "..//x",
        "hidden.pkl": ".git/evil.pkl",
    }
    for name, target in links.items():
        (place / name).symlink_to(target)
    found = [one for one in check(place).findings if one.severity != "info"]
    assert {one.code for one in found} == {"CK209"}
    told = {str(Path(one.path or "").relative_to(place)) for one in found}
    assert told == {"cache.dat", "linked", "below/deep.dat", "hidden.pkl"}
    assert "a link that leads out of the folder, which is not followed" in found[0].message


LINKED = {
    "Hydra": ("CK209", "config.yaml", b"_target_: os.system\n"),
    "MLflow": ("CK209", "MLmodel", b"loader_module: evilmod\n"),
    "NeMo": ("CK216", "model_config.yaml", b"target: os.system\n"),
    "TensorFlow": ("CK209", "saved_model.pb", b"\x08\1"),
    "auto_map": ("CK217", "config.json", b'{"auto_map": {"AutoModel": "x.Net"}}'),
}


@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_folder_is_read_by_its_own_name(name: str, tmp_path: Path) -> None:
    code, link, content = LINKED[name]
    place = written(tmp_path / "x", {"below/a.txt": content, "x.py": b""})
    (place / link).symlink_to("below/a.txt")
    assert codes(place) == {code}


def test_folders_of_version_control_are_counted_and_said(tmp_path: Path) -> None:
    place = written(tmp_path / "x", {".git/objects/aa": EVIL, "a/.venv/x.pkl": EVIL})
    (found,) = check(place).findings
    assert (found.code, found.severity) == ("CK210", "info")
    assert found.message == "not looked into: 2 folders of version control or tools: .git, a/.venv"
    for verb in ("scan", "check", "inspect"):
        options = ["--jobs", "1"] if verb == "scan" else ["-b", "-r"]
        result = run(verb, *options, place)
        assert "left out     2 folders of version control or of tools" in result.stderr


def test_hidden_files_and_folders_are_looked_into(tmp_path: Path) -> None:
    place = written(tmp_path / "x", {".hidden.pt": WEIGHTS, ".vector_cache/glove.pt": WEIGHTS, ".c/a.dat": EVIL})
    result = invoke(["scan", "--jobs", "1", str(place)])
    grades = {Path(row["path"]).name: row["grade"] for row in map(json.loads, result.stdout.splitlines())}
    assert grades == {"model.safetensors": "data", ".hidden.pt": "data", "glove.pt": "data", "a.dat": "system"}
    (finding,) = [one for one in check(place).findings if one.code == "CK171"]
    assert finding.command is not None
    shown = invoke(finding.command.split()[1:]).output
    assert ".hidden.pt" in shown
    assert "glove.pt" in shown
    assert "a.dat" in invoke(["check", "-b", "-r", str(place)]).output


def test_other_programs_are_not_passed_over_below_a_folder(tmp_path: Path) -> None:
    place = written(tmp_path / "x", {"args.yml": b'!!python/object/apply:os.system ["true"]\n', "notes.yml": b"a: 1\n"})
    result = run("check", "-b", "-r", place, code=2)
    assert "args.yml" in result.output
    assert "passed over  1 file of other kinds" in result.output
    result = invoke(["scan", "--jobs", "1", str(place)])
    rows = {Path(row["path"]).name: row for row in map(json.loads, result.stdout.splitlines())}
    assert set(rows) == {"model.safetensors", "args.yml"}
    assert rows["args.yml"]["grade"] == "unknown"


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"])
def test_a_packed_file_of_nothing_has_a_row_as_one_that_is_not_packed(content: bytes, tmp_path: Path) -> None:
    for name, data in (("x.pt", content), ("y.pt.gz", gzip.compress(content)), ("z.bin.GZ", gzip.compress(content))):
        (tmp_path / name).write_bytes(data)
    result = run("scan", "--jobs", "1", tmp_path, code=2)
    assert len(result.stdout.splitlines()) == 3


def test_a_file_without_pickles_is_said_of_the_loader_that_opens_it(tmp_path: Path) -> None:
    place = written(tmp_path / "x", {})
    said = "safetensors.torch.load_file() opens it and runs nothing: it holds no pickle"
    assert check(place).loading == (said,)
    written(place, {".hidden": EVIL})
    assert check(place).loading == (f"{said}; what other files of the folder run is said above",)


def test_bytes_that_a_tensor_of_a_plain_pickle_has_are_looked_into_by_scan(tmp_path: Path) -> None:
    held = legacy(call(named("os", "system"), "true"))
    loads = call(named("torch.storage", "_load_from_bytes"), held)
    for name, data in (
        ("p.pkl", pickled({"w": loads})),
        ("z.pth", torch_zip({"w": tensor(storage()), "x": loads}, {"0": floats()})),
    ):
        (tmp_path / name).write_bytes(data)
        for options in ([], ["--check"]):
            result = invoke(["scan", "--jobs", "1", *options, str(tmp_path / name)])
            (row,) = map(json.loads, result.stdout.splitlines())
            assert (row["grade"], row["worst"]) == ("system", "error")
