"""What Python callers pass: a wrong type is refused by its name, before anything is read."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.reference.nets import LeNet
from tests.each import each

PATH = Path(ckptool.__file__).parents[1] / "fixtures" / "valid" / "lenet-state-dict-cpu-zip.pth"
NOWHERE = "nowhere/at/all.pth"
"""What would be an error of another kind, were it looked for first."""


def live() -> ckptool.LiveModel:
    return ckptool.LiveModel(LeNet().eval(), PATH)


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "load": (ckptool.load, {"source": NOWHERE}),
    "load_into": (ckptool.load_into, {"model": LeNet(), "source": NOWHERE}),
    "load_model": (ckptool.load_model, {"path": NOWHERE, "trust": True}),
    "predict_memory": (ckptool.predict_memory, {"source": NOWHERE}),
    "open_checkpoint": (ckptool.open_checkpoint, {"origin": NOWHERE}),
    "check": (ckptool.check, {"origin": NOWHERE}),
    "inspect": (ckptool.inspect, {"origin": NOWHERE}),
    "stat": (ckptool.stat, {"origin": NOWHERE}),
    "scan": (ckptool.scan, {"paths": NOWHERE}),
    "report": (ckptool.report, {"path": NOWHERE, "output": "page.html"}),
    "merge": (ckptool.merge, {"base": NOWHERE, "dst": "m.pth", "average": NOWHERE}),
    "explain": (ckptool.explain, {"text": "a message"}),
    "diff": (ckptool.diff, {"a": NOWHERE, "b": NOWHERE}),
    "migrate": (ckptool.migrate, {"src": NOWHERE}),
    "Changes": (lambda **given: ckptool.migrate(NOWHERE, changes=ckptool.Changes(**given)), {}),
    "recover": (ckptool.recover, {"path": NOWHERE}),
    "save": (ckptool.save, {"state": {}, "path": NOWHERE, "like": NOWHERE}),
    "row": (ckptool.fleet.row, {"path": NOWHERE}),
    "migrate_one": (ckptool.fleet.migrate_one, {"source": NOWHERE}),
    "LiveModel": (ckptool.LiveModel, {"model": LeNet().eval(), "source": NOWHERE}),
    "reload": (live().reload, {"source": NOWHERE}),
    "watch": (live().watch, {"path": NOWHERE}),
    "Limits": (lambda **given: ckptool.load(NOWHERE, limits=ckptool.Limits(**given)), {}),
    "Cancellation": (ckptool.Cancellation, {}),
    "Remote": (ckptool.Remote, {"address": "https://host/file"}),
}
OF_CLASSES = {"Changes": ckptool.Changes, "Limits": ckptool.Limits, "Remote": ckptool.Remote.__new__}
NO_QUESTION_OF_TYPE = {"trust"}
"""Only True will do, and the error says why."""


class Nothing:
    """What no argument can be."""


def parameters() -> list[tuple[str, str]]:
    found = []
    for name, (function, _) in FUNCTIONS.items():
        signature = inspect.signature(OF_CLASSES.get(name, function))
        named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        found += [(name, one.name) for one in named if one.name not in NO_QUESTION_OF_TYPE | {"cls"}]
        if len(named) < len(signature.parameters):
            found += [(name, field) for field in ckptool.Changes._fields]
    return found


@each(("name", "parameter"), parameters())
def test_a_value_of_another_type_is_refused_by_the_name_of_its_parameter(name: str, parameter: str) -> None:
    function, given = FUNCTIONS[name]

    with pytest.raises(TypeError, match=rf"^([a-z]+\.)?{parameter} (takes|is) .+ (not|a) (a )?Nothing"):
        function(**{**given, parameter: Nothing()})


@each(
    ("name", "given", "says"),
    [
        ("load", {"key": 3}, "key takes str | None, not 3 (int)"),
        ("load", {"verify": "false"}, "verify takes bool, not 'false' (str)"),
        ("load", {"allow_missing": 1}, "allow_missing takes bool, not 1 (int)"),
        ("load", {"limits": None}, "limits takes Limits, not None (NoneType)"),
        ("load_into", {"strict": "no"}, "strict takes bool, not 'no' (str)"),
        ("migrate", {"force": "no"}, "force takes bool, not 'no' (str)"),
        ("migrate", {"to": 3}, "to takes str | Mapping[str, str] | None, not 3 (int)"),
        ("migrate", {"to": {"cuda:0": 0}}, "to takes str | Mapping[str, str] | None, not {'cuda:0': 0} (dict)"),
        ("migrate", {"include": 5}, "include takes Sequence[str], not 5 (int)"),
        ("migrate", {"drop": {}}, "drop takes Sequence[str], not {} (dict)"),
        ("migrate", {"exclude": [b"w"]}, "exclude takes Sequence[str], not [b'w'] (list)"),
        ("migrate", {"max_shard_size": 5e9}, "max_shard_size takes int | str | None, not 5000000000.0"),
        ("migrate_one", {"drop": {"optimizer": True}}, "drop takes Sequence[str], not {'optimizer': True}"),
        ("check", {"model": LeNet()}, "model takes str | None, not LeNet"),
        ("diff", {"rtol": "1e-3"}, "rtol takes float | None, not '1e-3' (str)"),
        ("diff", {"values": "no"}, "values takes bool, not 'no' (str)"),
        ("Limits", {"tensors": "many"}, "limits.tensors takes int, not 'many' (str)"),
        ("Limits", {"cancellation": 3}, "limits.cancellation takes Cancellation | None, not 3 (int)"),
        ("watch", {"every": "1"}, "every takes float, not '1' (str)"),
    ],
)
def test_the_message_says_what_is_taken_and_what_came(name: str, given: dict[str, Any], says: str) -> None:
    function, needed = FUNCTIONS[name]

    with pytest.raises(TypeError) as caught:
        function(**{**needed, **given})

    assert str(caught.value).startswith(says)


@each("name", [*FUNCTIONS])
def test_a_misspelt_keyword_is_refused_with_the_nearest(name: str) -> None:
    function, given = FUNCTIONS[name]
    known = [parameter for one, parameter in parameters() if one == name][-1]

    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{known}x': did you mean '{known}'\?"):
        function(**given, **{f"{known}x": None})


@each(
    ("name", "word", "meant"),
    [
        ("migrate", "device", "to"),
        ("migrate", "devise", "to"),
        ("migrate", "forse", "force"),
        ("load", "devise", "device"),
        ("load", "to", "device"),
        ("load_into", "stric", "strict"),
        ("load_into", "optimiser", "optimizer"),
    ],
)
def test_a_word_for_another_keyword_is_refused_with_that(name: str, word: str, meant: str) -> None:
    function, given = FUNCTIONS[name]

    with pytest.raises(TypeError, match=rf"{name}\(\) got .* '{word}': did you mean '{meant}'\?"):
        function(**given, **{word: "cpu"})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("load", {"strip": "all"}),
        ("load", {"mmap": "yes"}),
        ("migrate", {"form": "zip"}),
        ("save", {"missing": "ignore"}),
        ("LiveModel", {"commit": "x"}),
    ],
)
def test_a_text_that_is_no_choice_is_a_value_error_that_lists_them(name: str, given: dict[str, Any]) -> None:
    function, needed = FUNCTIONS[name]

    with pytest.raises(ValueError, match=r"is none of .*'"):
        function(**{**needed, **given})


def test_what_is_as_good_as_the_type_is_taken(tmp_path: Path) -> None:
    state = ckptool.load(PATH, map_location={"cpu": torch.device("cpu")}, dtype=torch.float16, mmap=False)
    done = ckptool.migrate(
        PATH, tmp_path / "out.pth", rename=[(r"^conv1\.", "first.")], include="conv1*", dtype=np.dtype("float16")
    )

    assert state["conv1.weight"].dtype is torch.float16
    assert done.tensors == 2
    assert ckptool.diff(PATH, str(PATH), rtol=np.float32(0), limits=ckptool.Limits(tensors=np.int64(99))).same
    with PATH.open("rb") as file:
        assert ckptool.load(file).keys() == ckptool.load(bytearray(PATH.read_bytes())).keys()


@pytest.mark.parametrize("kind", [np.float32, np.float16, torch.tensor], ids=["float32", "float16", "tensor"])
def test_a_number_of_another_library_counts_as_one_of_python(kind: Any, tmp_path: Path) -> None:
    ckptool.load(PATH, limits=ckptool.Limits(cancellation=ckptool.Cancellation(kind(0.5))))  # not rounded to a time

    watched, model = tmp_path / "watched.pth", live()
    watched.write_bytes(PATH.read_bytes())
    model.watch(watched, every=kind(0.01))
    other = {name: one + 1 for name, one in ckptool.load(PATH).items()}
    ckptool.save(other, tmp_path / "other.pth")
    before, until = model.digest, time.monotonic() + 9
    (tmp_path / "other.pth").replace(watched)
    while model.digest == before and time.monotonic() < until:
        time.sleep(0.01)
    model.unwatch()
    assert model.digest != before


def test_what_is_for_new_files_is_refused_in_place() -> None:
    for option in ({"force": True}, {"verify": False}, {"reflink": False}):
        with pytest.raises(ValueError, match="are for what is written anew"):
            ckptool.migrate(NOWHERE, in_place=True, to="cpu", **option)  # type: ignore[arg-type]


def test_a_tensor_is_read_within_limits_alone() -> None:
    with ckptool.open_checkpoint(PATH) as checkpoint:
        tensor = checkpoint.tensors["conv1.weight"]
        for read in (tensor.read, tensor.numpy, lambda **given: tensor.chunks(4, **given)):
            with pytest.raises(TypeError, match=r"^limits takes Limits, not 5 \(int\)"):
                read(limits=5)  # type: ignore[arg-type]
