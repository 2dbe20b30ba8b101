"""A safetensors file's tensors are those that the reference reader gives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file, save_model

from ckptool import UnsupportedFeature, open_checkpoint
from tests.against_torch import oracle
from tests.each import each

if TYPE_CHECKING:
    from pathlib import Path


def assert_same_as_the_reference(path: Path) -> None:
    with safe_open(path, framework="pt") as reference, open_checkpoint(path) as found:
        assert found.format == "safetensors"
        assert sorted(found.tensors) == sorted(reference.keys())
        assert dict(found.metadata) == (reference.metadata() or {})
        for name in reference.keys():  # noqa: SIM118 - it is not a mapping
            oracle.assert_same_tensor(found.tensors[name], reference.get_tensor(name))


@each("name", oracle.SAFETENSORS_DTYPES)
def test_every_element_type_reads_as_the_reference_reads_it(name: str, tmp_path: Path) -> None:
    x = oracle.filled(name, (3, 4))
    save_file({"x": x, "row": x[1].clone()}, tmp_path / "x.safetensors")

    assert_same_as_the_reference(tmp_path / "x.safetensors")


def test_shapes_of_all_sorts_and_metadata_read_as_the_reference_reads_them(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0),
        "empty with dimensions": torch.empty(2, 0, 3, dtype=torch.int16),
        "ünïcode": torch.arange(3, dtype=torch.uint8),
        "a.b.c": torch.ones(1, 1, 1, 1, 2),
        "z": torch.arange(7, dtype=torch.int8),
        "": torch.ones(2),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "ключ": "значение", "empty": ""})

    assert_same_as_the_reference(tmp_path / "x.safetensors")


def test_a_file_without_tensors_and_one_of_tied_weights_read_as_the_reference_reads_them(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors", metadata={"note": "nothing"})
    assert_same_as_the_reference(tmp_path / "x.safetensors")
    assert open_checkpoint(tmp_path / "x.safetensors").form == "data"
    embedding = torch.nn.Embedding(5, 4)
    head = torch.nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    save_model(torch.nn.ModuleDict({"embedding": embedding, "head": head}), str(tmp_path / "x.safetensors"))

    assert_same_as_the_reference(tmp_path / "x.safetensors")


def test_names_keep_the_order_of_the_header_which_is_no_pickle_whatever_its_length() -> None:
    data = save({"b": torch.ones(2), "a": torch.ones(3, dtype=torch.float64), "c": torch.ones(1, dtype=torch.int8)})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(open_checkpoint(data).tensors) == [name for name in header if name != "__metadata__"]
    for padding in range(512):
        data = save({"x" * (1 + padding): torch.ones(1)})
        if data[0] == 0x80:
            assert open_checkpoint(data).format == "safetensors"
            return
    pytest.fail("no header of the right length")


def test_types_that_torch_has_no_name_for_are_named_when_refused() -> None:
    header = b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'

    with pytest.raises(UnsupportedFeature) as caught:
        open_checkpoint(len(header).to_bytes(8, "little") + header + bytes(3))
    assert caught.value.kind == "dtype"
