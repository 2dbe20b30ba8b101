"""TorchScript, exported programs, archives, and zips that were cut short: the last size that is right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptool import CkptoolError, LimitExceeded, Limits, MalformedFile, TruncatedFile, open_checkpoint
from ckptool.formats import torch_zip
from ckptool.formats.probe import Probe
from ckptool.formats.torchscript import ScriptModules
from ckptool.pickles.nodes import Dict
from tests import build
from tests.bounds.sources import Asked
from tests.bounds.test_arguments import made, plain

# TorchScript


def module(*attributes: tuple[str, Any]) -> Any:
    return made(("__torch__", "Net"), state=Dict(list(attributes)))


def walked(node: Any, **limits: int) -> list[str]:
    return [entry.name for entry in ScriptModules({}).walk(node, Limits(**limits)).entries]


def test_a_scripted_model_may_have_as_many_modules_as_tensors_are_allowed() -> None:
    deep = module(("abc", module(("d", module(("training", True))))))

    assert walked(deep, tensors=3) == []
    with pytest.raises(LimitExceeded):
        walked(deep, tensors=2)


def test_a_scripted_model_may_have_as_many_tensors_as_are_allowed() -> None:
    wide = module(("a", plain()), ("b", plain()), ("c", plain()))

    assert walked(wide, tensors=3) == ["a", "b", "c"]
    with pytest.raises(LimitExceeded):
        walked(wide, tensors=2)


def test_a_scripted_model_may_have_names_as_long_as_are_allowed() -> None:
    deep = module(("abc", module(("training", True))))

    assert walked(deep, name_nbytes=4) == []
    with pytest.raises(LimitExceeded):
        walked(deep, name_nbytes=3)


def test_a_scripted_model_that_holds_itself_is_refused_and_one_held_twice_is_not() -> None:
    inner = module(("w", plain()))
    assert walked(module(("a", inner), ("b", inner))) == ["a.w", "b.w"]
    inner.state.pairs.append(("inner", inner))
    with pytest.raises(MalformedFile):
        walked(inner)


# Zips of torch


@pytest.mark.parametrize("length", [0, 1, 29, 30, 31, 200])
def test_what_a_zip_without_its_end_announces_is_read_from_what_is_there(length: int) -> None:
    tree = {"w": build.tensor(build.storage(numel=1 << 28))}
    whole = build.zip_file({"a/data.pkl": build.pickled(tree)})
    source = Asked((whole[: whole.index(b"PK\1\2")] + bytes(1 << 18))[: length if length < 200 else None])

    error = TruncatedFile("cut", kind="truncated-zip")
    probe = Probe(source, Limits(), lambda one: one.read())
    assert (torch_zip.truncated(probe, error) is error) == (length < 200)
    assert sum(source.sizes) < 1 << 17


# Pickles


# Exported programs


def program(*models: str) -> bytes:
    tensor = {"dtype": 7, "sizes": [{"as_int": 4}], "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}}
    entry = {"path_name": "weight_0", "is_param": True, "tensor_meta": tensor | {"device": {"type": "cpu"}}}
    config = json.dumps({"config": {"w": entry}}).encode()
    members = {f"p/data/weights/{model}_weights_config.json": config for model in models}
    return build.zip_file({"p/archive_format": b"pt2", **members, "p/data/weights/weight_0": build.floats()})


def test_the_only_program_of_an_archive_gives_its_tensors_no_prefix() -> None:
    assert list(open_checkpoint(program("model")).tensors) == ["w"]
    assert list(open_checkpoint(program("a", "b")).tensors) == ["a.w", "b.w"]
    assert list(open_checkpoint(program()).tensors) == []


# Archives


def test_the_only_checkpoint_of_an_archive_is_opened_and_of_several_none() -> None:
    sound, other = build.torch_zip({"w": build.tensor(build.storage())}, {"0": build.floats()}), b"text"

    assert open_checkpoint(build.zip_file({"a.pt": sound, "b.txt": other})).member == "a.pt"
    several = open_checkpoint(build.zip_file({"a.pt": sound, "b.pt": sound, "c.txt": other}))
    assert (several.form, [one.name for one in several.members]) == ("archive", ["a.pt", "b.pt"])
    with pytest.raises(CkptoolError):
        open_checkpoint(build.zip_file({"c.txt": other}))
