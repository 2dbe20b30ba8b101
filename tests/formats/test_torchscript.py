"""TorchScript archives that torch does not write any more, or never wrote."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool import AmbiguousFile, Checkpoint, LimitExceeded, Limits, MalformedFile, open_checkpoint
from tests import build, zip_bytes
from tests.each import each
from tests.formats.said import refused

CODE = """class Net(Module):
  __parameters__ = ["weight", ]
  __buffers__ = ["mean", ]
  weight : Tensor
  mean : Tensor
  child : __torch__.Block
  def forward(self: __torch__.Net) -> Tensor:
    return self.weight
class Block(Module):
  __parameters__ = ["scale", ]
  __buffers__ = []
  scale : Tensor
class Pair(NamedTuple):
  first : Tensor
"""


def obj(cls: str, **state: Any) -> bytes:
    module, _, name = cls.rpartition(".")
    return build.named(module, name) + b")\x81" + build.ops(state) + b"b"


def vector() -> bytes:
    return build.tensor(build.storage())


def net(**more: Any) -> bytes:
    return obj(
        "__torch__.Net",
        training=True,
        mean=vector(),
        weight=vector(),
        child=obj("__torch__.Block", scale=vector()),
        **more,
    )


def opened(root: bytes, code: str | None = CODE, **members: bytes) -> Checkpoint:
    found = {} if code is None else {"archive/code/__torch__.py": code.encode()}
    return open_checkpoint(build.torch_zip(root, {"0": build.floats()}, members=found | members))


def test_the_code_says_what_is_a_parameter_and_what_a_buffer() -> None:
    checkpoint = opened(net(plain=vector()))

    assert {name: tensor.info.kind for name, tensor in checkpoint.tensors.items()} == {
        "weight": "parameter",
        "mean": "buffer",
        "child.scale": "parameter",
    }
    assert list(checkpoint.tensors) == ["weight", "mean", "child.scale"]
    assert list(checkpoint.attributes) == ["plain"]
    assert (checkpoint.form, checkpoint.format) == ("model", "torchscript")
    assert checkpoint.weights is not None
    assert checkpoint.weights.class_name == "Net"


def test_code_of_pytorch_1_4_lists_no_buffers_they_are_the_other_tensors() -> None:
    code = "".join(line for line in CODE.splitlines(keepends=True) if "__buffers__" not in line)
    checkpoint = opened(net(plain=vector(), number=3), code=code)

    kinds = {name: tensor.info.kind for name, tensor in checkpoint.tensors.items()}
    assert kinds == {"weight": "parameter", "mean": "buffer", "plain": "buffer", "child.scale": "parameter"}
    assert not checkpoint.attributes


def test_without_code_every_tensor_of_a_module_counts() -> None:
    checkpoint = opened(net(plain=vector()), code=None)

    assert list(checkpoint.tensors) == ["mean", "weight", "plain", "child.scale"]
    assert {tensor.info.kind for tensor in checkpoint.tensors.values()} == {None}


def test_classes_in_files_of_packages_are_found() -> None:
    code = b'class Layer(Module):\n  __parameters__ = ["w", ]\n  __buffers__ = []\n'
    root = obj("__torch__.torch.nn.linear.Layer", w=vector(), other=vector())
    members = {"archive/code/__torch__/torch/nn/linear.py": code}

    assert list(opened(root, code=None, **members).tensors) == ["w"]


@pytest.mark.parametrize(
    "name", ["__torch__.Pair", "__torch__.torch.classes.quantized.LinearPacked", "collections.OrderedDict"]
)
def test_objects_that_are_no_modules_are_none(name: str) -> None:
    checkpoint = opened(obj("__torch__.Net", training=True, weight=vector(), odd=obj(name, first=vector())))

    assert list(checkpoint.tensors) == ["weight"]
    assert list(checkpoint.attributes) == ["odd.first"]


def test_a_module_that_holds_itself_is_refused() -> None:
    looped = (
        build.named("__torch__", "Net")
        + b")\x81q\x01"
        + build.ops({"training": True, "child": b"h\x01", "weight": vector()})
        + b"b"
    )

    with pytest.raises(MalformedFile):
        opened(looped)


def test_a_scripted_model_has_as_many_tensors_and_as_long_names_as_allowed() -> None:
    data = build.torch_zip(net(), {"0": build.floats()}, members={"archive/code/__torch__.py": CODE.encode()})

    assert len(open_checkpoint(data, limits=Limits(tensors=3, name_nbytes=len("child.scale"))).tensors) == 3
    for limits in (Limits(tensors=2), Limits(name_nbytes=len("child.scale") - 1)):
        refused(data, LimitExceeded, limits=limits)


def test_constants_are_attributes_with_storages_of_their_own() -> None:
    constants = build.pickled((vector(),))
    members = {"archive/constants.pkl": constants, "archive/constants/0": b"\1" * 16}
    checkpoint = opened(net(), **members)

    assert checkpoint.attributes["constants.0"].read() == b"\1" * 16
    assert checkpoint.tensors["weight"].read() == build.floats()


def test_a_constant_without_its_storage_is_refused() -> None:
    with pytest.raises(MalformedFile) as caught:
        opened(net(), **{"archive/constants.pkl": build.pickled((vector(),))})
    assert caught.value.kind == "missing-storage"


@each(
    "code",
    [
        "",
        "class Net(Module):",
        "class Net(Module):\n  __parameters__ = [",
        'class Net(Module):\n  __parameters__ = ["weight", "',
        "class Net(Module):\n" * 1000,
        '  __parameters__ = ["weight", ]\n',
        "\0\xff" * 100,
        'class Net(Module):\r\n  __parameters__ = ["weight", ]\r\n',
    ],
)
def test_code_that_is_broken_is_no_error(code: str) -> None:
    checkpoint = opened(net(), code=code)

    assert checkpoint.format == "torchscript"
    assert {*checkpoint.tensors, *checkpoint.attributes} >= {"weight", "mean"}


def test_code_that_grows_out_of_bounds_is_refused() -> None:
    bombs = [
        zip_bytes.deflated(f"x/code/__torch__/m{n}.py", b"class A(Module):\n" + b"  x\n" * 3_900_000) for n in range(2)
    ]
    tree = [zip_bytes.stored("x/data.pkl", build.pickled(net())), zip_bytes.stored("x/data/0", build.floats())]

    bombs.append(zip_bytes.deflated("x/code/b.py", bytes(40 << 20)))

    refused(zip_bytes.whole([*tree, *bombs]), LimitExceeded)


def test_bytes_behind_the_tree_are_refused() -> None:
    root = build.pickled(net()) + b"\0"

    refused(build.zip_file({"x/data.pkl": root, "x/data/0": build.floats(), "x/code/__torch__.py": b""}), AmbiguousFile)


def test_a_torch_zip_that_only_mentions_the_word_is_none() -> None:
    checkpoint = opened(build.ops({"note": "c__torch__", "w": vector()}), code=None)

    assert checkpoint.format == "torch_zip"
    assert list(checkpoint.tensors) == ["w"]


@pytest.mark.parametrize("root", [build.ops(5), build.ops([1]), build.named("__torch__", "Net")])
def test_roots_of_other_kinds_are_data(root: bytes) -> None:
    assert opened(root).form == "data"
