"""The table of element types against torch's own lists, and the reference reader's."""

from __future__ import annotations

import json
import re

import pytest
import safetensors
import torch

from ckptool import DType
from ckptool.tensors.dtypes import BY_NAME, BY_PT2, BY_SAFETENSORS, BY_STORAGE_CLASS, DTYPES
from tests.each import each

# torch names these and cannot save them: `dtype torch.int4 is not recognized`.
UNSAVABLE = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
TORCH = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def named(name: str) -> DType:
    return BY_NAME[name]


@each("name", sorted(TORCH.keys() - UNSAVABLE))
def test_every_type_that_torch_saves_has_a_row(name: str) -> None:
    row = named(name)

    assert row.name == name
    assert row.itemsize == TORCH[name].itemsize
    assert row.itemsize == row.swap_nbytes * (2 if TORCH[name].is_complex else 1)  # complex ones swap by halves


@each("dtype", DTYPES)
def test_every_row_is_a_type_of_torchs(dtype: DType) -> None:
    assert dtype.name in TORCH or dtype.name == "bcomplex32"  # of torch 2.14


def test_torchs_other_spellings_are_known() -> None:
    aliases = {
        name: str(dtype).removeprefix("torch.") for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
    }

    for alias, name in aliases.items():
        if name not in UNSAVABLE:
            assert named(alias) is named(name)


def test_every_storage_class_of_torchs_has_its_type() -> None:
    classes = torch.storage._dtype_to_storage_type_map()

    assert {row.storage_class: TORCH[row.name] for row in DTYPES if row.storage_class} == {
        name: dtype for dtype, name in classes.items()
    }
    assert BY_STORAGE_CLASS.keys() == set(classes.values())


def test_every_storage_class_that_torch_exports_is_known() -> None:
    exported = {name for name in vars(torch) if re.fullmatch(r"\w+Storage", name) and not name.startswith("_")}

    assert exported - {"UntypedStorage", "TypedStorage"} == BY_STORAGE_CLASS.keys()


def test_the_numbers_of_exported_programs_are_the_schemas() -> None:
    from torch._export.serde import schema, serialize

    numbers = {int(number): dtype for dtype, number in serialize._TORCH_TO_SERIALIZE_DTYPE.items()}
    assert {number: TORCH[row.name] for number, row in BY_PT2.items()} == numbers
    assert {int(member) for member in schema.ScalarType} - {int(schema.ScalarType.UNKNOWN)} == set(BY_PT2)


def test_the_codes_of_safetensors_are_its_own() -> None:
    from safetensors.torch import _TYPES

    theirs = {code: dtype for code, dtype in _TYPES.items() if isinstance(dtype, torch.dtype)}
    ours = {code: TORCH[row.name] for code, row in BY_SAFETENSORS.items()}
    assert theirs.items() <= ours.items()
    assert ours.keys() - theirs.keys() <= {"F4", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"}


@each("code", BY_SAFETENSORS)
def test_every_code_means_as_many_bytes_as_the_reference_thinks(code: str) -> None:
    row = BY_SAFETENSORS[code]
    size = 2 if code == "F4" else 1
    header = json.dumps({"x": {"dtype": code, "shape": [size], "data_offsets": [0, row.itemsize]}}).encode()

    safetensors.deserialize(len(header).to_bytes(8, "little") + header + bytes(row.itemsize))


@pytest.mark.parametrize(("name", "values"), [("quint4x2", 2), ("quint2x4", 4)])
@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
def test_types_of_less_than_a_byte_are_packed_as_torch_packs_them(name: str, values: int) -> None:
    scales = torch.ones(2)
    packed = torch.quantize_per_channel(torch.zeros(2, 7), scales, torch.zeros(2), 0, TORCH[name])

    assert named(name).packed == values
    assert packed.untyped_storage().nbytes() == 2 * -(-7 // values)
