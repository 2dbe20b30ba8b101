"""Plain pickles with tensors inside them, and what merely looks like one."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

from ckptool import open_checkpoint
from tests import build
from tests.each import each
from tests.formats.said import refused


@each("protocol", range(6))
@each("content", [{"a": [1, 2.5, "ü"], "b": (None, True)}, [1, {"x": b"bytes"}], OrderedDict(a=1)])
def test_data_without_tensors_is_data(protocol: int, content: Any) -> None:
    checkpoint = open_checkpoint(pickle.dumps(content, protocol))

    assert (checkpoint.format, checkpoint.form, len(checkpoint.tensors)) == ("pickle", "data", 0)
    assert checkpoint.extras


def test_one_stream_for_several_tensors_is_one_storage() -> None:
    stream = build.legacy(build.storage(rest=(None,)), [("0", 4, build.floats())])
    stored = build.call(build.named("torch.storage", "_load_from_bytes"), build.raw(stream))
    tree = {"a": build.tensor(stored + b"q\x05"), "b": build.tensor(b"h\x05", (2,))}

    tensors = open_checkpoint(build.pickled(tree)).tensors
    assert tensors["a"].info.storage == tensors["b"].info.storage
    assert tensors["b"].read() == build.floats(2)


def test_bytes_behind_the_pickle_are_told_of() -> None:
    data = build.pickled({"w": build.inline_tensor()})

    assert open_checkpoint(data).notes == ()
    assert len(open_checkpoint(data + b"more").notes) == 1


SOUND = build.legacy(build.storage(rest=(None,)), [("0", 4, build.floats())])
STREAMS = (b"", b"not a stream", build.torch_zip({}), build.pickled({}), build.legacy({"a": 1}), SOUND[:-1])
"""What is no storage, and nothing else, or not all of one."""
TEXTS = (
    *(b"(this is a note in brackets)\n", b"]", b"} else {", b"class Net:\n    pass\n", b"layer1.weight\n"),
    *(b"config: 5\n", b"{}", b"(.", b"N.", b"I5\n.", b"cos\nsystem\n."),
)
"""What only begins like an old pickle."""


@each(
    "data",
    [
        *(build.pickled({"w": build.inline_tensor(stream)}) for stream in STREAMS),
        *TEXTS,
        *(bytes([0x80, protocol]) + b"N." for protocol in (6, 7, 0x80, 0xFF)),
        build.pickled({"w": build.tensor(build.storage())}),  # persistent ids mean nothing here
    ],
)
def test_what_is_no_pickle_or_holds_no_whole_storages_is_refused(data: bytes) -> None:
    refused(data)


def test_a_storage_that_is_elsewhere_is_data() -> None:
    assert open_checkpoint(build.pickled({"reference": build.storage()})).form == "data"
