"""
``check --deep``: every byte is read, damage is named, and nothing is called damaged that only has no checksum.

Indices of sparse tensors that point beside their values are found, as torch itself judges them.
"""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import CheckReport, check, open_checkpoint
from ckptool.reports import Finding
from tests import zip_bytes
from tests.build import floats, pickled, storage, tensor
from tests.program import VALID
from tests.scale import scaled, step, times
from tests.zip_bytes import stored, whole


def saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def contents(data: bytes) -> object:
    """Return all that anyone can read out of a checkpoint."""
    with open_checkpoint(data) as checkpoint:
        return (
            [(name, tensor.info._replace(storage=None), tensor.read()) for name, tensor in checkpoint.tensors.items()],
            [(path, repr(node)) for path, node in checkpoint.extras],
            [str(found) for found in checkpoint.globals],
            checkpoint.form,
        )


def codes(report: CheckReport) -> dict[str, str]:
    return {finding.code: finding.severity for finding in report.findings}


@scaled
def test_no_flipped_bit_of_a_zip_changes_what_is_read_without_an_error() -> None:
    good = saved({"w": torch.arange(6.0).reshape(2, 3), "step": 7})
    expected = contents(good)
    assert check(good, deep=True).worst is None
    noticed = 0
    for bit in range(0, 8 * len(good), step(31, 5)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        if check(bytes(data), deep=True).worst == "error":
            noticed += 1
        else:
            assert contents(bytes(data)) == expected, bit
    assert noticed > 4 * len(good) // step(31, 5)


def test_damage_names_the_record_and_the_tensors_in_it(tmp_path: Path) -> None:
    weights = {"first": torch.arange(4.0), "second": torch.arange(4.0) + 100}
    data = bytearray(saved(weights))
    data[data.index(weights["second"].numpy().tobytes())] ^= 1
    path = tmp_path / "x.pth"
    path.write_bytes(data)

    assert check(path).worst is None  # the quick look does not read tensors, and says so
    assert "structure alone" in check(path).verdict
    report = check(path, deep=True)
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("CK105", "error")
    assert "/data/1' is damaged: its CRC-32 is " in finding.message
    assert finding.message.endswith("it holds second")
    assert report.records is not None
    assert report.matching == report.records - 1


def test_files_saved_without_checksums_are_not_called_damaged() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved({"w": torch.arange(4.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    report = check(data, deep=True)

    assert codes(report) == {"CK104": "info"}
    assert report.matching == 0
    assert "no checksums, so a changed byte would not show" in report.verdict


@pytest.mark.parametrize("name", ["state-dict-plain-cpu-legacy.pth", "safetensors-float32-cpu.safetensors"])
def test_formats_without_checksums_say_so_in_the_verdict(name: str) -> None:
    report = check(VALID / name, deep=True)

    assert report.worst is None
    assert "no checksums, so a changed byte would not show" in report.verdict


def deflated(data: bytes, *, wrong: bool = False) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry))
    result = target.getvalue()
    if wrong:  # the checksum of the tensor's record, in its local header and in the directory
        with zipfile.ZipFile(io.BytesIO(result)) as archive:
            crc = next(e.CRC for e in archive.infolist() if e.filename.endswith("data/0")).to_bytes(4, "little")
        result = result.replace(crc, bytes([crc[0] ^ 1]) + crc[1:])
    return result


@scaled
def test_deflated_records_are_inflated_and_checked() -> None:
    data = saved({"w": torch.arange(float(times(500_000, 3_000_000)))})

    assert check(deflated(data), deep=True).worst is None
    assert codes(check(deflated(data, wrong=True), deep=True))["CK105"] == "error"


def test_an_archive_in_an_archive_is_checked_at_both_levels() -> None:
    inner = bytearray(saved({"w": torch.arange(4.0)}))
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("policy.pth", bytes(inner))
    assert check(outer.getvalue(), deep=True).worst == "info"

    inner[inner.index(torch.arange(4.0).numpy().tobytes()) + 4] ^= 1  # damaged before it was packed
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("policy.pth", bytes(inner))
    assert codes(check(outer.getvalue(), deep=True))["CK105"] == "error"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_values_that_no_training_wants_are_found(dtype: torch.dtype) -> None:
    good = torch.ones(8, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    with_nan, infinite, mask = good.clone(), good.clone(), torch.zeros(8)
    with_nan[3] = math.nan
    infinite[5] = math.inf
    mask[2] = -math.inf
    tensors = {"good": good, "nan": with_nan, "inf": infinite, "mask": mask, "zero": torch.zeros(8)}
    report = check(saved({name: tensor.to(dtype) for name, tensor in tensors.items()}), values=True)

    found = [(finding.code, finding.severity, finding.message) for finding in report.findings]
    assert ("CK110", "warning", "values that are not numbers (NaN): nan (1 of 8)") in found
    assert ("CK111", "warning", "infinite values: inf (1 of 8)") in found
    assert (
        "CK111",
        "info",
        "infinities or NaN in masks, in ranges that have seen no value, or beside the weights: mask",
    ) in found
    assert ("CK112", "info", "1 tensor all zero: zero") in found
    assert {code for code, _, _ in found} - {"CK504"} == {"CK110", "CK111", "CK112"}


def test_a_shard_or_a_file_of_zeros_is_a_warning(tmp_path: Path) -> None:
    weights = {f"{name}.weight": torch.ones(2, 2) for name in "abcd"}
    torch.save(weights, tmp_path / "a.pth")
    ckptool.migrate(tmp_path / "a.pth", tmp_path / "whole", max_shard_size=32)
    shard = sorted(tmp_path.glob("whole/*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-32] + bytes(32))
    blank, usual = {name: torch.zeros(2, 2) for name in weights}, {**weights, "e.bias": torch.zeros(2)}
    reports = [check(one, values=True) for one in (tmp_path / "whole", saved(blank), saved(usual))]
    found = [next(one for one in report.findings if one.code == "CK112") for report in reports]

    assert [one.severity for one in found] == ["warning", "warning", "info"]
    assert found[0].message == f"nearly all weights in {shard.name} are zero: c.weight, d.weight"


def like_trained(*shape: int) -> torch.Tensor:
    return torch.linspace(-0.05, 0.05, math.prod(shape)).reshape(shape) + 0.001


def damaged(kind: str) -> dict[str, torch.Tensor]:
    weight = like_trained(64, 64)
    if kind == "far":
        weight[5, 5] = 1.2e38
    elif kind == "far, of halves":
        weight = weight.bfloat16()
        weight[-1, -1] = -3e35
    elif kind == "far, two of doubles":
        weight = weight.double()
        weight.view(-1)[[7, 4000]] = torch.tensor([1e9, -1e200], dtype=torch.float64)
    elif kind == "a block":
        weight.view(-1)[1024:2048] = 0
    elif kind == "a larger block, of halves":
        weight = like_trained(128, 128).half()
        weight.view(-1)[4096:8192] = 0
    else:
        weight = like_trained(5000)
        weight[1024:3072] = 0
    return {"a.weight": like_trained(40, 40), "b.weight": weight}


@pytest.mark.parametrize(
    "kind",
    ["far", "far, of halves", "far, two of doubles", "a block", "a larger block, of halves", "a block of no rows"],
)
def test_values_unlike_all_others_are_a_note(kind: str) -> None:
    found = [one for one in check(saved(damaged(kind)), values=True).findings if one.code == "CK119"]

    assert [one.severity for one in found] == ["info"]
    assert "b.weight (" in found[0].message
    assert "a.weight" not in found[0].message


def test_zeros_and_wide_values_that_models_have_are_none() -> None:
    padding, vocabulary, pruned = like_trained(100, 1024), like_trained(100, 64), like_trained(64, 64)
    padding[3] = 0
    vocabulary[-20:] = 0
    pruned.view(-1)[::2] = 0
    apart = like_trained(64, 64)
    apart.view(-1)[1024:2048] = 0
    apart[0, 0] = 0
    frequencies = 1.0 / 10000 ** (torch.arange(0, 4096, 2) / 4096) ** 2
    mask = torch.full((64, 64), torch.finfo(torch.float32).min).triu(1)
    state = {
        "padding.weight": padding,
        "vocabulary.weight": vocabulary,
        "pruned.weight": pruned,
        "apart.weight": apart,
        "inv_freq": frequencies,
        "mask": mask,
        "outlier.weight": torch.cat([like_trained(4000), torch.tensor([300.0])]),
    }
    moments = {"state": {0: {"exp_avg_sq": torch.cat([torch.full((4095,), 1e-20), torch.ones(1)])}}, "param_groups": []}
    report = check(saved({"model": state, "optimizer": moments}), values=True)

    assert "CK119" not in codes(report)


def test_whole_numbers_are_only_looked_at_for_zeros() -> None:
    report = check(saved({"a": torch.full((4,), -1), "b": torch.zeros(4, dtype=torch.bool)}), values=True)

    assert [finding.message for finding in report.findings] == ["1 tensor all zero: b"]


def test_values_in_large_tensors_are_read_in_pieces() -> None:
    tensor = torch.ones(3_000_000)
    tensor[-1] = math.nan
    report = check(saved({"w": tensor}), values=True)

    assert [finding.message for finding in report.findings] == ["values that are not numbers (NaN): w (1 of 3,000,000)"]


def test_a_member_that_would_grow_beyond_what_is_allowed_is_a_finding() -> None:
    tree = stored("archive/data.pkl", pickled({"w": tensor(storage())}))
    claims = zip_bytes.deflated("archive/other", b"3\n", nbytes=(1 << 32) - 2)

    report = check(whole([tree, stored("archive/data/0", floats()), claims]), deep=True)

    assert report.error is None
    assert codes(report) == {"CK105": "error", "CK209": "warning"}
    assert any("4,294,967,294 bytes" in finding.message for finding in report.findings)


def test_the_range_of_an_observer_that_saw_nothing_is_no_divergence() -> None:
    from torch.ao.quantization.observer import MinMaxObserver

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), MinMaxObserver())
    found = [one for one in check(saved(model.state_dict()), values=True).findings if one.code == "CK111"]
    assert [one.severity for one in found] == ["info"]
    assert "1.min_val, 1.max_val" in found[0].message

    state = {
        "a.min_val": torch.tensor([math.inf, 1.0]),
        "b.minor": torch.tensor(math.inf),
    }  # seen in part; another word
    found = [one for one in check(saved(state), values=True).findings if one.code == "CK111"]
    assert [one.severity for one in found] == ["warning"]


def test_values_of_every_type_are_looked_at() -> None:
    types = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    whole = {one for one in types if not re.match(r"torch\.(q|bits|u?int[1-7]$)", str(one))}  # saved as others, or not
    bytes_of = {"zero": torch.zeros(64, dtype=torch.uint8), "some": torch.full((64,), 0x21, dtype=torch.uint8)}
    state = {f"{dtype}.{name}": data.clone().view(dtype) for dtype in whole for name, data in bytes_of.items()}
    found = [one for one in check(saved(state), values=True).findings if one.code.startswith("CK11")]

    zeros = len(whole) - (torch.float8_e8m0fnu in whole)  # which has none
    assert [(one.code, one.message.partition(":")[0]) for one in found] == [("CK112", f"{zeros} tensors all zero")]


@pytest.mark.parametrize(("byte", "codes"), [(b"\x12", set()), (b"\x80", {"CK112"})])
def test_values_of_float4_are_looked_at(byte: bytes, codes: set[str], tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + byte)
    report = check(path, values=True)

    assert {one.code for one in report.findings if one.code.startswith("CK11")} == codes


warnings.filterwarnings("ignore", message="Sparse .* is in beta")

DENSE = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 4.0, 5.0, 6.0]])
LAYOUTS: dict[str, tuple[torch.Tensor, tuple[str, ...]]] = {
    "coo": (DENSE.to_sparse().coalesce(), ("indices",)),
    "coo of rows": (DENSE.to_sparse(1).coalesce(), ("indices",)),
    "csr": (DENSE.to_sparse_csr(), ("crow_indices", "col_indices")),
    "csc": (DENSE.to_sparse_csc(), ("ccol_indices", "row_indices")),
    "bsr": (DENSE.to_sparse_bsr((2, 2)), ("crow_indices", "col_indices")),
    "bsc": (DENSE.to_sparse_bsc((2, 2)), ("ccol_indices", "row_indices")),
    "csr, several": (torch.stack([DENSE, DENSE.flip(0)]).to_sparse_csr(), ("crow_indices", "col_indices")),
}


def checked(state: dict[str, torch.Tensor], **options: bool) -> dict[str, Finding]:
    """Return what a deep check finds in a file of these tensors, by code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {finding.code: finding for finding in check(buffer.getvalue(), deep=True, **options).findings}


def parts(tensor: torch.Tensor, names: tuple[str, ...]) -> list[torch.Tensor]:
    return [getattr(tensor, name)().clone() for name in names]


def made(tensor: torch.Tensor, found: list[torch.Tensor], **options: Any) -> torch.Tensor:
    if tensor.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(found[0], tensor.values(), tensor.shape, **options)
    return torch.sparse_compressed_tensor(*found, tensor.values(), tensor.shape, layout=tensor.layout, **options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sound_indices_are_no_finding(name: str) -> None:
    assert "CK108" not in checked({"w": LAYOUTS[name][0]})


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_index_is_outside_where_torch_says_so(name: str) -> None:
    tensor, names = LAYOUTS[name]
    refused = 0
    for which, part in enumerate(parts(tensor, names)):
        for place in range(0, part.numel(), step(5)):
            for value in (-1, 0, 1, 2, 3, 4, 6, 7, 1 << 40):
                found = parts(tensor, names)
                found[which].view(-1)[place] = value
                reason = ""
                try:
                    made(tensor, found, check_invariants=True)
                except RuntimeError as error:
                    reason = str(error)
                with torch.sparse.check_sparse_tensor_invariants(enable=False):
                    is_found = "CK108" in checked({"w": made(tensor, found)})
                # That a row has its columns once, and in order, is asked first, and only matters to kernels.
                assert is_found is bool(reason) or "distinct" in reason, (which, place, value, reason)
                refused += is_found
    assert refused


def test_looking_at_values_costs_no_more_than_the_file_may() -> None:
    base = torch.zeros(8, dtype=torch.int64)
    views = {str(number): base.as_strided((1 << 20, 2 + number), (0, 0)) for number in range(30)}

    assert checked(views, values=True)["CK113"].message.endswith(", or too many: 2, 3, 4 and 25 more")


@pytest.mark.parametrize("are_alike", [True, False])
def test_indices_that_many_tensors_share_are_not_read_for_each(are_alike: bool) -> None:
    indices, values = torch.arange(1 << 20).reshape(1, -1), torch.zeros(1 << 20)
    sizes = [2_000_000 if are_alike else 2_000_000 + number for number in range(24)]
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        state = {str(number): torch.sparse_coo_tensor(indices, values, (size,)) for number, size in enumerate(sizes)}
    found = checked(state).get("CK108")

    assert (found is None) is are_alike  # of one pattern, they are looked at once
    assert found is None or (found.severity, "12, 13, 14" in found.message) == ("info", True)
