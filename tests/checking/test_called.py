"""What a pickle calls is told from the list of its calls; opcode by opcode, where that says the same, it is not."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import pickletools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckptool import check
from ckptool.errors import MalformedFile
from ckptool.formats.runnable import trees
from ckptool.pickles import weights_only
from ckptool.pickles.called import Unclear
from ckptool.pickles.scanner import scan
from ckptool.pickles.tracer import trace
from ckptool.sources.source import BytesSource, Source
from tests.build import call, named
from tests.checking.test_would_run import DATA, PAYLOADS


class Weights(dict[str, Any]):
    """A mapping with a state."""


class Words(list[str]):
    """A list with a state, of an attribute that unpicklers look up."""


class Own(torch.nn.Module):
    """A class that older files bring with its source."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.add = True


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def streamed(value: Any) -> bytes:
    """Save as before zips: classes of whole models come with their sources, as persistent ids."""
    stream = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def of_state(made: Any, **state: Any) -> Any:
    made.__dict__.update(state)
    return made


WEIGHTS = {f"layer{number}.weight": torch.ones(2, 3) for number in range(40)}
VALUES: dict[str, Any] = {
    "weights and options": {"model": WEIGHTS, "options": argparse.Namespace(rate=0.1, name="x")},
    "a whole model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
    "numpy beside weights": {**WEIGHTS, "scalar": np.float64(1.5), "array": np.arange(9), "d": np.dtype("int8")},
    "objects with items and a state": [of_state(Weights(a=1), rate=2), of_state(Words("abc"), extend=3)],
    "a layer that adds": of_state(torch.nn.Linear(2, 2), add=True, append=None),
    "a whole model of a class of its own": Own(),
    "functions with some arguments": [partial(torch.nn.LayerNorm, eps=1e-6), partial(argparse.Namespace, 1, rate=2)],
    "a method of an object": [Own().state_dict],
    "many objects": [argparse.Namespace(number=number) for number in range(9)],
    "a counter": collections.Counter("abcab"),
    **{f"data: {name}": value for name, value in DATA.items()},
}
FILES: dict[str, Callable[[Any], bytes]] = {
    "zip": saved,
    "stream": streamed,
    **{f"protocol {protocol}": lambda value, protocol=protocol: pickle.dumps(value, protocol) for protocol in range(6)},  # type: ignore[misc]
}


def unclear(*_: Any) -> None:
    raise Unclear


@pytest.mark.parametrize("file", FILES)
def test_calls_tell_what_following_tells(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [FILES[file](value) for value in VALUES.values()]
    contents += [b"\x80\4" + payload + b"." for payload in PAYLOADS.values()] if file == "protocol 4" else []
    told = [check(content) for content in contents]
    monkeypatch.setattr("ckptool.pickles.called.told", unclear)
    followed = [check(content) for content in contents]
    assert [(one.acts, one.loading) for one in told] == [(one.acts, one.loading) for one in followed]
    assert [sorted(one.globals) for one in told] == [sorted(one.globals) for one in followed]


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the sources whose pickles are followed."""
    sizes: list[int] = []

    def follow(source: Source, *given: Any) -> Any:
        sizes.append(source.nbytes)
        return trace(source, *given)

    for name in ("trace", "trace_with_arrays"):
        monkeypatch.setattr(f"ckptool.formats.runnable.pickle_search.{name}", follow)
    return sizes


@pytest.mark.parametrize(
    "which",
    [
        *("weights and options", "a whole model", "many objects", "a layer that adds"),
        *("functions with some arguments", "a method of an object"),
    ],
)
def test_what_calls_tell_is_not_followed(which: str, followed: list[int]) -> None:
    report = check(saved(VALUES[which]))
    assert {act.grade for act in report.acts} <= {"code"}
    assert max(followed, default=0) < 64  # records such as the version


def test_classes_that_come_with_their_source_are_not_followed(followed: list[int]) -> None:
    data = streamed(Own())
    assert b"class Own(torch.nn.Module):" in data
    report = check(data)
    assert f"{__name__}.Own" in {act.name for act in report.acts}
    assert len(data) not in followed


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_pickles_of_tensors_are_not_followed(protocol: int, followed: list[int]) -> None:
    assert check(pickle.dumps(WEIGHTS, protocol)).acts == ()
    assert len(followed) <= 3  # the head of the first tensor, which all have
    assert max(followed) < 1000


def test_a_call_whose_result_is_dropped_is_told() -> None:
    data = b"\x80\4" + call(named("argparse", "Namespace")) + b"0" + call(named("pkg", "f")) + b"N."
    assert [(act.name, act.offset) for act in check(data).acts if act.how != "refers"] == [
        ("argparse.Namespace", data.index(b"R")),
        ("pkg.f", data.rindex(b"R")),
    ]


def test_what_a_walk_leaves_out_is_what_torch_takes() -> None:
    codes = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
    dull = {code[0] for code in codes if scan(BytesSource(code + bytes(8)), 0, 9).opcodes.keys().isdisjoint(code)}
    assert 0x71 in dull
    assert dull <= weights_only.OPCODES


@pytest.mark.parametrize("holder", ["(%bt", "](%be", "}(%bu", "((%bt\x85t"])
def test_a_name_behind_many_other_arguments_is_seen(holder: str) -> None:
    arguments = b"N" * 999 + named("os", "system")
    given = holder.encode("latin-1") % arguments
    acts = check(b"\x80\2" + named("builtins", "print") + given + b"\x85R.").acts
    assert any(act.grade == "system" and "os.system" in (act.why or "") for act in acts)


@pytest.mark.parametrize("asked", [b"", named("os", "system") + b"0"])
def test_what_many_calls_share_is_looked_at_for_so_long(asked: bytes) -> None:
    shared = named("pkg", "f") + b"q\0(" + b"N" * 9000 + b"tq\1"
    begin = process_time()
    report = check(b"\x80\2" + asked + shared + b"h\0h\1R0" * 30_000 + b".")
    assert process_time() - begin < 2.0
    told = {act.name: act for act in report.acts if act.how == "calls"}
    assert told["pkg.f"].times >= 1
    # What was not looked at is not taken for data.
    assert ("system" in {act.grade for act in told.values()}) == bool(asked)


SHARED = {
    "a container": (named("collections", "OrderedDict"), b"h\0h\1R0"),
    "its class": (named("copyreg", "_reconstructor"), b"h\0h\1R0"),
    "what a call gives": (named("pkg", "f") + b")R", b"h\0h\1R0"),
    "a function by dill": (named("dill._dill", "_create_function"), b"h\0h\1R0"),
    "a class by cloudpickle": (named("cloudpickle.cloudpickle", "_make_skeleton_class"), b"h\0h\1R0"),
    "a state": (named("builtins", "setattr"), b"h\0)Rh\1b0"),
    "a state in a pair": (named("builtins", "setattr"), b"h\0)RNh\1\x86b0"),
}


@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("asked", [b"", named("os", "system") + b"0"])
def test_long_arguments_that_calls_share_are_looked_at_for_so_long(what: str, asked: bytes) -> None:
    target, again = SHARED[what]
    shared = named("pkg", "g") + b")Rq\2" + b"0" + target + b"q\0(" + b"h\2" * 9000 + b"tq\1"
    data = b"\x80\2" + asked + shared + again * 4000 + b"."
    begin = process_time()
    report = check(data)
    assert process_time() - begin < 3.0
    assert report.grade in ("code", "system")
    few = check(b"\x80\2" + asked + shared + again * 3 + b".")
    whole = {(act.how, act.name) for act in few.acts}
    assert whole <= {(act.how, act.name) for act in report.acts}


def long(count: int) -> bytes:
    return b"".join(b"J" + number.to_bytes(4, "little") + b"N" for number in range(count))


GIVEN_AGAIN = {
    "an ordered dict": (named("collections", "OrderedDict") + b")R(" + long(9000) + b"uq\2", b"h\0)Rh\2b0"),
    "modules": (b"}(" + long(9000) + b"uq\2", b"h\0)R}U\x08_modulesh\2sb0"),
    "an ordered dict of modules": (
        named("collections", "OrderedDict") + b")R(" + long(9000) + b"uq\2",
        b"h\0)R}U\x08_modulesh\2sb0",
    ),
    "a tuple in arguments": (b"(" + b"K\1" * 9000 + b"tq\2", b"h\0h\2\x85R0"),
    "constants": (b"(" + b"K\1" * 9000 + b"tq\2", b"h\0h\2R0"),
    "a name of very many parts": (b"N", b"cp" + b".a" * 2000 + b"\nf\n0" + b"h\0N\x85R0"),
}


@pytest.mark.parametrize("what", GIVEN_AGAIN)
@pytest.mark.parametrize("asked", [b"", named("os", "system") + b"0"])
@pytest.mark.parametrize("target", [("pkg" + ".a" * 6000, "f"), ("builtins", "slice")])
def test_what_is_given_again_and_again_is_looked_at_for_so_long(
    what: str, asked: bytes, target: tuple[str, str]
) -> None:
    given, again = GIVEN_AGAIN[what]
    data = b"\x80\2" + asked + given + b"0" + named(*target) + b"q\0" + again * (8000 if len(again) < 99 else 20) + b"."
    begin = process_time()
    check(data)
    assert process_time() - begin < 3.0


class Sample(NamedTuple):
    """What refers to a list that all of its kind share."""

    path: str
    label: int
    names: list[str]


@pytest.mark.parametrize("count", [3, 1000])
def test_a_long_list_of_texts_that_many_objects_share_is_fine(count: int) -> None:
    names = [f"class {number}" for number in range(1000)]
    data = saved(
        {
            "collate": partial(Sample, label=0),
            "samples": [Sample(f"{place}.png", place, names) for place in range(count)],
        }
    )

    assert check(data).grade == "code"


ABORT = named("os", "abort")


@pytest.mark.parametrize(
    "made",
    [
        call(named("builtins", "list"), call(named("builtins", "iter"), ABORT, 1)),
        call(named("operator", "getitem"), call(named("collections", "defaultdict"), ABORT), "x"),
        call(named("builtins", "list"), call(named("itertools", "accumulate"), [1, 2], ABORT)),
        call(named("torch.optim.lr_scheduler", "LambdaLR"), "x", ABORT),
        call(named("weakref", "ref"), call(named("argparse", "Namespace")), ABORT),
        call(named("torch.jit", "CompilationUnit"), "def f(): pass"),
        call(named("torch._C", "PyTorchFileWriter"), "x"),
        call(named("torch.cuda.memory", "CUDAPluggableAllocator"), "x.so", "y", "z"),
        call(call(named("builtins", "getattr"), call(named("dill._dill", "_import_module"), "os"), "abort")),
    ],
)
def test_a_function_that_a_harmless_call_would_call_is_called(made: bytes) -> None:
    assert "system" in {act.grade for act in check(b"\x80\4" + made + b".").acts if act.how != "refers"}


@pytest.mark.parametrize("given", [(), (named("os", "getcwd"),), (4,)])
def test_what_follows_a_function_that_is_made_to_be_cached_is_told(given: tuple[Any, ...]) -> None:
    made = call(call(named("functools", "lru_cache"), *given), named("pkg", "f"))
    acts = check(b"\x80\4" + made + b"0" + call(named("os", "system"), "true") + b".").acts
    assert ("system", "calls", "os.system") in {(act.grade, act.how, act.name) for act in acts}


@pytest.mark.parametrize("fault", [IndexError, KeyError, ValueError, TypeError, MalformedFile])
def test_a_fault_in_judging_is_not_taken_for_the_end_of_a_pickle(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*_: Any) -> None:
        raise fault("x")

    monkeypatch.setattr("ckptool.pickles.called.told", unclear)
    monkeypatch.setattr("ckptool.pickles.grading.judge", judge)
    with pytest.raises(RuntimeError, match="refers at byte 2"):
        check(b"\x80\4" + call(named("os", "system"), "true") + b".")


@pytest.mark.parametrize("kept", [("collections", "defaultdict"), ("functools", "partial")])
def test_a_function_that_is_kept_and_not_called_is_none(kept: tuple[str, str]) -> None:
    acts = check(b"\x80\4" + call(named(*kept), named("math", "sqrt")) + b".").acts
    assert "system" not in {act.grade for act in acts}


@pytest.mark.parametrize("given", [("collections", "deque"), ("builtins", "zip"), ("heapq", "merge")])
def test_a_function_with_some_arguments_is_followed_to_whom_it_is_given(given: tuple[str, str]) -> None:
    made = call(named("functools", "partial"), named("torch", "no_known_function"))
    assert "system" in {act.grade for act in check(b"\x80\4" + call(named(*given), made) + b".").acts}


def test_the_pickle_of_a_cut_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole.pth").write_bytes(saved(Own()))
    (tmp_path / "cut.pth").write_bytes(saved(Own())[:-300])
    whole = check(tmp_path / "whole.pth")
    with monkeypatch.context() as patch:
        patch.setattr(trees, "read_pickle", None)
        report = check(tmp_path / "cut.pth")

    assert report.error is not None
    assert report.error.kind == "truncated-zip"
    assert [(one.name, one.offset) for one in report.acts] == [(one.name, one.offset) for one in whole.acts] != []
