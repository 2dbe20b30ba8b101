"""What a person meets at the prompt: completion, types, single tensors, missing names, printed reports, tables."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

import numpy as np
import pytest
import torch

import ckptool
from ckptool import errors, reports
from ckptool.cli.text import with_options
from ckptool.names.renaming import Missing
from tests.against_torch import oracle
from tests.device.tags import OfADevice
from tests.loading.same import assert_same_tensor, torch_load
from tests.program import invoke

ROOT = Path(ckptool.__file__).parents[1]
VALID = ROOT / "fixtures" / "valid"

GIVEN = {"Checkpoint.__init__", "StateDict.__init__", "Checkpoint.add_attributes", "InspectReport.__init__"}
"""What nobody calls who has only what is public."""


def prompt(code: str) -> list[str]:
    """Return the words that a fresh interpreter prints."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_completion_shows_what_is_public_and_nothing_else() -> None:
    public = {*ckptool.__all__, "__version__", "errors", "fleet", "reports"}
    complete = (
        "import ckptool, rlcompleter; complete = rlcompleter.Completer({'ckptool': ckptool}).complete; "
        "import ckptool.checking.check; print(*dir(ckptool)); "  # a submodule that somebody imported
        "print(*(text.partition('(')[0] for state in range(1000) if (text := complete('ckptool.', state))))"
    )
    found = prompt(complete)

    assert set(found[: len(public)]) == public
    assert {word.removeprefix("ckptool.") for word in found[len(public) :]} == public - {"__version__"}
    assert {"load", "load_into", "LiveModel", "diff"} <= public
    assert not {name for name in public if name.islower()} & {"checking", "loading", "formats", "limits"}


def test_reports_are_completed_without_an_import_of_their_own() -> None:
    assert set(prompt("import ckptool; print(*ckptool.reports.__all__)")) == set(reports.__all__)
    assert "torch" not in prompt("import ckptool, sys; ckptool.reports; print(*sys.modules)")


def test_every_error_can_be_imported_from_the_top() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.CkptoolError):
            assert getattr(ckptool, name) is value
    with pytest.raises(AttributeError):
        ckptool.Final  # noqa: B018 - what errors imports is none


def test_types_of_public_signatures_and_fields_are_public() -> None:
    modules = (ckptool, errors, reports)
    public = {name: getattr(module, name) for module in modules for name in dir(module) if name[0].isalpha()}
    known = {id(value) for value in public.values()}
    names = {**public, "Self": Any, "NDArray": list, "Unpack": list, "Tensor": torch.Tensor}

    hidden = {
        f"{found.__module__}.{found.__name__} of {where}"
        for name, value in public.items()
        for where, annotated in annotated_in(name, value)
        for field, hint in get_type_hints(annotated, localns=names).items()
        if field in annotated.__annotations__  # a base that is not public has fields that are not
        for found in classes(hint)
        if found.__module__.startswith("ckptool") and id(found) not in known and not is_typeddict(found)
    }

    assert not hidden


def annotated_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield a public function, or a class and its public methods."""
    if inspect.isfunction(value):
        yield name, value
    if not isinstance(value, type) or not value.__module__.startswith("ckptool"):
        return
    yield name, value
    for key, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "func", member)
        where = f"{name}.{key}"
        if inspect.isfunction(function) and (key == "__init__" or key[0] != "_") and where not in GIVEN:
            yield where, function


def classes(hint: object) -> Iterator[type]:
    """Yield the classes that an annotation is made of."""
    if isinstance(hint, list):  # the arguments of a Callable
        for one in hint:
            yield from classes(one)
    elif isinstance(hint, type) and not get_args(hint):
        yield hint
    for one in get_args(hint):
        yield from classes(one)


def test_limits_show_what_is_not_the_default() -> None:
    cancellation = ckptool.Cancellation()

    assert repr(ckptool.Limits()) == "Limits()"
    assert repr(ckptool.Limits(tensors=7, inflation_ratio=4)) == "Limits(tensors=7)"
    assert repr(ckptool.Limits(cancellation=cancellation)) == f"Limits(cancellation={cancellation!r})"
    assert "= Limits()" in str(inspect.signature(ckptool.open_checkpoint))


def told_by_torch(path: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(oracle.named_tensors(torch_load(path)))
    except pickle.UnpicklingError:  # a whole model, or more than weights
        return {}


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz", "ignore:Sparse ")
def test_a_lazy_tensor_becomes_what_torch_loads() -> None:
    dtypes: set[str] = set()
    layouts: set[torch.layout] = set()
    for path in sorted(VALID.glob("*.pth")):
        if not json.loads(path.with_suffix(".json").read_text("utf-8"))["torch_loads"]:
            continue
        expected = told_by_torch(path)
        with ckptool.open_checkpoint(path) as checkpoint:
            for name, tensor in expected.items():
                lazy = checkpoint.tensors[name]
                assert_same_tensor(lazy.torch(), tensor.detach(), f"{path.name}: {name}")
                assert (lazy.shape, f"torch.{lazy.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
                assert lazy.numel == tensor.numel()
                if tensor.layout == torch.strided and not tensor.is_meta:
                    assert_same_array(lazy, tensor.detach())
                dtypes.add(lazy.dtype)
                layouts.add(tensor.layout)

    assert dtypes >= {"float64", "float32", "float16", "bfloat16", "int64", "uint16", "bool", "complex64", "qint8"}
    assert len(layouts) > 3


def assert_same_array(lazy: ckptool.LazyTensor, tensor: torch.Tensor) -> None:
    try:
        array = tensor.resolve_conj().resolve_neg().numpy()
    except TypeError:  # numpy has no such type
        with pytest.raises(ckptool.UnsupportedFeature, match=f"{lazy.dtype}, and numpy has no such type"):
            lazy.numpy()
        return
    found = lazy.numpy()
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()
    assert lazy.nbytes == found.nbytes
    assert found.flags.writeable


def test_a_lazy_tensor_says_where_it_was(of_a_device: OfADevice) -> None:
    with ckptool.open_checkpoint(of_a_device.file("method")) as checkpoint:
        assert of_a_device.tag in {tensor.device for tensor in checkpoint.tensors.values()}
        for tensor in checkpoint.tensors.values():
            assert tensor.device in (of_a_device.tag, "cpu")
            assert tensor.torch().device.type == "cpu"


@pytest.mark.parametrize("package", ["numpy", "torch"])
def test_what_is_not_installed_is_said_with_the_command_that_installs_it(package: str) -> None:
    path = VALID / "state-dict-plain-cpu-zip.pth"
    code = (
        f"import sys; sys.modules[{package!r}] = None; import ckptool\n"
        f"tensor = next(iter(ckptool.open_checkpoint({str(path)!r}).tensors.values()))\n"
        f"try:\n    tensor.{package}()\nexcept ckptool.CkptoolError as error:\n"
        "    print(error.kind, '|', error, '|', error.command)"
    )

    requirement = {"numpy": "numpy", "torch": '"ckptool[torch]"'}[package]
    command = f"pip install {requirement}"
    said = f"missing-package | this needs {package}, which is not installed: {command} | {command}"
    assert " ".join(prompt(code)) == said


@pytest.fixture
def wrapped() -> Iterator[ckptool.StateDict]:
    with ckptool.open_checkpoint(VALID / "lenet-state-dict-data-parallel-forged-cuda0-zip.pth") as checkpoint:
        assert checkpoint.weights is not None
        yield checkpoint.weights


def message(names: Any, name: str) -> str:
    with pytest.raises(KeyError) as caught:
        names[name]
    assert caught.value.args == (name,)
    assert pickle.loads(pickle.dumps(caught.value)).args == (name,)
    return str(caught.value)


ALL_KINDS = {
    "plain": torch.arange(6.0).reshape(2, 3),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "half": torch.ones(3, dtype=torch.float16),
    "counter": torch.tensor(7),
    "complex": torch.tensor([1 + 2j]).conj(),
    "brain": torch.ones(2, dtype=torch.bfloat16),
    "small": torch.ones(2).to(torch.float8_e4m3fn),
}


def test_numpy_and_torch_take_a_lazy_tensor_or_say_what_to_call(tmp_path: Path) -> None:
    torch.save(ALL_KINDS, tmp_path / "x.pth")
    with ckptool.open_checkpoint(tmp_path / "x.pth") as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            expected = ALL_KINDS[name].resolve_conj()
            if name in ("brain", "small"):
                with pytest.raises(TypeError, match=r"call torch\(\)"):
                    np.asarray(tensor)
            else:
                assert np.array_equal(np.asarray(tensor), expected.numpy())
                assert np.stack([tensor, tensor]).shape == (2, *expected.shape)
            if name not in ("small", "complex"):  # which torch itself does not hand over
                assert torch.equal(torch.as_tensor(tensor), expected)
        plain = checkpoint.tensors["plain"]
        assert np.asarray(plain, dtype="float64").dtype == np.float64
        with pytest.raises(ValueError, match="not in memory"):
            np.array(plain, copy=False)


@pytest.mark.parametrize("name", ["open", "convert", "compare", "info", "save_file", "verify", "devices"])
def test_names_that_people_try_are_answered(name: str) -> None:
    with pytest.raises(AttributeError, match=r"command line|ckptool\.\w+\("):
        getattr(ckptool, name)
    assert not hasattr(ckptool, name)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'load_inot': ckptool\.load_into is there"):
        ckptool.load_inot  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'zebra'$"):
        ckptool.zebra  # noqa: B018


def test_what_answers_name_is_there() -> None:
    for said in ckptool._MEANT:  # type: ignore[attr-defined]
        for used in re.findall(r"ckptool\.([\w.]+)\(", said):
            found: Any = ckptool
            for part in used.split("."):
                found = getattr(found, part)
            assert callable(found)


def test_a_checkpoint_completes_what_is_public() -> None:
    with ckptool.open_checkpoint(VALID / "lenet-state-dict-cpu-zip.pth") as checkpoint:
        shown = dir(checkpoint)
        assert {"tensors", "weights", "form", "format", "metadata", "close"} <= set(shown)
        assert not {"walks", "rebuilder", "streams", "unmerged", "clashes"} & set(shown)
        assert all(hasattr(checkpoint, name) for name in shown)


def test_reports_complete_their_fields_and_nothing_of_tuples(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2).eval()
    torch.save(net.state_dict(), tmp_path / "a.pth")
    live = ckptool.LiveModel(net, tmp_path / "a.pth")
    reload = live.reload(tmp_path / "a.pth")
    with live.use() as serving, ckptool.open_checkpoint(PLAIN) as checkpoint:
        there: list[Any] = [
            *(ckptool.check(PLAIN), ckptool.diff(PLAIN, PLAIN), ckptool.inspect(PLAIN), live, serving, reload),
            *(ckptool.load_into(net, tmp_path / "a.pth"), ckptool.predict_memory(PLAIN), ckptool.Limits()),
            *(ckptool.migrate(PLAIN, tmp_path / "b.pth", dry_run=True), ckptool.Changes(), ckptool.Remote("s3://a/b")),
            checkpoint.weights,
        ]
    for one in there:
        shown = {name for name in dir(one) if name[0] != "_"}
        assert all(hasattr(one, name) for name in shown), one
        assert not {"count", "index", "in_full", "expanded", "node", "stores", "own_keys"} & shown, one
        assert set(getattr(one, "_fields", ())) <= shown, one
        if not isinstance(one, ckptool.Changes):
            assert len(repr(one)) < 400, one  # a prompt shows a line, print() the whole


def test_reports_are_the_json_of_the_command_line(tmp_path: Path) -> None:
    ckptool.migrate(OTHER, tmp_path / "a.pth")
    reports: dict[str, Any] = {
        "inspect": ckptool.inspect(OTHER),
        "check": ckptool.check(OTHER, digest=True),
        "diff": ckptool.diff(PLAIN, OTHER),
        "migrate": ckptool.migrate(OTHER, tmp_path / "a.pth", force=True),
    }
    given = {"diff": [PLAIN, OTHER], "migrate": [OTHER, tmp_path / "a.pth", "--force"], "check": [OTHER, "--digest"]}
    for verb, report in reports.items():
        found = json.dumps(report.as_dict())
        printed = command(verb, "--json", *given.get(verb, [OTHER]))
        assert json.loads(with_options(found)) == json.loads(with_options(printed)), verb
    broken = ckptool.check(b"PK").as_dict()
    assert broken["error"]["kind"] == ckptool.check(b"PK").error.kind  # type: ignore[union-attr]


def test_rows_are_those_of_the_command_line(tmp_path: Path) -> None:
    (stat,) = [json.loads(command("stat", "--json", OTHER, "--include", "model.*bias*"))]
    assert [row.name for row in ckptool.stat(OTHER, include="model.*bias*")] == [row["name"] for row in stat["rows"]]
    assert ckptool.stat(OTHER, depth=1)[0].values is not None
    with pytest.raises(ckptool.WeightsNotFound, match="include 'nothing' matches none"):
        ckptool.stat(OTHER, include="nothing")

    folder = VALID.parent / "folders"
    printed = [json.loads(line) for line in command("scan", "--check", folder, PLAIN).splitlines()]
    found = list(ckptool.scan([folder, PLAIN], check=True))
    for row in (*printed, *found):
        assert row.pop("scanned_ns") > 0
    assert sorted(found, key=lambda row: row["path"]) == sorted(printed, key=lambda row: row["path"])
    (tmp_path / "notes.txt").write_text("nothing\n")
    with pytest.raises(ckptool.NotACheckpoint, match="no checkpoint among 1 file"):
        list(ckptool.scan(tmp_path))


def test_a_page_is_that_of_the_command_line(tmp_path: Path) -> None:
    for number, others in enumerate(([], [PLAIN])):
        here, there = tmp_path / f"{number}.html", tmp_path / f"there{number}.html"
        assert ckptool.report(OTHER, here, *others) is None
        command("report", OTHER, *others, "-o", there)
        assert here.read_bytes() == there.read_bytes()
    with pytest.raises(ckptool.OutputExists):
        ckptool.report(OTHER, tmp_path / "0.html")
    with pytest.raises(ValueError, match=r"name it page\.html"):
        ckptool.report(OTHER, "page.pth")
    (tmp_path / "broken.pth").write_bytes(b"PK")
    assert ckptool.report(tmp_path / "broken.pth", tmp_path / "broken.html") is not None


def test_a_closed_checkpoint_prints_a_line_and_a_report_stays() -> None:
    with ckptool.open_checkpoint(OTHER) as checkpoint:
        whole = str(checkpoint)
    assert str(checkpoint) == repr(checkpoint)
    assert checkpoint._repr_html_().startswith("<table>")
    assert str(ckptool.inspect(OTHER)) == whole


def test_standard_output_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: ckptool.migrate(PLAIN, "-"), lambda: ckptool.save({"a": torch.ones(1)}, "-")):
        with pytest.raises(ckptool.MigrationRefused, match="no output to a pipe"):
            call()
    assert "no output to a pipe" in invoke(["migrate", str(PLAIN), "-"]).stderr
    assert not list(tmp_path.iterdir())


def test_a_missing_name_is_answered_with_the_nearest(wrapped: ckptool.StateDict) -> None:
    first = next(iter(wrapped))
    bare = first.removeprefix("module.")
    here = f"'{bare}' is not there; '{first}' is"

    assert first != bare
    assert message(wrapped, bare) == f"{here}: every name begins with 'module.'"
    assert message(wrapped, f"model.{first}").endswith(f"; '{first}' is: no name begins with 'model.'")
    assert message(wrapped, first.replace("weight", "wieght")).endswith(f" is not there; '{first}' is")
    assert message(wrapped, "something else") == "'something else' is not there"


def test_a_missing_name_of_a_checkpoint_is_answered_so_too() -> None:
    with ckptool.open_checkpoint(VALID / "checkpoint-plain-cpu-zip.pth") as checkpoint:
        assert checkpoint.weights is not None
        name = next(iter(checkpoint.weights))
        full = f"{checkpoint.weights.key}.{name}"

        assert message(checkpoint.tensors, name) == f"'{name}' is not there; '{full}' is"
        assert message(checkpoint, name) == f"'{name}' is not there; '{full}' is"
        assert message(checkpoint, "modle") == "'modle' is not there; 'model' is"


def test_a_name_that_is_looked_for_in_vain_costs_nothing(
    wrapped: ckptool.StateDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("ckptool.names.renaming.not_there")  # it would be looked for in all names

    assert wrapped.get("absent") is None
    assert wrapped.get("absent", 7) == 7
    assert "absent" not in wrapped
    with pytest.raises(KeyError) as caught:
        wrapped["absent"]
    with pytest.raises(NameError):
        str(caught.value)


def test_the_message_about_a_hostile_name_is_short_and_quick() -> None:
    text = repr(Missing("a" * 60_000, [f"{'a' * 60_000}{index}" for index in range(200)]))

    assert len(text) < 500
    assert "\x1b" not in repr(Missing("\x1b[2J", ["x.\x1b[2J"]))


def command(*arguments: str | Path) -> str:
    """Return what the command line prints."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.stdout.removesuffix("\n")


PLAIN = VALID / "state-dict-plain-cpu-zip.pth"
OTHER = VALID / "checkpoint-data-parallel-forged-cuda0-legacy.pth"


def test_reports_print_as_the_command_line_prints_them(tmp_path: Path) -> None:
    written = tmp_path / "written.safetensors"
    migrated = ckptool.migrate(OTHER, written)

    with ckptool.open_checkpoint(OTHER) as checkpoint:
        assert with_options(str(checkpoint)) == with_options(str(ckptool.inspect(OTHER))) == command("inspect", OTHER)
    assert with_options(str(ckptool.inspect(OTHER, digest=True))) == command("inspect", "--digest", OTHER)
    assert with_options(str(ckptool.check(OTHER))) == command("check", OTHER)
    assert with_options(str(ckptool.diff(PLAIN, OTHER))) == command("diff", PLAIN, OTHER)
    assert with_options(ckptool.diff(PLAIN, OTHER).verdict) == command("diff", "-q", PLAIN, OTHER)
    assert with_options(str(migrated)) == command("migrate", OTHER, written, "--force")


def test_a_report_of_a_file_that_cannot_be_opened_prints_why() -> None:
    report = ckptool.check(b"PK\3\4")

    assert report.error is not None
    assert report.error.message in str(report)
    assert report.error.message in report._repr_html_()


class Cells(HTMLParser):
    """The texts of a table, by the tags that they are in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


HOSTILE = "<script>alert(1)</script>&\u202e"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    content = {f"{HOSTILE}.{index}": torch.zeros(2, 3) for index in range(100)} | {"kept": torch.zeros(2, 3)}
    path = tmp_path / f"{HOSTILE.replace('/', '')}.pth"
    torch.save(content, path)
    return path


def test_notebooks_show_tables_without_markup_from_the_file(hostile: Path, tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"kept": torch.nn.Parameter(torch.zeros(2, 3))})
    with ckptool.open_checkpoint(hostile) as checkpoint:
        shown: list[Any] = [
            checkpoint,
            checkpoint.weights,
            ckptool.check(hostile),
            ckptool.diff(hostile, PLAIN, values=False),
            ckptool.migrate(hostile, tmp_path / f"{HOSTILE.replace('/', '')}.safetensors"),
            ckptool.load_into(model, hostile, strict=False),
        ]
        tables = [Cells(one._repr_html_()) for one in shown]

    for one, table in zip(shown, tables, strict=True):
        assert set(table.tags) <= {"table", "caption", "tr", "th", "td"}, one
        assert table.tags.count("tr") <= 62
        assert "\u202e" not in "".join(table.texts)
    escaped = f"{HOSTILE[:-1]}\\u202e.0"
    assert escaped in tables[0].texts
    assert escaped in tables[1].texts
    assert {"[2, 3]", "float32", "cpu", "and 41 more"} <= set(tables[1].texts)
    assert escaped in tables[-1].texts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["coo", "csr", "nested", "a scale"])
def test_values_of_tensors_that_are_made_of_others_are_looked_at(kind: str, tmp_path: Path) -> None:
    values = torch.zeros(3, 3)
    values[0, 0] = torch.nan
    made = {
        "coo": values.to_sparse,
        "csr": values.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), values[0]]),
        "a scale": lambda: torch.quantize_per_channel(
            torch.ones(2, 2), torch.tensor([1.0, torch.nan]), torch.zeros(2), 0, torch.quint8
        ),
    }[kind]()
    torch.save({"w": torch.ones(2, 2), "s": made}, tmp_path / "a.pth")

    assert "CK110" in {one.code for one in ckptool.check(tmp_path / "a.pth", values=True).findings}


@pytest.mark.parametrize(("key", "weights"), [("model", "ema"), ("ema", "raw"), ("model", "module")])
def test_two_choices_of_weights_are_refused(key: str, weights: Any, tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    path = tmp_path / "a.pth"
    torch.save({"model": net.state_dict(), "ema": {name: one + 1 for name, one in net.state_dict().items()}}, path)

    for call in (
        lambda: ckptool.load(path, key=key, weights=weights),
        lambda: ckptool.load_into(net, path, key=key, weights=weights),
        lambda: ckptool.LiveModel(net, path, key=key, weights=weights),
        lambda: ckptool.migrate(path, tmp_path / "o.pth", key=key, weights=weights),
    ):
        with pytest.raises(errors.CkptoolError, match="both say which"):
            call()
    assert not (tmp_path / "o.pth").exists()


def test_what_check_compares_nothing_with_is_refused(tmp_path: Path) -> None:
    path = VALID / "device-forged-cuda3-zip.pth"
    for wrong in ({"key": "model"}, {"model_arguments": {"size": 3}}):
        with pytest.raises(ValueError, match=r"none is given|give one of them"):
            ckptool.check(path, **wrong)  # type: ignore[arg-type]
    for questions in ("fits", "safe,fits"):
        assert invoke(["check", str(path), "--only", questions]).exit_code == 2
    assert ckptool.check(path, devices="cuda:35").worst == ckptool.check(path, devices=["cuda:35"]).worst == "warning"
    assert ckptool.check(path, devices="cuda:3").worst != "warning"


@pytest.mark.parametrize("every", [0, -1, float("nan"), float("inf"), "x", None])
def test_a_watch_that_would_never_look_is_refused(every: Any) -> None:
    live = ckptool.LiveModel(torch.nn.Linear(2, 2).eval())
    with pytest.raises((ValueError, TypeError)):
        live.watch("model.pth", every=every)


def test_an_empty_text_is_no_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty text"):
        ckptool.migrate(VALID / "lenet-state-dict-cpu-zip.pth", tmp_path / "o.pth", dtype="")
