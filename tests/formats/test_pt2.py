"""Exported programs whose index lies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptool import AmbiguousFile, Checkpoint, CkptoolError, MalformedFile, open_checkpoint
from tests import build
from tests.each import each
from tests.formats.said import refused

FLOATS = build.floats(6)


def meta(**changes: Any) -> dict[str, Any]:
    found = {
        "dtype": 7,
        "sizes": [{"as_int": 2}, {"as_int": 3}],
        "strides": [{"as_int": 3}, {"as_int": 1}],
        "storage_offset": {"as_int": 0},
        "requires_grad": True,
        "device": {"type": "cpu", "index": None},
        "layout": 7,
    }
    return found | changes


def entry(**changes: Any) -> dict[str, Any]:
    return {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": meta()} | changes


def program(config: Any, **members: bytes) -> bytes:
    text = config if isinstance(config, bytes) else json.dumps({"config": config}).encode()
    archive = {
        "archive_format": b"pt2",
        "data/weights/weight_0": FLOATS,
        "data/weights/model_weights_config.json": text,
    }
    return build.zip_file({f"x/{name}": data for name, data in (archive | members).items()})


def opened(config: Any, **members: bytes) -> Checkpoint:
    return open_checkpoint(program(config, **members))


def test_the_sound_program_that_the_others_are_made_from_is_read() -> None:
    checkpoint = opened(
        {"w": entry(), "t": entry(is_param=False, tensor_meta=meta(device={"type": "cuda", "index": 1}))}
    )

    assert checkpoint.tensors["w"].read() == FLOATS
    assert checkpoint.tensors["w"].info.kind == "parameter"
    assert (checkpoint.tensors["t"].info.kind, checkpoint.tensors["t"].info.location) == ("buffer", "cuda:1")


@pytest.mark.parametrize("root", ["", "my.model/", "a/b/"])
def test_the_root_is_whatever_stands_in_front(root: str) -> None:
    config = json.dumps({"config": {"w": entry()}}).encode()
    members = {"archive_format": b"pt2", "data/weights/weight_0": FLOATS, "data/weights/m_weights_config.json": config}

    found = open_checkpoint(build.zip_file({root + name: data for name, data in members.items()}))
    assert (found.format, list(found.tensors)) == ("pt2", ["w"])


@each(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"{}",
        b'{"config": 5}',
        b'{"config": []}',
        b'{"config": {"w": 5}}',
        b"\xff\xfe",
        b"[" * 5000,
        b'{"config": null}',
        b'{"config": {"w": null}}',
    ],
)
def test_an_index_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedFile) as caught:
        opened(text)
    assert caught.value.kind == "malformed-pt2"


@pytest.mark.parametrize("text", [b'{"config": {"w": %s, "w": %s}}', b'{"config": {"w": %s}, "config": {"w": %s}}'])
def test_a_key_that_stands_twice_is_refused(text: bytes) -> None:
    one, other = (json.dumps(entry(tensor_meta=meta(dtype=dtype))).encode() for dtype in (7, 4))

    with pytest.raises(AmbiguousFile) as caught:
        opened(text % (one, other))
    assert caught.value.kind == "ambiguous-pt2"
    assert "twice" in caught.value.message


@each(
    "changes",
    [
        {"path_name": "weight_9"},
        {"path_name": None},
        {"path_name": "../../archive_format"},
        {"path_name": ["weight_0"]},
        {"tensor_meta": meta(dtype=0)},
        {"tensor_meta": meta(dtype=14)},
        {"tensor_meta": meta(dtype=None)},
        {"tensor_meta": meta(dtype=[7])},
        {"tensor_meta": meta(dtype={"as_int": 7})},
        {"tensor_meta": meta(dtype="7")},
        {"tensor_meta": meta(sizes=[{"as_int": 3}, {"as_int": 3}])},
        {"tensor_meta": meta(sizes=[{"as_int": -2}, {"as_int": 3}])},
        {"tensor_meta": meta(sizes=[{"as_int": True}, {"as_int": 3}])},
        {"tensor_meta": meta(sizes=[{"as_expr": "s0"}, {"as_int": 3}])},
        {"tensor_meta": meta(sizes=[2.0, 3])},
        {"tensor_meta": meta(sizes=None)},
        {"tensor_meta": meta(strides=[])},
        {"tensor_meta": meta(strides=[{"as_int": 2**62}, {"as_int": 1}])},
        {"tensor_meta": meta(storage_offset={"as_int": 1})},
        {"tensor_meta": meta(storage_offset=None)},
        {"use_pickle": True},
    ],
)
def test_entries_that_lie_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CkptoolError):
        opened({"w": entry(**changes)})


@pytest.mark.parametrize("device", [None, 5, {}, {"type": None}, {"type": "cpu", "index": {}}])
def test_devices_of_any_kind_are_only_reported(device: Any) -> None:
    assert isinstance(opened({"w": entry(tensor_meta=meta(device=device))}).tensors["w"].info.location, str)


def test_custom_objects_are_no_tensors() -> None:
    config = {
        "config": {"obj": {"path_name": "custom_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}
    }
    constants = {
        "data/constants/model_constants_config.json": json.dumps(config).encode(),
        "data/constants/custom_obj_0": b"whatever",
    }

    assert not opened({"w": entry()}, **constants).attributes


def test_a_pickled_weight_is_read_from_its_own_file() -> None:
    inner = build.torch_zip(build.tensor(build.storage("0", 6), (6,)), {"0": FLOATS})

    found = opened({"w": entry(use_pickle=True, path_name="weight_1")}, **{"data/weights/weight_1": inner})
    assert found.tensors["w"].read() == FLOATS


def test_two_programs_whose_names_run_together_are_refused() -> None:
    config = {"b.w": entry()}, {"w": entry()}
    members = {
        "archive_format": b"pt2",
        "data/weights/weight_0": FLOATS,
        "data/weights/a_weights_config.json": json.dumps({"config": config[0]}).encode(),
        "data/weights/a.b_weights_config.json": json.dumps({"config": config[1]}).encode(),
    }

    refused(build.zip_file(members), AmbiguousFile)


@each(("models", "names"), [(["model"], ["w"]), (["a", "b"], ["a.w", "b.w"]), ([], [])])
def test_the_only_program_of_an_archive_gives_its_tensors_no_prefix(models: list[str], names: list[str]) -> None:
    config = json.dumps({"config": {"w": entry()}}).encode()
    members = {"p/archive_format": b"pt2", "p/data/weights/weight_0": FLOATS}
    members |= {f"p/data/weights/{model}_weights_config.json": config for model in models}

    assert list(open_checkpoint(build.zip_file(members)).tensors) == names


def test_another_kind_of_archive_is_none() -> None:
    refused(build.zip_file({"x/archive_format": b"pt3", "x/data/weights/weight_0": FLOATS}))
