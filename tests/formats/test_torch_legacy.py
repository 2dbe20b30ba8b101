"""What is peculiar to legacy streams: storages one behind the other, views of them, and sources of classes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

from ckptool import Checkpoint, MalformedFile, UnsupportedFeature, open_checkpoint
from tests import build
from tests.against_torch import oracle
from tests.formats.said import refused

FLOATS = build.floats()


def stored(key: Any = "0", numel: Any = 4, dtype: str = "FloatStorage", view: Any = None) -> bytes:
    return build.storage(key, numel, dtype, rest=(view,))


def opened(tree: Any, storages: Any = (("0", 4, FLOATS),), **more: Any) -> Checkpoint:
    return open_checkpoint(build.legacy(tree, storages, **more))


@pytest.mark.parametrize("protocol", range(6))
def test_streams_of_every_protocol_are_read(protocol: int) -> None:
    stream = io.BytesIO()
    content = {"w": torch.arange(6.0).reshape(2, 3).t(), "n": torch.tensor(3), "text": "ü"}
    # Its persistent ids are tuples, which protocol 0 cannot write: only the parts in front are of that protocol.
    torch.save(content, stream, _use_new_zipfile_serialization=False, pickle_protocol=max(protocol, 1))
    data = stream.getvalue()
    if protocol == 0:
        magic = pickle.dumps(0x1950A86A20F9469CFC6C, 1)
        data = pickle.dumps(0x1950A86A20F9469CFC6C, 0) + data[len(magic) :]

    with open_checkpoint(data) as checkpoint:
        assert checkpoint.format == "torch_legacy"
        oracle.assert_same(checkpoint, {"w": content["w"], "n": content["n"]})


def test_storages_follow_each_other_in_the_listed_order() -> None:
    tree = {"a": build.tensor(stored("10", 2), (2,)), "b": build.tensor(stored("9", 3, "ShortStorage"), (3,))}
    storages = [("9", 3, b"aabbcc"), ("10", 2, b"ddddeeee")]

    tensors = opened(tree, storages).tensors
    assert {name: tensor.read() for name, tensor in tensors.items()} == {"a": b"ddddeeee", "b": b"aabbcc"}


def test_keys_may_be_numbers_and_old_ids_have_no_view() -> None:
    tree = {"w": build.tensor(build.storage(12345))}

    assert opened(tree, [(12345, 4, FLOATS)]).tensors["w"].read() == FLOATS


def test_a_view_of_a_storage_is_cut_out_of_it() -> None:
    tree = {
        "root": build.tensor(stored()),
        "view": build.tensor(stored(view=("7", 1, 2)), (2,)),
        "rest": build.tensor(stored(view=("8", 3, 1)), (1,)),
    }

    tensors = opened(tree).tensors
    assert tensors["view"].read() == FLOATS[4:12]
    assert tensors["rest"].read() == FLOATS[12:]


def test_a_view_that_reaches_over_its_storage_says_both_sizes() -> None:
    with pytest.raises(MalformedFile) as caught:
        opened({"view": build.tensor(stored(view=("7", 2, 3)), (1,))})
    assert (caught.value.kind, caught.value.needed, caught.value.actual) == ("storage-size", 20, 16)


def test_two_references_that_agree_are_one_storage() -> None:
    tensors = opened({"a": build.tensor(stored()), "b": build.tensor(stored(), (2,))}).tensors

    assert tensors["a"].info.storage == tensors["b"].info.storage


def test_what_follows_is_told_of() -> None:
    data = build.legacy({"w": build.tensor(stored())}, [("0", 4, FLOATS)])

    assert open_checkpoint(data).notes == ()
    assert len(open_checkpoint(data + b"junk").notes) == 1
    assert open_checkpoint(data + data).notes != open_checkpoint(data + b"junk").notes


@pytest.mark.parametrize("version", [1000, 1002, -1, "1001", None, 1001.5])
def test_another_protocol_version_is_named(version: Any) -> None:
    data = build.legacy({}).replace(build.pickled(1001), build.pickled(version))

    assert refused(data, UnsupportedFeature).kind == "future-version"


def test_sources_of_classes_are_kept_as_text() -> None:
    cls = build.ops(("module", build.named("models", "Net"), "/home/x/models.py", "class Net:\n    import os\n")) + b"Q"
    node = cls + b")\x81" + build.ops({"training": True}) + b"b"

    found = opened({"model": node, "again": node}, [])
    assert [(source.name, source.path) for source in found.class_sources] == [("models.Net", "/home/x/models.py")]
    assert found.class_sources[0].text == "class Net:\n    import os\n"


@pytest.mark.parametrize("source", [(None, None), (5, "x"), ("path", None)])
def test_classes_without_a_source_have_none(source: Any) -> None:
    node = build.ops(("module", build.named("models", "Net"), *source)) + b"Q)\x81" + build.ops({"x": 1}) + b"b"

    assert opened({"model": node}, []).class_sources == ()
